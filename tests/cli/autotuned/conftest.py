"""A fake H200 under Triton, as the tests of the tuner have it, and a command line on its store."""

from pathlib import Path
from typing import Any

import pytest

from blocktune.tuner.compile_server.compile_ahead import CompileAhead
from blocktune.tuner.launches.launch_bench import LaunchTools
from blocktune.tuner.launches.launch_runner import LaunchMachine
from tests.cli.conftest import Tune
from tests.support.fakes.fake_triton import FakeGpu, FakeHookedClock
from tests.tuner.drop_in.conftest import H200, compiler, gpu, path

__all__ = ["compiler", "gpu", "path"]


@pytest.fixture
def tune(path: Path, gpu: FakeGpu, compiler: CompileAhead, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs commands on the store that the kernels of this process use, where the GPU is the one that is here."""
    monkeypatch.setattr("blocktune.kernels.hardware.device.current_device", lambda: H200)
    launches = LaunchTools(lambda l2: FakeHookedClock(gpu), lambda: None)
    machine = LaunchMachine(ahead=compiler, launches=launches)
    monkeypatch.setattr("blocktune.tuner.search.tune_launch.launch_machine", lambda: machine)
    made = Tune(path.parent)
    made.db = path
    return made
