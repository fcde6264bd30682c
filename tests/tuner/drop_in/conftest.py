"""A fake H200 under Triton, and tools that measure on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton

from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.autotuned.boundary import forget_warnings
from blocktune.runtime.autotuned.frozen import forget_frozen
from blocktune.tuner.compile_server.compile_ahead import CompileAhead
from blocktune.tuner.drop_in import decide, tune_call
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.drop_in.install import uninstall
from blocktune.tuner.drop_in.tune_call import DropInMachine
from blocktune.tuner.launches.launch_bench import LaunchTools
from blocktune.tuner.measure import lock_file
from tests.support.fakes.fake_triton import FakeGpu, FakeHookedClock, active
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel

H200 = device_named("h200")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's store."""
    monkeypatch.setenv("BLOCKTUNE_DB", str(tmp_path / "store.db"))
    return tmp_path / "store.db"


@pytest.fixture(scope="session")
def compiler() -> Iterator[CompileAhead]:
    """A compiler whose worker, which takes seconds to start, serves the tests of all files."""
    made = CompileAhead(workers=1)
    yield made
    made.close()


@pytest.fixture
def gpu(path: Path, compiler: CompileAhead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Triton's GPU, on which the block of 256 is the fastest, with as few warps as there are."""

    def time_us(launch: Any) -> float:
        return float(100 + abs(launch.arguments["BLOCK"] - 256) + 5 * launch.num_warps)

    made = FakeGpu(time_us)
    launches = LaunchTools(lambda l2: FakeHookedClock(made), lambda: None)
    tools = DropInMachine(ahead=compiler, open_store=lambda _: ResultStore.open(path), launches=launches)
    monkeypatch.setattr(tune_call, "machine", lambda: tools)
    monkeypatch.setattr(decide, "current_device", lambda: H200)
    monkeypatch.setattr(lock_file, "cache_folder", lambda: tmp_path / "cache")
    with active(made):
        yield made
    uninstall()
    forget_frozen()
    forget_warnings()


def decorated(kernel: Any = scale_kernel, configs: Any = CONFIGS, **options: Any) -> Any:
    """The jitted function of a kernel under our decorator."""
    return autotune(list(configs), ["n"], **options)(kernel.fn)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def measured(gpu: FakeGpu) -> set[tuple[int, int]]:
    """Blocks and warps of the launches that were timed, which are forgotten."""
    found = {(launch.arguments["BLOCK"], launch.num_warps) for launch in gpu.timed}
    gpu.timed.clear()
    return found
