"""The gradient of an additive mask, next to any backward kernel (bias_kernel.py)."""

from dataclasses import dataclass
from typing import Any

from blocktune.kernels.base.feature_arguments import broadcast_strides, run_time_numbers, run_time_sizes
from blocktune.kernels.base.flash_kernel import padded_width
from blocktune.kernels.base.specialize import in_units
from blocktune.kernels.portable.backward.base import row_sums, tile_constants
from blocktune.kernels.portable.backward.bias_kernel import bias_kernel
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.shape import AttentionShape

PROGRAMS = 264
"""Below this many tiles a mask is summed up in parts: two programs for each multiprocessor of an H200. A constant, so
that the bits do not depend on the GPU."""

EXCHANGE_BYTES = 2048


@dataclass(frozen=True, slots=True)
class BiasTile:
    """Queries and keys of a tile of the mask, with the warps and stages of its program."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, shape: AttentionShape) -> int:
        """Return the shared memory of the tiles that are loaded ahead, with room for what goes between warps."""
        columns = padded_width(shape.head_dim) + padded_width(shape.head_dim_v)
        return (self.block_m + self.block_n) * columns * shape.element_bytes * self.num_stages + EXCHANGE_BYTES


NARROW_TILE, NARROW = BiasTile(64, 64, 4, 3), 64
"""Of heads up to `NARROW` columns: with masks of every head 14 to 35 % less time than any other on an H200."""
TILES = (
    BiasTile(128, 64, 8, 2),
    BiasTile(64, 64, 4, 2),
    BiasTile(64, 64, 4, 1),
    BiasTile(32, 32, 4, 1),
    BiasTile(16, 16, 4, 1),
)
"""Best first."""


def bias_tile(shape: AttentionShape, shared_bytes: int) -> BiasTile:
    """Return the first tile that fits into this much shared memory. The products of float32 keep copies of their
    factors in registers, so that larger tiles spill."""
    narrow = max(padded_width(shape.head_dim), padded_width(shape.head_dim_v)) <= NARROW
    fitting = (tile for tile in (NARROW_TILE, *TILES)[not narrow :] if tile.shared_bytes(shape) <= shared_bytes)
    return next(tile for tile in fitting if shape.dtype != "float32" or tile.block_m <= 64)


def bias_gradient(
    shape: AttentionShape,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    scale: float,
    extras: Extras,
    tile: BiasTile | None = None,
) -> Any:
    """Return the gradient of the additive mask of the extras, contiguous in its sizes and type. The same bits in every
    run.

    Args:
        shape: of the backward; its features are those of the extras, which are not packed.
        q, k, v, out, dout: heads first, with contiguous rows.
        lse: contiguous.
        tile: by default the one for the GPU's shared memory.
    """
    mask: Any = extras.mask
    tile = tile or bias_tile(shape, _shared_bytes(q))
    one_row = mask.shape[2] == 1
    own_batches, own_heads = mask.shape[:2]
    batches, heads = shape.batch // own_batches, shape.num_heads // own_heads
    tiles_m, tiles_n = -(-shape.seqlen_q // tile.block_m), -(-shape.seqlen_k // tile.block_n)
    programs = own_batches * own_heads * tiles_n * (1 if one_row else tiles_m)
    steps = batches * heads * (tiles_m if one_row else 1)
    parts = min(steps, -(-PROGRAMS // programs))
    found = mask.new_empty((parts, *mask.shape)) if parts == 1 else lse.new_empty((parts, *mask.shape))
    strides, unit = in_units(tuple(stride for tensor in (q, k, v, dout) for stride in tensor.stride()[:3]))
    bias_kernel[(programs * parts,)](
        q, k, v, dout, lse, _row_sums(out, dout, lse, extras), found, mask, extras.alibi_slopes,
        *run_time_numbers(extras, scale), *broadcast_strides(mask, 4), *broadcast_strides(extras.alibi_slopes, 2),
        *strides, *run_time_sizes(shape, 1, 1).values(), own_heads, batches, heads, parts,
        tile_constants(shape, tile.block_m, tile.block_n, tile.num_stages), one_row, unit,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return found[0] if parts == 1 else found.sum(0).to(mask.dtype)


def _row_sums(out: Any, dout: Any, lse: Any, extras: Extras) -> Any:
    """Return rowsum(out * dout), less the gradient of the log-sum-exp."""
    import torch

    sums = torch.empty_like(lse)
    row_sums(out, dout, pins=False)(out, dout, sums)
    return sums if extras.grad_lse is None else sums - extras.grad_lse


def _shared_bytes(tensor: Any) -> int:
    """Return the shared memory that a program may have where the tensor is."""
    import torch

    if not tensor.is_cuda:
        return 1 << 16  # of the interpreter: any
    properties: Any = torch.cuda.get_device_properties(tensor.device)
    return int(properties.shared_memory_per_block_optin)
