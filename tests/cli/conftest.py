"""What the tests of the command line share."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.main import app
from blocktune.db import connected_store
from blocktune.db.records.records import Best, Environment
from blocktune.db.store import ResultStore
from blocktune.kernels.base.paper_rule import first_paper_config
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.tuner.candidates.shape_defaults import complete_shape
from tests.support.command_line import CliRunner, Result
from tests.support.pages.browser import chromium
from tests.support.stores.new_stores import copying, new_store


class Tune:
    """Runs commands on a database of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.db = folder / "results.db"

    def __call__(self, *words: object) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words], env={"BLOCKTUNE_DB": str(self.db)})

    def store(self, *bests: Best) -> None:
        """Put winners into the database."""
        with ResultStore.open(new_store(self.db)) as store:
            for best in bests:
                assert store.set_best(best)


MAKE_CURRENT = copying(connected_store.make_current)


@pytest.fixture(autouse=True)
def new_stores_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands and searches make stores by a copy; tests/db is about how they are made."""
    monkeypatch.setattr(connected_store, "make_current", MAKE_CURRENT)


@pytest.fixture
def tune(tmp_path: Path) -> Tune:
    return Tune(tmp_path)


@pytest.fixture
def winner() -> Callable[..., Best]:
    """Makes a measured winner of b2 h32 s8192 d64 bf16 on an H200, with some fields replaced. It was timed against what
    is the default and FlashAttention's heuristic today."""
    kernel, device, shape = get_kernel("flash_fwd"), device_named("h200"), complete_shape(8192, 64)
    own = kernel.default_config(shape, device.limits).parameters

    def config(block_m: int, block_n: int, num_warps: int, num_stages: int) -> KernelConfig:
        tile = {"block_m": block_m, "block_n": block_n, "num_warps": num_warps, "num_stages": num_stages}
        return KernelConfig.of(kernel.name, own | tile)

    competing = kernels_for(shape, device.limits)
    best = Best(
        device=device,
        environment=Environment(triton="3.6.0", ptxas="12.8.93", torch="2.13.0", cuda="12.8", driver="580.65.06"),
        shape=shape,
        config=config(128, 64, 4, 3),
        kernel_hash=kernel.source_hash,
        origin=Origin.MEASURED,
        time_us=812.5,
        predicted_us=790.0,
        default=competing[0].default_config(shape, device.limits),
        default_time_us=975.0,
        paper=first_paper_config(competing, shape, device.limits),
        paper_time_us=900.0,
        speedup_over_default=1.2,
        speedup_low=1.19,
        speedup_high=1.21,
        trials=120,
        created_at=datetime(2026, 11, 20, 12, 0, tzinfo=UTC),
    )

    def make(**changes: Any) -> Best:
        return replace(best, **changes)

    return make


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The one browser of a worker: Playwright takes no second one in a thread."""
    with chromium() as found:
        yield found
