"""What the store promises, on SQLite and on PostgreSQL."""

import math
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Best, Outcome, Telemetry, Trial
from blocktune.db.store import ResultStore, default_store_path
from blocktune.db.tables.location import StoreTarget
from blocktune.db.tables.schema import CURRENT
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.store_reader.tuned_config import TunedConfig

MINUTE = timedelta(minutes=1)


def test_a_trial_comes_back_as_it_was(store: ResultStore, trial: Trial) -> None:
    store.record(trial)
    assert store.trials() == [trial]


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.OK])
def test_every_outcome_is_kept(store: ResultStore, trial: Trial, outcome: Outcome) -> None:
    failed = replace(
        trial,
        outcome=outcome,
        time_us=None,
        resources=None,
        blocks_per_sm=None,
        occupancy=None,
        limiters=(),
        samples_us=(),
        relative_to_anchor=None,
        predicted_us=None,
        telemetry=Telemetry(),
        error="ptxas fatal: <script>[red]",
    )
    store.record(failed)
    assert store.trials() == [failed]


def test_a_later_trial_of_the_same_candidate_replaces_the_earlier(store: ResultStore, trial: Trial) -> None:
    store.record(trial)
    # Even when the clock went back: what was acknowledged must be there.
    again = replace(trial, time_us=50.0, created_at=trial.created_at - MINUTE)
    store.record(again)
    assert store.trials() == [again]


@pytest.mark.parametrize(
    "change",
    [
        lambda trial: replace(trial, device=device_named("h100-sxm")),
        lambda trial: replace(trial, environment=replace(trial.environment, triton="3.9.0")),
        lambda trial: replace(trial, kernel_hash="f" * 16),
        lambda trial: replace(trial, shape=replace(trial.shape, causal=Causal.NONE)),
        lambda trial: replace(trial, config=replace(trial.config, num_stages=2)),
        lambda trial: replace(trial, config=replace(trial.config, extra=())),
    ],
    ids=["device", "environment", "kernel", "shape", "config", "own parameter"],
)
def test_candidates_differ_by_every_part_of_the_key(
    store: ResultStore, trial: Trial, change: Callable[[Trial], Trial]
) -> None:
    other = change(trial)
    store.record(trial)
    store.record(other)
    assert len(store.trials()) == 2
    assert (
        store.trials(trial.device, trial.shape, environment=trial.environment, kernel_hash=trial.kernel_hash)[0]
        == trial
    )


def test_trials_are_filtered_by_all_that_is_given(store: ResultStore, trial: Trial) -> None:
    store.record(trial)
    assert store.trials(trial.device) == [trial]
    assert store.trials(shape=trial.shape) == [trial]
    assert store.trials(device_named("h100-sxm")) == []
    assert store.trials(shape=replace(trial.shape, batch=1)) == []
    assert store.trials(environment=replace(trial.environment, torch="2.15")) == []
    assert store.trials(kernel_hash="f" * 16) == []


def test_the_pieces_of_one_kind_of_gpu_share_a_device(store: ResultStore, trial: Trial) -> None:
    other = replace(trial.device, uuid="GPU-other")
    store.record(replace(trial, device=other))
    assert store.trials(trial.device)[0].device == other
    assert store.devices() == [replace(other, uuid=None)]


def test_a_live_device_replaces_the_catalogue_and_not_the_other_way_round(store: ResultStore, trial: Trial) -> None:
    predicted = replace(trial, device=device_named("h200"))
    live = replace(trial.device, clock_mhz=1755, uuid=None)
    store.record(predicted)
    store.record(replace(trial, device=live))
    assert store.devices() == [live]
    store.record(predicted)
    assert store.devices() == [live]


def test_a_best_comes_back_as_it_was(store: ResultStore, best: Best) -> None:
    assert store.best(best.device, best.shape) is None
    assert store.set_best(best)
    assert store.best(best.device, best.shape) == best
    assert store.bests() == store.bests(best.device) == [best]
    assert store.bests(device_named("h100-sxm")) == []
    tuned = TunedConfig(shape=best.shape, config=best.config, origin=Origin.MEASURED, time_us=best.time_us)
    assert list(store.configs(best.device)) == [tuned]


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("first", "second", "minutes", "replaced"),
    [
        (Origin.PREDICTED, Origin.MEASURED, -1, True),
        (Origin.MEASURED, Origin.PREDICTED, 1, False),
        (Origin.MEASURED, Origin.BORROWED, 1, False),
        (Origin.BORROWED, Origin.PREDICTED, 1, False),
        (Origin.DEFAULT, Origin.PREDICTED, -1, True),
        (Origin.MEASURED, Origin.MEASURED, 1, True),
        (Origin.MEASURED, Origin.MEASURED, -1, False),
        (Origin.PREDICTED, Origin.PREDICTED, 1, True),
        (Origin.PREDICTED, Origin.PREDICTED, -1, False),
    ],
)
def test_which_best_stays(
    store: ResultStore, best: Best, first: Origin, second: Origin, minutes: int, replaced: bool
) -> None:
    stored = replace(best, origin=first)
    # A slower time that was measured later wins too: it was measured against the old one.
    offered = replace(
        best,
        origin=second,
        created_at=best.created_at + minutes * MINUTE,
        time_us=200.0,
        config=KernelConfig("flash_fwd_tma", 64, 32, 4, 2),
        environment=replace(best.environment, driver="600"),
        kernel_hash="f" * 16,
        default=None,
    )
    store.set_best(stored)
    assert store.set_best(offered) is replaced
    assert store.bests() == [offered if replaced else stored]


def test_nearest_shapes_come_nearest_first(store: ResultStore, bests: list[Best]) -> None:
    strangers = [
        replace(bests[0], shape=replace(bests[0].shape, **change))
        for change in ({"dtype": "float16"}, {"causal": Causal.NONE}, {"head_dim": 32}, {"num_heads_kv": 32})
    ]
    for best in [*bests, *strangers, replace(bests[0], device=device_named("h100-sxm"))]:
        store.set_best(best)
    wanted = replace(bests[0].shape, seqlen_q=2000, seqlen_k=2000, num_heads=64, num_heads_kv=16)
    found = store.nearest(bests[0].device, wanted, limit=3)
    assert [best.shape.seqlen_q for best in found] == [2048, 1024, 4096]
    assert store.nearest(bests[0].device, bests[4].shape)[0] == bests[4]
    assert len(store.nearest(bests[0].device, wanted)) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"time_us": None},
        {"time_us": 0.0},
        {"time_us": -1.0},
        {"time_us": math.inf},
        {"time_us": math.nan},
        {"outcome": Outcome.RUN_ERROR},
        {"occupancy": 1.5},
        {"samples_us": (1.0, math.nan)},
    ],
    ids=str,
)
def test_an_absurd_trial_is_refused(store: ResultStore, trial: Trial, change: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="A row must"):
        store.record(replace(trial, **change))
    assert store.trials() == []


def test_a_number_that_no_column_holds_is_refused(store: ResultStore, trial: Trial) -> None:
    with pytest.raises(UsageError, match=r"does not fit its column|out of range|must hold"):
        store.record(replace(trial, shape=replace(trial.shape, batch=10**30)))
    assert store.trials() == []


def test_a_measured_best_has_a_time(store: ResultStore, best: Best) -> None:
    with pytest.raises(UsageError, match="`time_us` when it was measured"):
        store.set_best(replace(best, time_us=None))


def test_text_that_no_database_holds_is_spelt_out(store: ResultStore, trial: Trial) -> None:
    store.record(replace(trial, error="\x1b[31maborted\0 at \udcff\n"))
    assert store.trials()[0].error == "\\x1b[31maborted\\x00 at \\udcff\n"


def test_a_shape_that_was_spelled_in_another_way_is_read_in_its_one_form(
    store: ResultStore, trial: Trial, best: Best, shape: AttentionShape
) -> None:
    """As stores of older versions have them: their rows are neither damaged nor lost."""
    older = replace(shape, causal=Causal.NONE)
    object.__setattr__(older, "features", Features(window=(4095, 0)))
    store.put_all([replace(trial, shape=older)], [replace(best, shape=older)])
    form = replace(shape, causal=Causal.LOWER_RIGHT)
    assert [row.shape for row in (*store.trials(), *store.bests())] == [form, form]
    assert [config.shape for config in store.configs(best.device)] == [form]
    assert store.health().sound


def test_winners_of_an_older_spelling_are_found_outranked_and_forgotten(
    store: ResultStore, trial: Trial, best: Best, shape: AttentionShape
) -> None:
    form = replace(shape, seqlen_q=1, seqlen_k=64, causal=Causal.NONE)
    older = replace(form)
    object.__setattr__(older, "causal", Causal.LOWER_RIGHT)
    store.put_all([replace(trial, shape=older)], [replace(best, shape=older)])
    assert store.best(best.device, form) is not None
    assert len(store.trials(best.device, form)) == 1
    other = replace(best.config, num_stages=best.config.num_stages + 1)
    store.set_best(replace(best, shape=form, config=other, created_at=best.created_at + timedelta(days=1)))
    assert [found.config for found in store.bests()] == [other]
    (found,) = store.bests()
    store.remove_best(found)
    store.put_all([], [replace(best, shape=older)])
    (found,) = store.bests()
    store.remove_best(found)
    assert store.bests() == []


def test_health_tells_the_state(store: ResultStore, target: str, trial: Trial, best: Best) -> None:
    store.record(trial)
    store.set_best(best)
    health = store.health()
    assert health.sound
    assert health.schema_version == CURRENT
    assert health.size_bytes > 0
    ours = {"best": 1, "config": 3, "device": 1, "environment": 1, "kernel": 1, "shape": 1, "trial": 1}
    assert health.rows == ours
    assert health.place == store.label == StoreTarget.of(target).label
    assert "secret" not in str(health.to_json())
    if health.server.startswith("sqlite"):
        assert (health.journal_mode, health.integrity) == ("wal", "ok")


def test_threads_share_a_store(store: ResultStore, trial: Trial) -> None:
    def write(number: int) -> None:
        for stage in range(1, 6):
            store.record(replace(trial, config=replace(trial.config, num_stages=stage, extra=(("thread", number),))))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.trials()) == 20


def test_a_store_that_is_only_read_refuses_to_write(store: ResultStore, target: str, trial: Trial) -> None:
    store.record(trial)
    with ResultStore.open(target, read_only=True) as reader:
        assert reader.trials() == [trial]
        with pytest.raises(StoreError, match="opened for reading"):
            reader.record(trial)


def test_a_forked_child_uses_the_store_of_its_parent(path: Path) -> None:
    # In a process of its own: a test runner may have threads, which do not go with a fork.
    code = (
        "import os, sys\n"
        "from blocktune.db.store import ResultStore\n"
        "store = ResultStore.open(sys.argv[1])\n"
        "store.bests()\n"
        "child = os.fork()\n"
        "health = store.health()\n"
        "if child == 0:\n"
        "    os._exit(0 if health.sound else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_the_default_place_is_private_and_never_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLOCKTUNE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with ResultStore.open() as store:
        assert store.label == str(default_store_path()) == str(tmp_path / "data" / "blocktune" / "blocktune.db")
    assert stat.S_IMODE(os.stat(tmp_path / "data" / "blocktune").st_mode) == 0o700
    assert list(Path.cwd().iterdir()) == []


def test_no_variable_leads_the_default_into_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in ("", ".", "data", "../data"):
        monkeypatch.setenv("XDG_DATA_HOME", value)
        assert default_store_path().is_absolute()
        assert tmp_path not in default_store_path().resolve().parents


def test_the_environment_variable_names_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", str(tmp_path / "mine.db"))
    with ResultStore.open() as store:
        assert store.label == str(tmp_path / "mine.db")
    monkeypatch.setenv("BLOCKTUNE_DB", f"sqlite:///{tmp_path}/mine.db")
    with ResultStore.open(read_only=True) as store:
        assert store.label == str(tmp_path / "mine.db")


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        (":memory:", "in memory"),
        ("sqlite://", "names no file"),
        ("sqlite:///file.db?mode=ro", "cannot have options"),
        ("postgresql://user:secret@host:port/name", "cannot be parsed"),
        ("nosuch://user:secret@host/name", "is not installed"),
    ],
)
def test_a_place_that_is_none(url: str, rule: str) -> None:
    with pytest.raises(UsageError, match=rule) as caught:
        ResultStore.open(url)
    assert "secret" not in str(caught.value)


def test_a_server_that_is_not_there() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError, match="does not work") as caught:
        ResultStore.open("postgresql+psycopg://user:secret@127.0.0.1:1/name?password=secret")
    assert "secret" not in str(caught.value)


def test_what_a_wrong_clock_dated_ahead_is_replaced(store: ResultStore, best: Best, trial: Trial) -> None:
    ahead = datetime.now(UTC) + timedelta(days=400)
    assert store.set_best(replace(best, created_at=ahead))
    assert store.set_best(replace(best, time_us=50.0))
    assert [each.time_us for each in store.bests()] == [50.0]
    store.record(replace(trial, created_at=ahead))
    store.merge([Results(trials=(replace(trial, time_us=50.0),))], trust=True)
    assert [each.time_us for each in store.trials()] == [50.0]
