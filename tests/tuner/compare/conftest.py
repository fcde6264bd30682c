"""A ladder that is climbed on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest

from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compare import line_up
from blocktune.tuner.compare.ladder import Ladder, climb
from blocktune.tuner.measure import protocol
from tests.support.fakes.ladder_fakes import H200, SMALL, Compiler, FakeClock, bind


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ladder]:
    monkeypatch.setattr(protocol, "REST_SECONDS", 1e-4)
    monkeypatch.setattr(line_up, "ROUNDS_SECONDS", 1e-3)

    def climbed(shape: AttentionShape = SMALL, **given: Any) -> Ladder:
        settings = {"compiler": Compiler(), "clock": FakeClock(), "torch_device": "cpu", "bind": bind}
        return climb(shape, H200, **settings | given)

    return climbed
