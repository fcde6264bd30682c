"""Sweep files: what was recorded comes back, equal sweeps are equal bytes, and a damaged file is named as such."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Environment, Outcome, Regime, Telemetry, Trial
from blocktune.kernels.values.errors import ImportRejectedError, UsageError
from blocktune.tuner.lab import sweep_file
from blocktune.tuner.lab.sweep_file import SUFFIX, Sweep, load_sweep, save_sweep, sweep_files, sweeps_of
from tests.support.models import landscape

pytestmark = pytest.mark.triton_free

START = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def trials(count: int = 40) -> list[Trial]:
    """Every kind of outcome that the landscape has."""
    made = []
    for index, config in enumerate(landscape.SPACE.feasible[:count]):
        resources = landscape.resources_of(config)
        found = landscape.measurement(config, 0)
        outcome = Outcome.COMPILE_ERROR if resources is None else found.outcome
        ok = outcome is Outcome.OK
        trial = landscape.SUBJECT.trial(
            config,
            outcome,
            resources=resources,
            time_us=found.time_us if ok else None,
            samples_us=found.samples_us if ok else (),
            relative_to_anchor=found.relative_to_anchor if ok else None,
            error="" if ok else "failed, änd says why",
            predicted_us=1234.5,
            occupancy=0.5,
            compile_seconds=0.51234,
            bench_seconds=0.1,
            telemetry=Telemetry(sm_clock_mhz=1980, power_w=512.25) if ok else Telemetry(),
            created_at=START + timedelta(seconds=index),
        )
        made.append(replace(trial, kernel_hash="0123456789abcdef"))
    return made


def sweep() -> Sweep:
    (found,) = sweeps_of(trials())
    return found


def test_each_regime_is_a_sweep_and_a_file_of_its_own(tmp_path: Path) -> None:
    rested = [replace(trial, environment=replace(trial.environment, regime=Regime.BURST)) for trial in trials(count=20)]
    cool, hot = sweeps_of([*rested, *trials()])
    assert (len(cool.trials), len(hot.trials)) == (20, 40)
    assert cool.file_name == hot.file_name.replace(".sweep", "-burst.sweep")
    assert load_sweep(save_sweep(cool, tmp_path)).environment.regime is Regime.BURST
    assert load_sweep(save_sweep(hot, tmp_path)).environment == hot.environment


def test_a_config_that_a_race_stopped_was_not_tried_completely() -> None:
    whole = sweep()
    first = next(iter(whole.timed))
    shortened = tuple(
        replace(trial, samples_us=trial.samples_us[:2]) if trial.config == first else trial for trial in whole.trials
    )
    assert whole.environment.protocol == 1  # when two rounds were all that some had
    assert len(replace(whole, trials=shortened).complete) == len(whole.trials)
    raced = replace(whole.environment, protocol=2)
    assert replace(whole, trials=shortened, environment=raced).complete == whole.complete - {first}


def test_a_file_holds_all_that_was_recorded(tmp_path: Path) -> None:
    before = sweep()
    after = load_sweep(save_sweep(before, tmp_path))
    assert {trial.outcome for trial in after.trials} >= {Outcome.OK, Outcome.WRONG_RESULT, Outcome.COMPILE_ERROR}
    assert (after.device.key, after.environment, after.shape) == (
        before.device.key,
        before.environment,
        before.shape,
    )
    written = {trial.config: trial for trial in before.trials}
    assert len(after.trials) == len(written)
    for trial in after.trials:
        old = written[trial.config]
        for name in ("kernel_hash", "outcome", "resources", "error", "created_at"):
            assert getattr(trial, name) == getattr(old, name)
        assert trial.samples_us == tuple(round(sample, 3) for sample in old.samples_us)
        assert trial.telemetry.sm_clock_mhz == old.telemetry.sm_clock_mhz
        assert trial.predicted_us is None  # follows from the rest


def test_equal_sweeps_are_equal_bytes(tmp_path: Path) -> None:
    path = save_sweep(sweep(), tmp_path)
    first = path.read_bytes()
    again = load_sweep(path)
    shuffled = replace(again, trials=tuple(reversed(again.trials)))
    assert save_sweep(shuffled, tmp_path) == path
    assert path.read_bytes() == first
    assert path.name == "h200-b2-h32-s8192-d64-bf16" + SUFFIX
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_youngest_software_and_kernel_source_count() -> None:
    old = trials(6)
    upgraded = Environment(triton="3.7.0", ptxas="13.0", torch="2.12")
    new = [replace(trial, environment=upgraded, created_at=trial.created_at + timedelta(days=1)) for trial in old[:4]]
    changed = replace(new[0], kernel_hash="f" * 16, created_at=START + timedelta(days=2))
    (found,) = sweeps_of([changed, *old, *new])
    assert found.environment == upgraded
    assert {trial.kernel_hash for trial in found.trials if trial.config.kernel == changed.config.kernel} == {"f" * 16}
    other = replace(old[0], shape=replace(landscape.SHAPE, seqlen_q=4096, seqlen_k=4096))
    assert [entry.shape.seqlen_q for entry in sweeps_of([*old, other])] == [4096, 8192]
    predicted = replace(old[0], outcome=Outcome.PREDICTED)
    assert sweeps_of([predicted]) == []


def _shorter(document: dict[str, Any]) -> None:
    document["columns"]["outcome"].pop()


def _twice(document: dict[str, Any]) -> None:
    for column in document["columns"].values():
        column.append(column[0])


def _negative(document: dict[str, Any]) -> None:
    document["columns"]["time_us"][0] = -1.0


def _unknown(document: dict[str, Any]) -> None:
    document["columns"]["command"] = ["rm"] * len(document["columns"]["outcome"])


def _nested(document: dict[str, Any]) -> None:
    document["columns"]["outcome.kind"] = list(document["columns"]["outcome"])


def _flat(document: dict[str, Any]) -> None:
    document["columns"]["config"] = list(document["columns"]["outcome"])


def _empty(document: dict[str, Any]) -> None:
    document["columns"] = {}


def _newer(document: dict[str, Any]) -> None:
    document["schema"] = 99


def _hostile_environment(document: dict[str, Any]) -> None:
    document["environment"]["shell"] = "sh"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_shorter, "columns of equal length"),
        (_twice, "one trial of every config"),
        (_negative, "time_us"),
        (_unknown, "command"),
        (_nested, "and not `outcome.kind`"),
        (_flat, "and not `config`"),
        (_empty, "columns of equal length"),
        (_newer, "schema"),
        (_hostile_environment, "environment"),
    ],
)
def test_a_damaged_document_is_rejected(tmp_path: Path, damage: Callable[[dict[str, Any]], None], told: str) -> None:
    path = save_sweep(sweep(), tmp_path)
    document = json.loads(gzip.decompress(path.read_bytes()))
    damage(document)
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    with pytest.raises(ImportRejectedError, match=told):
        load_sweep(path)


def test_no_gzip_no_json_and_too_much_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_sweep(sweep(), tmp_path)
    whole = path.read_bytes()
    for content in (b"plain", whole[:-20], gzip.compress(b"[1"), gzip.compress(b"[" * 200_000), b""):
        path.write_bytes(content)
        with pytest.raises(ImportRejectedError, match=path.name):
            load_sweep(path)
    path.write_bytes(whole)
    monkeypatch.setattr(sweep_file, "DOCUMENT_BYTES", 1024)
    with pytest.raises(ImportRejectedError, match="it is larger than 1 KiB"):
        load_sweep(path)


def test_places_are_files_or_folders_with_files(tmp_path: Path) -> None:
    path = save_sweep(sweep(), tmp_path)
    assert sweep_files([tmp_path]) == sweep_files([path]) == [path]
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(UsageError, match="tune lab sweeps"):
            sweep_files([place])
    with pytest.raises(UsageError, match="No sweep can be written to"):
        save_sweep(sweep(), tmp_path / "none")


def test_of_two_sweeps_of_a_shape_the_one_of_the_last_place_counts(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        save_sweep(sweep(), folder)
    assert sweep_files([old, new]) == [new / sweep().file_name]
    assert sweep_files([new, old]) == [old / sweep().file_name]


def test_a_link_that_waits_where_a_sweep_is_written_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in (sweep().file_name, f".{sweep().file_name}.new"):
        (tmp_path / name).symlink_to(victim)
    path = save_sweep(sweep(), tmp_path)
    assert victim.read_text() == "mine"
    assert len(load_sweep(path).trials) == len(sweep().trials)
