"""What a block keeps on the chip, against the kernels' own prediction of shared memory and against compiled code."""

from pathlib import Path

import pytest

from blocktune.kernels.base.on_chip import ChipMemory, OnChip
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.candidates.space import configs_of
from blocktune.tuner.occupancy.forward_tiles import on_chip
from blocktune.tuner.occupancy.tiles_by_kernel import on_chip_of
from tests.support.compiles.measures import compile_resources


def config(block_m: int, block_n: int, num_warps: int, num_stages: int, schedule: int = 0) -> KernelConfig:
    tile = {"block_m": block_m, "block_n": block_n, "num_warps": num_warps, "num_stages": num_stages}
    return KernelConfig.of("flash_fwd", tile | {"schedule": schedule})


def places(held: OnChip) -> dict[str, tuple[int, ChipMemory]]:
    return {tile.name: (tile.bytes, tile.place) for tile in held.tiles}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 64), (72, 128)])
@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)])
def test_shared_tiles_are_what_the_kernels_predict(cc: tuple[int, int], dim: int, dim_v: int, dtype: str) -> None:
    shape, limits = complete_shape(1000, dim, dim_v=dim_v, dtype=dtype), limits_for(cc)
    compared = 0
    for name in ("flash_fwd", "flash_fwd_tma"):
        kernel = get_kernel(name)
        if kernel.unsupported(shape, limits):
            continue
        for blocks in configs_of(kernel):
            if kernel.rule_violations(blocks, shape, limits):
                continue
            held = on_chip_of(kernel, blocks, shape, limits)
            assert held is not None
            assert held.shared_bytes == kernel.shared_bytes(blocks, shape, limits), blocks.label
            compared += 1
    assert compared >= 72  # fewer where a type or a device rules out schedules or a kernel


def test_wgmma_reads_shared_memory_and_accumulates_in_registers() -> None:
    held = on_chip(config(128, 64, 8, 3), complete_shape(8192, 128), limits_for((9, 0)))
    assert places(held) == {
        "Q": (128 * 128 * 2, ChipMemory.SHARED_MEMORY),
        "K": (3 * 64 * 128 * 2, ChipMemory.SHARED_MEMORY),
        "V": (3 * 64 * 128 * 2, ChipMemory.SHARED_MEMORY),
        "S": (128 * 64 * 4, ChipMemory.REGISTERS),
        "P": (128 * 64 * 2, ChipMemory.REGISTERS),
        "O": (128 * 128 * 4, ChipMemory.REGISTERS),
        "m": (128 * 4, ChipMemory.REGISTERS),
        "l": (128 * 4, ChipMemory.REGISTERS),
    }
    # 64 registers of O, 32 of S and one of m and l together for each of 256 threads
    assert held.least_registers == 97
    assert held.shared_bytes == held.to_json()["shared_bytes"] == 131_072


def test_running_ahead_carries_probabilities_beside_scores() -> None:
    shape, limits = complete_shape(8192, 64), limits_for((9, 0))
    in_order, ahead = (on_chip(config(64, 64, 4, 2, schedule), shape, limits) for schedule in (0, 1))
    assert ahead.least_registers == in_order.least_registers + 64 * 64 * 2 // 4 // 128
    shared_rows = on_chip(config(64, 64, 8, 2, 1), shape, limits)
    assert places(shared_rows)["P"][1] is ChipMemory.SHARED_MEMORY


def test_tensor_memory_relieves_the_registers() -> None:
    shape = complete_shape(8192, 128)
    hopper, blackwell = (on_chip(config(128, 128, 4, 2), shape, limits_for(cc)) for cc in ((9, 0), (10, 0)))
    assert places(blackwell)["O"] == (128 * 128 * 4, ChipMemory.TENSOR_MEMORY)
    assert hopper.least_registers > 255
    assert blackwell.least_registers == 130


def test_mma_keeps_queries_in_shared_memory_and_exchanges_p_of_few_rows() -> None:
    """Running ahead, too."""
    shape, limits = complete_shape(8192, 128), limits_for((8, 0))
    held = on_chip(config(64, 32, 4, 2, 1), shape, limits)
    assert places(held)["Q"] == (64 * 128 * 2, ChipMemory.SHARED_MEMORY)
    assert places(held)["P"] == (64 * 32 * 2, ChipMemory.SHARED_MEMORY)
    assert places(on_chip(config(128, 32, 4, 2, 1), shape, limits))["P"][1] is ChipMemory.REGISTERS


def test_float32_operands_are_two_tiles_each() -> None:
    """Those of tensor cores below 10.0: their TF32 numbers, and what these leave of them."""
    shape = complete_shape(8192, 128, dtype="fp32")
    ampere, hopper, blackwell = (
        on_chip(config(64, 32, 4, 2), shape, limits_for(cc)) for cc in ((8, 0), (9, 0), (10, 0))
    )
    tile = 32 * 128 * 4
    assert places(ampere)["Q"] == places(hopper)["Q"] == (2 * 64 * 128 * 4, ChipMemory.SHARED_MEMORY)
    assert places(ampere)["P"] == (2 * 64 * 32 * 4, ChipMemory.SHARED_MEMORY)
    assert places(blackwell)["Q"] == (64 * 128 * 4, ChipMemory.TENSOR_MEMORY)
    for held in (hopper, blackwell):
        assert places(held)["K or V, as two tf32 tiles"] == (2 * tile, ChipMemory.SHARED_MEMORY)
        assert places(held)["K"] == places(held)["V"] == (tile, ChipMemory.SHARED_MEMORY)


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cc", "blocks"),
    [
        ((8, 0), config(64, 64, 4, 2)),
        ((8, 0), config(64, 64, 4, 3, 1)),
        ((9, 0), config(64, 64, 4, 2)),
        ((9, 0), config(64, 64, 4, 3, 1)),
        ((9, 0), config(64, 64, 8, 2, 1)),
        ((9, 0), config(128, 64, 8, 2, 2)),
        ((10, 0), config(64, 64, 4, 2)),
    ],
    ids=str,
)
def test_compiled_code_holds_the_tiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cc: tuple[int, int], blocks: KernelConfig
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    shape = complete_shape(1024, 64)
    compiled = compile_resources(get_kernel("flash_fwd"), blocks, shape, cc)
    held = on_chip(blocks, shape, limits_for(cc))
    assert compiled.spill_bytes == 0
    assert held.least_registers <= compiled.registers
    if compiled.tensor_cores == "wgmma":
        assert held.shared_bytes == compiled.shared_bytes
    else:
        assert held.shared_bytes <= compiled.shared_bytes
