"""Blocks over each resource of a block."""

from dataclasses import replace

import pytest

from blocktune.kernels.hardware.limits import KIB, limits_for
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.occupancy.curves import TITLES, curves_of

pytestmark = pytest.mark.triton_free

BLOCK = KernelResources(registers=168, shared_bytes=40_000, num_warps=4, tensor_cores="wgmma")
LIMITS = limits_for((9, 0))


@pytest.mark.parametrize(("name", "unit"), [("registers", 1), ("shared_bytes", KIB), ("num_warps", 1)])
@pytest.mark.parametrize("static", [0, 2048])
def test_every_value_has_the_blocks_of_the_calculator(name: str, unit: int, static: int) -> None:
    block = replace(BLOCK, static_shared_bytes=static)
    curve = curves_of(occupancy(block, LIMITS))[name]
    last = round(curve.last * unit)
    for value in {1, last // 7, last // 3, last // 2, last - 1, last, getattr(block, name)}:
        assert curve.blocks_at(value / unit) == occupancy(replace(block, **{name: value}), LIMITS).blocks_per_sm


def test_curves_fall_and_pass_through_the_kernel() -> None:
    result = occupancy(BLOCK, LIMITS)
    curves = curves_of(result)
    assert list(curves) == list(TITLES)
    for curve in curves.values():
        blocks = [blocks for _, blocks in curve.steps]
        assert blocks == sorted(blocks, reverse=True)
        assert len(set(blocks)) == len(blocks)
        assert curve.here[1] == curve.blocks_at(curve.here[0]) == result.blocks_per_sm


def test_known_steps_of_a_hopper_block() -> None:
    assert curves_of(occupancy(BLOCK, LIMITS))["registers"].steps[-2:] == ((129, 3), (169, 2))
