"""Every list of tiles against what its kernel says of shared memory, and what registers hold."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.base.on_chip import ChipMemory, OnChip
from blocktune.kernels.hardware.limits import ComputeLimits, limits_for
from blocktune.kernels.registry import KERNELS, get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import CacheType, Features
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.candidates.space import configs_of
from blocktune.tuner.occupancy.tiles_by_kernel import MOVED, on_chip_of

pytestmark = pytest.mark.triton_free

ARCHITECTURES = [(7, 5), (8, 0), (9, 0), (12, 0)]


def shape_for(kernel: AttentionKernel, dim: int, dtype: str) -> AttentionShape:
    dtype = "fp8" if kernel.name == "flash_fwd_fp8" else dtype
    plain = complete_shape(1024, dim, batch=1, heads=8, kv_heads=2, dtype=dtype)
    if kernel.name == "flash_fwd_hopper_split":
        return replace(plain, seqlen_q=512, seqlen_k=4096)
    if kernel.name.startswith("flash_decode"):
        of_cache = Features(cached=True, kv=CacheType.INT8) if "decode8" in kernel.name else Features()
        return replace(plain, seqlen_q=1, features=of_cache)
    features = {"flash_fwd_general": {"softcap": True}, "flash_fwd_sparse": {"mask": "block_sparse"}}
    features |= dict.fromkeys(("flash_bwd_sparse", "flash_bwd_hopper_sparse"), features["flash_fwd_sparse"])
    return replace(plain, direction=kernel.direction, features=Features(**features.get(kernel.name, {})))


def lists(kernel: AttentionKernel, shape: AttentionShape, limits: ComputeLimits) -> Iterator[tuple[OnChip, int]]:
    """(tiles, bytes by the kernel) of every fifth config, if the kernel computes the shape there."""
    if kernel.unsupported(shape, limits) is not None:
        return
    for config in list(configs_of(kernel))[::5]:
        found = on_chip_of(kernel, config, shape, limits)
        if found is not None and not kernel.rule_violations(config, shape, limits):
            yield found, kernel.launch_bytes(config, shape, limits)


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "flash_fwd_tma"])
def test_shared_tiles_are_what_the_kernel_predicts(name: str) -> None:
    kernel, compared = get_kernel(name), 0
    for cc in ARCHITECTURES:
        for dim, dtype in ((64, "bf16"), (128, "fp16"), (32, "fp32")):
            for held, wanted in lists(kernel, shape_for(kernel, dim, dtype), limits_for(cc)):
                assert held.shared_bytes == wanted
                assert held.least_registers > 0
                compared += 1
    assert compared >= 5


def test_hopper_s_backward_sums_in_registers_and_exchanges_ds() -> None:
    kernel, limits = get_kernel("flash_bwd_hopper"), limits_for((9, 0))
    shape = shape_for(kernel, 128, "bf16")
    found = on_chip_of(kernel, kernel.default_config(shape, limits), shape, limits)
    assert found is not None
    tiles = {tile.name: tile for tile in found.tiles if tile.place is ChipMemory.SHARED_MEMORY}
    assert (tiles["dS"].count, tiles["dS"].bytes) == (2, 2 * 128 * 64 * 2)
    # 64 registers each of dK and dV, 32 each of S and dP, for each of 256 threads
    assert found.least_registers == 192


@pytest.mark.parametrize("dim", [96, 192, 256])
def test_hopper_s_backward_of_wider_heads(dim: int) -> None:
    kernel, limits = get_kernel("flash_bwd_hopper"), limits_for((9, 0))
    shape = shape_for(kernel, dim, "bf16")
    config = kernel.default_config(shape, limits)
    found = on_chip_of(kernel, config, shape, limits)
    assert found is not None
    assert found.shared_bytes == kernel.shared_bytes(config, shape, limits)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_lists_its_tiles_on_hopper(name: str) -> None:
    kernel, limits = get_kernel(name), limits_for((9, 0))
    shape = shape_for(kernel, 128, "bf16")
    assert on_chip_of(kernel, kernel.default_config(shape, limits), shape, limits) is not None


def test_products_that_nobody_has_listed_have_no_tiles() -> None:
    kernel, limits = get_kernel("flash_bwd_split"), limits_for((7, 5))
    shape = shape_for(kernel, 64, "fp32")
    assert on_chip_of(kernel, kernel.default_config(shape, limits), shape, limits) is None


def test_the_first_algorithm_holds_one_tile_of_each() -> None:
    """64 rows and keys of dimension 64 in 16 bits: three tiles of 8 KiB, and the float32 output on its way out takes
    those of Q and 8 KiB more. S and O are 32 registers each for 128 threads, and a row's two statistics a register."""
    config = KernelConfig("flash_v1", 64, 64, 4, 1)
    found = on_chip_of(get_kernel("flash_v1"), config, complete_shape(1024, 64), limits_for((9, 0)))
    assert found is not None
    assert (found.shared_bytes, found.least_registers) == (4 * 8192, 32 + 32 + 1)
    assert [tile.name for tile in found.tiles if tile.place is ChipMemory.SHARED_MEMORY] == ["Q", "K", "V", MOVED]
