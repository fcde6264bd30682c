"""`tune lab rematch`: which winners meet, and the file that it keeps."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Best, Regime
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.candidates.shape_defaults import complete_shape
from tests.tuner.upkeep.test_rematch import runner as gpu
from tools.pages.recorded import noise_tables

DEVICE = replace(device_named("h200"), source="driver", uuid=None)


def other_config(best: Best) -> KernelConfig:
    return replace(best.config, num_stages=2)


@pytest.fixture
def terms(winner, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the GPU, which is not there; return the terms it was called with."""
    terms: list[Any] = []

    @contextlib.contextmanager
    def runner(shape: object, device: object, monitor: object, on_wait: object, given: Any) -> Iterator[Any]:
        terms.append(given)
        from blocktune.kernels.registry import competing
        from blocktune.tuner.candidates.starting_configs import find_contenders

        default = find_contenders(complete_shape(8192, 64), DEVICE, competing(), ()).default
        yield gpu({default: 100.0, winner().config: 90.0, other_config(winner()): 90.2})

    monkeypatch.setattr("blocktune.kernels.hardware.device.current_device", lambda: DEVICE)
    monkeypatch.setattr("blocktune.tuner.measure.locked_runner.gpu_runner", runner)
    return terms


def searches(folder: Path, *bests: Best) -> list[Path]:
    """One database a search."""
    places = []
    for number, best in enumerate(bests):
        places.append(folder / f"search{number}.db")
        with ResultStore.open(places[-1]) as store:
            store.set_best(best)
    return places


def test_winners_of_one_shape_and_regime_meet_and_the_file_makes_a_table(
    tune, winner, terms: list[Any], tmp_path: Path
) -> None:
    other = winner(config=other_config(winner()))
    places = searches(tmp_path, winner(), winner(), other)
    with ResultStore.open(places[0]) as store:  # what only one has is left out
        store.set_best(winner(shape=complete_shape(4096, 64)))
    file = tmp_path / "h200.rematch.json"
    result = tune("lab", "rematch", *places, "--out", file)
    assert result.exit_code == 0, result.output
    assert "left out: b4 h32 s4096 d64 bf16, sustained, which only 1 of 3 have" in result.stderr
    assert [(each.regime, each.race) for each in terms] == [(Regime.SUSTAINED, False)]
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["searches"], row["agreeing"], row["slower_than_default"]) == (3, 3, 0)
    assert f"2 x {winner().config.label}, 0.900 of the default's time" in result.stdout
    assert "| b2 h32 s8192 d64 bf16 | sustained | 3 of 3 | 2 | 1.002 | 0 of 3 |" in noise_tables.block(file)


def test_different_regimes_do_not_meet(tune, winner, terms: list[Any], tmp_path: Path) -> None:
    rested = winner(environment=replace(winner().environment, regime=Regime.BURST))
    result = tune("lab", "rematch", *searches(tmp_path, winner(), rested))
    assert result.exit_code == 3
    assert terms == []


def test_one_search_meets_nobody(tune, tmp_path: Path) -> None:
    assert tune("lab", "rematch", tmp_path / "a.db").exit_code == 2
