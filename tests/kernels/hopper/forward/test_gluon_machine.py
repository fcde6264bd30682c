"""The machine that runs sources of the Hopper kernels on the CPU notices what is wrong with them."""

from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blocktune.kernels.hopper.forward import launch as flash_fwd_hopper
from blocktune.kernels.values.shape import Causal
from tests.support.gluon import barriers
from tests.support.gluon import machine as gluon_machine
from tests.support.gluon.hopper_forward import (
    check,
    read_now,
    shape_of,
)

pytestmark = pytest.mark.triton_free

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_fwd_hopper, "tile_counter", lambda device: torch.zeros(2, dtype=torch.int32))


@gluon.jit
def hasty_kernel(counter, PARITY: gl.constexpr, COUNT: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier.index(0), count=COUNT)
    mbarrier.arrive(barrier.index(0), count=1)
    mbarrier.arrive(barrier.index(0), count=1)
    mbarrier.wait(barrier.index(0), PARITY)


def test_the_machine_notices_what_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barriers, "PATIENCE", 0.1)
    counter = torch.zeros(1, dtype=torch.int32)
    gluon_machine.run(hasty_kernel, (counter, 0, 2), 1)
    for parity, count in ((1, 2), (0, 1), (0, 3)):  # completed once, twice, never
        with pytest.raises(TimeoutError, match="would hang"):
            gluon_machine.run(hasty_kernel, (counter, parity, count), 1)


WRONG: dict[str, Any] = {
    "warpgroup_mma_wait": read_now,
    "release": lambda *arguments: None,  # the last slot of a tile is never given back
    "hand_back": lambda count, memory, slot, options: slot,
    "pin": lambda x: x * 0,
}


@pytest.mark.parametrize("name", WRONG)
def test_the_machine_notices_wrong_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gluon_machine.STAND_INS, name, WRONG[name])
    monkeypatch.setattr(barriers, "PATIENCE", 0.2)
    with pytest.raises((AssertionError, TimeoutError)):
        check(shape_of(400, 400, batch=2, causal=Causal.UPPER_LEFT), programs=1)
