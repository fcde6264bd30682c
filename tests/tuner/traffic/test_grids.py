"""The grid that every kernel is launched with is the one that models, waves and the ladder count: nothing runs here,
launches are asked."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.jit import KernelInterface

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.decode import kernel as flash_decode_hopper
from blocktune.kernels.hopper.forward import launch as flash_fwd_hopper
from blocktune.kernels.hopper.forward.short import kernel as flash_fwd_hopper_short
from blocktune.kernels.hopper.fp8 import kernel as flash_fwd_fp8
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import CacheType, Features, MaskKind
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal, Direction
from blocktune.kernels.values.visible_ranges import query_spans
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.compare.ladder_steps import grid_of
from blocktune.tuner.traffic.visited_tiles import visits_of
from tests.support.triton_modes import compiled_here

HOPPER = limits_for((9, 0))
PLAIN = complete_shape(512, 64, batch=2, heads=8, kv_heads=2)
"""Its grids have fewer blocks than a GPU has multiprocessors, so that a kernel that stays on them starts one a tile."""

pytestmark = compiled_here


def shape_for(kernel: str, **changes: Any) -> AttentionShape:
    own: dict[str, dict[str, Any]] = {
        "flash_fwd_general": {"features": Features(softcap=True)},
        "flash_fwd_sparse": {"features": Features(mask=MaskKind.BLOCK_SPARSE)},
        "flash_bwd_sparse": {"features": Features(mask=MaskKind.BLOCK_SPARSE)},
        "flash_bwd_hopper_sparse": {"features": Features(mask=MaskKind.BLOCK_SPARSE)},
        "flash_decode": {"seqlen_q": 3},
        "flash_decode_hopper": {"seqlen_q": 3},
        "flash_decode8": {"seqlen_q": 3, "features": Features(cached=True, kv=CacheType.INT8)},
        "flash_decode8_hopper": {"seqlen_q": 3, "features": Features(cached=True, kv=CacheType.INT8)},
        "flash_decode8_ring": {
            "seqlen_q": 3,
            "features": Features(cached=True, kv=CacheType.INT8),
            "head_dim": 128,
            "head_dim_v": 128,
        },
        "flash_fwd_fp8": {"dtype": FP8},
    }
    return replace(PLAIN, direction=KERNELS[kernel].direction, **own.get(kernel, {}) | changes)


def extras_for(shape: AttentionShape) -> tuple[Extras, ...]:
    if shape.features.mask is MaskKind.BLOCK_SPARSE:
        lengths = {"seqlen_q": shape.seqlen_q, "seqlen_k": shape.seqlen_k}
        return (Extras(block_mask=BlockMask.from_predicate(lambda q, k: q >= k, block_q=128, block_k=128, **lengths)),)
    return (Extras(softcap=5.0),) if shape.features else ()


def tensors_of(shape: AttentionShape) -> tuple[Any, ...]:
    """q, k, v, out and log-sum-exp, and for a backward also the gradients."""
    rows, keys = (shape.batch, shape.num_heads, shape.seqlen_q), (shape.batch, shape.num_heads_kv, shape.seqlen_k)
    q, k, v = (torch.zeros(*sizes, shape.head_dim, dtype=torch.bfloat16) for sizes in (rows, keys, keys))
    result = (q, k, v, torch.zeros_like(q), torch.zeros(rows))
    if shape.direction is Direction.FORWARD:
        return result
    return *result, torch.zeros_like(q), *map(torch.zeros_like, (q, k, v))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[KernelConfig, AttentionShape], int]:
    """Blocks of the function of a config's specification, by the launch itself."""
    grids: dict[Any, int] = {}

    def record(function: Any, grid: Any) -> Callable[..., None]:
        grids[function] = 1
        for count in grid:
            grids[function] *= count
        return lambda *arguments, **options: None

    monkeypatch.setattr(KernelInterface, "__getitem__", record)
    for module in (flash_fwd_fp8, flash_fwd_hopper, flash_fwd_hopper_short):
        monkeypatch.setattr(module, "tile_counter", lambda device: None)
    monkeypatch.setattr(flash_decode_hopper, "scratch", lambda device, counters, floats: (None, None))

    def blocks(config: KernelConfig, shape: AttentionShape) -> int:
        kernel = KERNELS[config.kernel]
        kernel.bind(config, shape)(*tensors_of(shape), 0.125, *extras_for(shape))
        return grids[kernel.compile_spec(config, shape).function]

    return blocks


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
@pytest.mark.parametrize("kernel", KERNELS)
def test_models_count_the_blocks_that_are_launched(kernel: str, causal: Causal, launched) -> None:
    shape = shape_for(kernel, causal=causal)
    config = KERNELS[kernel].default_config(shape, HOPPER)
    if "persistent" in config.parameters:  # asks the GPU how many multiprocessors it has
        config = KernelConfig.of(kernel, config.parameters | {"persistent": 0})
    assert grid_of(config, shape) == launched(config, shape)


@pytest.mark.parametrize("kernel", ["flash_bwd_split", "flash_bwd_fused"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("window", [None, (40, 0), (13, 30), (-1, 20), (20, -1)])
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("lengths", [(300, 300), (200, 500), (500, 200)])
def test_a_backward_s_blocks_walk_as_many_tiles_as_those_of_its_forward(
    kernel: str, group: int, window: Any, causal: Causal, lengths: tuple[int, int]
) -> None:
    queries, keys = lengths
    shape = replace(
        shape_for(kernel, causal=causal, features=Features(window=window)),
        num_heads=2 * group,
        seqlen_q=queries,
        seqlen_k=keys,
    )
    config = KERNELS[kernel].default_config(shape, HOPPER)
    blocks, folded = KERNELS[kernel].as_forward(config, shape)
    assert (folded.direction, folded.num_heads, folded.group_size) == (Direction.FORWARD, 2, 1)
    spans = query_spans(shape, config.block_m, config.block_n)
    walked = sum(max(1, group * -(-len(span) // config.block_m)) for span in spans)
    found = visits_of(folded, blocks.block_m, blocks.block_n)
    assert found.query_tiles == len(spans)
    # turned round, tiles begin at the other end of the sequences; along a group, every walk is a whole number of tiles
    assert abs(found.total - walked) <= (len(spans) if group > 1 else 4)


def test_a_group_without_a_mask_is_walked_exactly() -> None:
    shape = shape_for("flash_bwd_split", seqlen_q=300)
    config = KERNELS["flash_bwd_split"].default_config(shape, HOPPER)
    blocks, folded = KERNELS["flash_bwd_split"].as_forward(config, shape)
    found = visits_of(folded, blocks.block_m, blocks.block_n)
    tiles = -(-300 // config.block_m) * shape.group_size
    assert (found.longest, found.total) == (tiles, tiles * -(-512 // config.block_n))
