"""Freezing, merging, comparing, cleaning and recovering, as people do it."""

import json
import re
import shlex
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import typer.main

from blocktune.cli.main import app
from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Best, Environment, Outcome, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.driver import DriverReport
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.runtime.store_reader.sources import JsonConfigs
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.measure.protocol import PROTOCOL_VERSION
from tests.support.stores.frozen_files import KERNEL, autotuned_winner


def other_config(best: Best, block_m: int) -> KernelConfig:
    return KernelConfig.of(best.config.kernel, best.config.parameters | {"block_m": block_m})


def trial_of(best: Best, **changes: object) -> Trial:
    trial = Trial(
        device=best.device,
        environment=best.environment,
        shape=best.shape,
        config=best.config,
        kernel_hash=best.kernel_hash,
        outcome=Outcome.OK,
        time_us=best.time_us,
        relative_to_anchor=1.0,
        created_at=best.created_at,
    )
    return replace(trial, **changes)


def keep(tune, *records: Best | Trial) -> None:
    """Put winners and trials into the database, as they are."""
    bests = tuple(each for each in records if isinstance(each, Best))
    trials = tuple(each for each in records if isinstance(each, Trial))
    with ResultStore.open(tune.db) as store:
        store.merge([Results(bests=bests, trials=trials)], trust=True)


def origins(tune) -> list[str]:
    return [best["best"]["origin"] for best in json.loads(tune("list", "--json").stdout)["bests"]]


def test_a_frozen_file_is_the_same_on_every_rank_and_the_dispatcher_takes_it(tune, winner, tmp_path: Path) -> None:
    shapes = [complete_shape(seq, 64) for seq in (1024, 8192)]
    files = []
    for rank, order in enumerate((1, -1)):
        tune.db = tmp_path / f"rank{rank}.db"
        tune.store(*(winner(shape=shape) for shape in shapes[::order]))
        files.append(tmp_path / f"rank{rank}.json")
        result = tune("freeze", files[-1], "--json")
        assert result.exit_code == 0, result.stderr
        (frozen,) = json.loads(result.stdout)["files"]
        assert frozen["bests"] == 2
        assert frozen["bytes"] == files[-1].stat().st_size < 2000
    assert files[0].read_bytes() == files[1].read_bytes()
    assert json.loads(files[0].read_text())["sha256"] == frozen["sha256"]
    taken = JsonConfigs(files[0]).configs(device_named("h200"))  # what a dispatcher reads its configs from
    assert [(each.shape, each.config, each.time_us) for each in taken] == [
        (shape, winner().config, winner().time_us) for shape in shapes
    ]


def test_freezing_all_devices_makes_a_file_for_each(tune, winner, tmp_path: Path) -> None:
    hostile = replace(device_named("a100"), name="../../x [red]<script>")
    tune.store(winner(), winner(device=device_named("h100-sxm")), winner(device=hostile))
    refused = tune("freeze", tmp_path / "one.json")
    assert refused.exit_code == 2
    assert "--device, or freeze each by --all" in refused.stderr
    assert tune("freeze", tmp_path / "one.json", "--device", "h200").exit_code == 0
    assert tune("freeze", tmp_path / "all", "--all").exit_code == 0
    names = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert names == ["nvidia-h100-80gb-hbm3-9-0-132.json", "nvidia-h200-9-0-132.json", "x-red-script-8-0-108.json"]
    assert (tmp_path / "all" / names[1]).read_bytes() == (tmp_path / "one.json").read_bytes()


def test_nothing_to_freeze_is_exit_code_6(tune, winner, tmp_path: Path) -> None:
    assert tune("freeze", tmp_path / "out.json").exit_code == 6
    assert not tune.db.exists()
    tune.store(winner())
    assert tune("freeze", tmp_path / "out.json", "--device", "a100").exit_code == 6
    assert tune("freeze", tmp_path / "no" / "folder.json").exit_code == 2
    assert not (tmp_path / "out.json").exists()


def test_a_frozen_file_that_was_changed_is_refused(tune, winner, tmp_path: Path) -> None:
    tune.store(winner())
    file = tmp_path / "h200.json"
    tune("freeze", file)
    file.write_text(file.read_text().replace('"num_stages":3', '"num_stages":4'))
    tune.db = tmp_path / "other.db"
    result = tune("import", file)
    assert result.exit_code == 2
    assert "changed after it was frozen" in result.stderr


def test_the_results_of_several_machines_become_one(tune, winner, tmp_path: Path) -> None:
    slow, fast = winner(time_us=900.0), winner(time_us=800.0, created_at=winner().created_at - timedelta(days=1))
    only_there = winner(shape=complete_shape(1024, 64))
    for name, records in (("a.db", (slow, trial_of(slow))), ("b.db", (fast, only_there, trial_of(fast)))):
        tune.db = tmp_path / name
        keep(tune, *records)
    tune("export", tmp_path / "b.json", "--trials")
    tune.db = tmp_path / "fleet.db"
    result = tune("merge", tmp_path / "a.db", tmp_path / "b.json", "--trust", "--json")
    assert result.exit_code == 0, result.stderr
    assert {"bests": 2, "bests_kept": 1, "trials": 1, "trials_kept": 1}.items() <= json.loads(result.stdout).items()
    listed = {best["shape"]["seqlen_q"]: best["best"] for best in json.loads(tune("list", "--json").stdout)["bests"]}
    assert (listed[8192]["time_us"], listed[8192]["origin"]) == (800.0, "measured")
    assert 1024 in listed


def test_a_merge_into_a_database_of_its_own_says_what_was_left_out(tune, winner, tmp_path: Path) -> None:
    """No database of that name was there: nothing can have been kept in it."""
    tune.db = tmp_path / "a.db"
    tune.store(winner())
    tune("export", tmp_path / "a.json")
    tune.db = tmp_path / "fleet.db"
    result = tune("merge", tmp_path / "a.db", tmp_path / "a.json", "--trust")
    assert result.stderr == (
        "stored 1 winner and 0 trials; left out 1 winner that lost to others and 0 trials not newer\n"
    )


def test_winners_of_autotuned_kernels_are_merged_and_compared(tune, winner, tmp_path: Path) -> None:
    for name, blocks in (("a.db", (64, 128)), ("b.db", (128, 256))):
        tune.db = tmp_path / name
        keep(tune, winner(), *map(autotuned_winner, blocks), *(trial_of(autotuned_winner(block)) for block in blocks))
    tune("export", tmp_path / "b.json", "--trials")
    found = json.loads(tune("diff", tmp_path / "a.db", tmp_path / "b.json", "--json").stdout)["differences"]
    assert [(each["change"], each["shape"]["kernel"]) for each in found] == [("removed", KERNEL), ("added", KERNEL)]
    tune.db = tmp_path / "fleet.db"
    said = tune("merge", tmp_path / "a.db", tmp_path / "b.json").stderr
    assert "left out 4 winners of autotuned kernels: --trust takes them" in said
    assert json.loads(tune("list", "--json").stdout)["kernels"] == []
    assert tune("merge", tmp_path / "a.db", tmp_path / "b.json", "--trust").exit_code == 0
    listed = json.loads(tune("list", "--json").stdout)["kernels"]
    assert [each["config"]["parameters"]["BLOCK"] for each in map(_best_of, listed)] == [64, 128, 256]


def _best_of(listed: dict[str, Any]) -> dict[str, Any]:
    return listed["best"]


def test_what_is_merged_without_trust_is_borrowed(tune, winner, tmp_path: Path) -> None:
    tune.db = tmp_path / "theirs.db"
    tune.store(
        winner(time_us=1.0, created_at=winner().created_at + timedelta(days=1)), winner(shape=complete_shape(512, 64))
    )
    tune.db = tmp_path / "mine.db"
    tune.store(winner())
    assert tune("merge", tmp_path / "theirs.db").exit_code == 0
    assert sorted(origins(tune)) == ["borrowed", "measured"]
    with ResultStore.open(tune.db) as store:
        assert store.best(winner().device, winner().shape) == winner()


def test_a_merge_takes_all_or_nothing(tune, winner, tmp_path: Path) -> None:
    tune.store(winner())
    tune("export", tmp_path / "good.json")
    (tmp_path / "bad.json").write_text('{"format": "blocktune-results"}')
    tune.db = tmp_path / "fleet.db"
    for bad in ("bad.json", "missing.json"):
        assert tune("merge", tmp_path / "good.json", tmp_path / bad, "--trust").exit_code == 2
        assert not tune.db.exists()


def test_differences_are_shown_with_their_times(tune, winner, tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    tune.store(winner(), winner(shape=complete_shape(512, 64)))
    tune("export", before)
    tune.db = tmp_path / "after.db"
    tune.store(winner(config=other_config(winner(), 64), time_us=406.25), winner(shape=complete_shape(1024, 64)))
    tune("export", after)
    found = json.loads(tune("diff", before, after, "--json").stdout)["differences"]
    assert [(each["change"], each["shape"]["seqlen_q"], each["ratio"]) for each in found] == [
        ("removed", 512, None),
        ("added", 1024, None),
        ("config", 8192, 0.5),
    ]
    assert (found[2]["before"]["time_us"], found[2]["after"]["time_us"]) == (812.5, 406.25)
    shown = tune("diff", before, tune.db)
    for part in ("flash_fwd 128x64 w4 s3", "(measured)", "812.5 µs", "406.2 µs", "0.500", "NVIDIA H200"):
        assert part in shown.stdout
    assert "3 of 3 shapes differ" in shown.stderr
    same = tune("diff", before, before)
    assert (same.exit_code, same.stdout) == (0, "")


def test_cleaning_first_only_counts(tune, winner) -> None:
    best = winner(environment=replace(winner().environment, protocol=PROTOCOL_VERSION))
    dead = trial_of(best, kernel_hash="d" * 16)
    old = trial_of(best, environment=replace(best.environment, protocol=PROTOCOL_VERSION - 1))
    keep(tune, best, trial_of(best), dead, old)
    planned = json.loads(tune("gc", "--json").stdout)
    assert (planned["applied"], planned["dead_kernel"], planned["old_protocol"], planned["trials"]) == (False, 1, 1, 1)
    with ResultStore.open(tune.db) as store:
        assert len(store.trials()) == 3
    assert "nothing was changed" in tune("gc").stdout
    shown = tune("gc", "--apply").stdout
    assert "dropped 1 trial of kernels whose source has changed" in shown
    with ResultStore.open(tune.db) as store:
        assert store.trials() == [trial_of(best)]
        assert store.bests() == [best]


def test_there_is_nothing_to_clean_where_there_is_no_database(tune) -> None:
    assert json.loads(tune("gc", "--json").stdout) == {"schema": 1, "applied": False}
    assert not tune.db.exists()


def test_a_damaged_database_is_recovered_and_kept(tune, winner) -> None:
    keep(tune, winner(), trial_of(winner()))
    sound = json.loads(tune("doctor", "--recover", "--json").stdout)
    assert sound == {"schema": 1, "recovered": False}
    data = tune.db.read_bytes()
    tune.db.write_bytes(data[: len(data) - 3 * 4096])
    assert tune("list").exit_code == 5
    result = tune("doctor", "--recover")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"saved \d+ winners? and \d+ trials? in ", result.stderr)
    (kept,) = tune.db.parent.glob("results.db.corrupt-*[0-9]")
    assert kept.read_bytes() == data[: len(data) - 3 * 4096]
    assert tune("list").exit_code == 0


def test_recovery_needs_a_database(tune) -> None:
    result = tune("doctor", "--recover")
    assert result.exit_code == 5
    assert "No such store" in result.stderr
    assert not tune.db.exists()


def test_buckets_are_reported_first_and_stored_on_request(tune, winner) -> None:
    for index, (seq, times) in enumerate({512: (100.0, 102.0), 1024: (103.0, 100.0)}.items()):
        shape = complete_shape(seq, 64)
        configs = (winner().config, other_config(winner(), 64))
        best = winner(shape=shape, config=configs[index], time_us=100.0)
        trials = [
            trial_of(best, config=config, time_us=time, relative_to_anchor=time / 100)
            for config, time in zip(configs, times, strict=True)
        ]
        keep(tune, best, *trials)
    report = json.loads(tune("buckets", "--json").stdout)
    assert (report["shapes"], report["configs_before"], report["configs_after"]) == (2, 2, 1)
    assert report["largest_loss"] == pytest.approx(0.02)
    assert [shape["loss"] for shape in report["buckets"][0]["shapes"]] == [pytest.approx(0.02), 0.0]
    strict = json.loads(tune("buckets", "--loss", "1", "--json").stdout)
    assert (len(strict["buckets"]), strict["largest_loss"]) == (2, 0.0)
    assert "the largest loss kept is 2 %" in tune("buckets", "--apply").stderr
    with ResultStore.open(tune.db) as store:
        assert {best.config for best in store.bests()} == {other_config(winner(), 64)}
        assert [best.time_us for best in store.bests()] == [102.0, 100.0]
    assert tune("buckets", "--loss", "-1").exit_code == 2


def test_verification_needs_a_gpu(tune, winner, monkeypatch: pytest.MonkeyPatch) -> None:
    report = DriverReport(problem="No NVIDIA driver is installed.")
    monkeypatch.setattr("blocktune.kernels.hardware.device.read_driver", lambda: report)
    tune.store(winner())
    result = tune("verify")
    assert result.exit_code == 4
    assert "A GPU is required here. No NVIDIA driver is installed." in result.stderr


@pytest.mark.gpu
def test_an_imported_winner_is_verified_here(tune, winner, tmp_path: Path) -> None:
    from blocktune.kernels.hardware.device import current_device
    from blocktune.kernels.registry import kernels_for

    device, shape = current_device(), complete_shape(512, 64)
    kernel = kernels_for(shape, device.limits)[0]
    config = kernel.default_config(shape, device.limits)
    environment = Environment(triton="3.5.0", ptxas="12.8", torch="2.9")
    best = winner(device=device, shape=shape, config=config, kernel_hash=kernel.source_hash, environment=environment)
    tune.db = tmp_path / "theirs.db"
    keep(tune, best, trial_of(best))
    tune.db = tmp_path / "mine.db"
    assert tune("merge", tmp_path / "theirs.db").exit_code == 0
    assert origins(tune) == [Origin.BORROWED]
    result = tune("verify", "--json")
    assert result.exit_code == 0, result.stderr
    (found,) = json.loads(result.stdout)["verified"]
    assert found["after"]["time_us"] > 0
    assert {each["role"] for each in found["rechecks"]} >= {"winner"}
    assert all(each["outcome"] == "ok" for each in found["rechecks"])
    assert origins(tune) == [Origin.MEASURED]
    assert json.loads(tune("verify", "--json").stdout)["verified"] == []


def test_the_page_about_the_store_shows_commands_that_exist() -> None:
    text = (Path(__file__).parents[3] / "docs" / "guide" / "results.md").read_text()
    commands = typer.main.get_command(app).commands
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("tune ")]
    assert {words[1] for words in lines} == {
        "merge",
        "diff",
        "freeze",
        "verify",
        "gc",
        "buckets",
        "doctor",
        "contribute",
    }
    for words in lines:
        known = {name for parameter in commands[words[1]].params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, words


SECRET = "hunter2"


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("gc",),
        ("freeze", "out.json"),
        ("doctor",),
        ("doctor", "--recover"),
        ("buckets",),
        ("merge", "postgresql+psycopg://user:hunter2@127.0.0.1:1/other?password=hunter2"),
        ("diff", "postgresql+psycopg://user:hunter2@127.0.0.1:1/other", "b.json"),
        ("run", "--seq", "512", "--dim", "64", "--device", "h200", "--trials", "1"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "url",
    [
        f"postgresql+psycopg://user:{SECRET}@127.0.0.1:1/results?password={SECRET}",
        f"postgresql+nodriver://user:{SECRET}@host/results",
        f"postgresql://user:{SECRET}@host:port/results",
    ],
    ids=["unreachable", "no driver", "no URL"],
)
def test_no_message_tells_a_password(
    tune, words: tuple[str, ...], url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    tune.db = url
    result = tune(*words)
    assert result.exit_code in (0, 2, 5)
    assert result.stderr or result.stdout
    assert SECRET not in result.stdout + result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)
