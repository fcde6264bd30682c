"""Runtime and bytes against block size, of a recorded sweep."""

from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.db.records.records import Outcome
from blocktune.tuner.lab.sweep_file import Sweep
from tests.support.stores.sample_records import sample_trials, winner
from tools.pages.searches.block_size_tables import NO_SWEEP, block, block_sizes, rows_of

pytestmark = pytest.mark.triton_free


def sweep(*measured: tuple[int, int, float | None]) -> Sweep:
    """A sweep with these (block_m, block_n, time_us)."""
    (trial,), trials = sample_trials(1), []
    for block_m, block_n, time_us in measured:
        outcome = Outcome.OK if time_us is not None else Outcome.RUN_ERROR
        config = replace(winner().config, block_m=block_m, block_n=block_n)
        trials.append(replace(trial, config=config, time_us=time_us, samples_us=(), outcome=outcome))
    return Sweep(device=trial.device, environment=trial.environment, shape=trial.shape, trials=tuple(trials))


def test_every_size_has_its_fastest_config_and_more_queries_move_fewer_bytes() -> None:
    found = sweep((64, 64, 300.0), (64, 128, 200.0), (128, 64, 100.0), (128, 128, 150.0), (256, 64, None))
    sizes = {(size.block, size.size): size for size in block_sizes(found.trials)}
    assert {key: size.fastest.time_us for key, size in sizes.items()} == {
        ("block_m", 64): 200.0,
        ("block_m", 128): 100.0,
        ("block_n", 64): 100.0,
        ("block_n", 128): 150.0,
    }
    assert sizes["block_m", 64].bytes_ > 1.9 * sizes["block_m", 128].bytes_
    rows = rows_of(found)
    assert [row[1] for row in rows] == ["64 queries", "128 queries", "64 keys", "128 keys"]
    assert [row[3] for row in rows] == ["2.00", "1.00", "1.00", "1.50"]


def test_a_size_that_alone_was_measured_shows_nothing() -> None:
    found = sweep((64, 64, 300.0), (64, 128, 200.0))
    assert [row[1] for row in rows_of(found)] == ["64 keys", "128 keys"]


def test_a_sweep_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert block(tmp_path / "none.sweep.json.gz") == NO_SWEEP
