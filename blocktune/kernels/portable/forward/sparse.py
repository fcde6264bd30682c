"""Block-sparse FlashAttention forward: a program reads only the key blocks that the mask names for its query rows.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (arXiv 2205.14135), algorithm
5, with FlashAttention-2's loops (queries outside) and a list of active blocks instead of a test of every block, so that
a block that takes no part costs nothing at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import triton
import triton.language as tl

from blocktune.kernels.base.flash_kernel import (
    AHEAD,
    AHEAD_FIXED,
    IN_ORDER,
    LOG2_E,
    RUN_TIME_SIZES,
    all_strides,
    schedule_problem,
)
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec, Launch, SoftmaxCost
from blocktune.kernels.base.loops import ForwardLoops, Visits
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import TensorArgument, in_units, named_in_units, specialize
from blocktune.kernels.base.steps import Launcher, Step
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.portable.forward.arguments import BlockList, Keys, Matrix, Options, SequenceBounds
from blocktune.kernels.portable.forward.pointers import FlashForward
from blocktune.kernels.portable.forward.sparse_tiles import LIST_SIZES, attend_listed, steps_before, tile_shift
from blocktune.kernels.portable.forward.tiles import (
    in_elements,
    key_tiles,
    load_matrix,
    locate_tile,
    store_rows,
)
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape

if TYPE_CHECKING:
    from blocktune.kernels.values.block_mask import BlockMask

NARROW_TILE_BYTES = 1024
"""More than warps exchange of P where a tile has fewer keys than the plain kernel's."""
_DENSE = FlashForward()
"""Its tiles are the same, and so is what they take."""


@triton.jit(do_not_specialize=(*RUN_TIME_SIZES, *LIST_SIZES))
def flash_fwd_sparse_kernel(
    Q, K, V, Out, Lse, Indices, Before, scale_log2,
    stride_lb, stride_lh, stride_lr, num_blocks, row_shift, tile_shift,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, causal_offset,
    OPTIONS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of one (batch, head), all in one row of blocks.

    The tensors of `flash_fwd_kernel`, and Indices and Before [batch or 1, heads or 1, rows, num_blocks + 1], the lists
    of `BlockMask.rows`.
    """
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    q_strides = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    k_strides = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    v_strides = in_elements(stride_vb, stride_vh, stride_vn, UNIT)
    o_strides = in_elements(stride_ob, stride_oh, stride_om, UNIT)
    tile_m, batch_head = locate_tile(
        tl.program_id(0), tl.cdiv(seqlen_q, BLOCK_M), batch_heads, head_group, OPTIONS.CAUSAL
    )
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    head_kv = head // group_size
    row_start = tile_m * BLOCK_M
    sequence = SequenceBounds(seqlen_q, seqlen_k, causal_offset)
    listed = batch * stride_lb + head * stride_lh + (tile_m >> row_shift).to(tl.int64) * stride_lr
    full_tile, stop_tile = key_tiles(row_start, sequence, OPTIONS)
    full = steps_before(Before + listed, full_tile, num_blocks, tile_shift)
    stop = steps_before(Before + listed, stop_tile, num_blocks, tile_shift)
    queries = Matrix(Q + batch * q_strides.batch + head * q_strides.head, q_strides.row, seqlen_q)
    # [BLOCK_M, WIDTH]
    q = load_matrix(queries, row_start, BLOCK_M, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, True)
    k_base = K + batch * k_strides.batch + head_kv * k_strides.head
    v_base = V + batch * v_strides.batch + head_kv * v_strides.head
    keys = Keys(Matrix(k_base, k_strides.row, seqlen_k), Matrix(v_base, v_strides.row, seqlen_k))
    blocks = BlockList(Indices + listed, tile_shift)
    state = attend_listed(q, keys, blocks, full, stop, row_start, sequence, scale_log2, OPTIONS)
    lse_base = None if Lse is None else Lse + batch_head.to(tl.int64) * seqlen_q
    out_base = Out + batch * o_strides.batch + head * o_strides.head
    store_rows(state, out_base, lse_base, row_start, o_strides.row, seqlen_q, OPTIONS.HEAD_DIM_V)


@dataclass(frozen=True, slots=True)
class SparseForwardLaunch(Launcher):
    """What `bind` returns: launch(q, k, v, out, lse, scale, extras) with a `BlockMask` among the extras."""

    shape: AttentionShape
    config: KernelConfig
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]
    options: Mapping[str, int]

    def prepared(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras, *, pins: bool
    ) -> Launch:
        """Return a launch for masks with the blocks of this one.

        Raises:
            UsageError: the block mask is missing, belongs to another shape, or has blocks that the tiles do not divide.
        """
        del lse, scale
        shape, mask = self.shape, fitting_mask(extras, self.shape, q)
        shifts = (
            tile_shift("block_m", mask.block_q, self.config.block_m),
            tile_shift("block_n", mask.block_k, self.config.block_n),
        )
        strides, unit = in_units((*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]))
        rest = *shifts, *strides, *self.fixed, unit
        attend = Step(flash_fwd_sparse_kernel, self.grid, rest, self.options, pins=pins)

        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras) -> None:
            mask = fitting_mask(extras, shape, q)
            lists = mask.rows
            listing = (*mask.strides(lists), mask.mask.shape[3])
            attend(q, k, v, out, lse, lists.indices, lists.before, scale * LOG2_E, *listing)

        return launch


class FlashForwardSparse(AttentionKernel):
    """The forward under a block mask. Its tiles must divide the mask's blocks, which a launch checks."""

    name = "flash_fwd_sparse"
    loops = ForwardLoops(visits=Visits.BLOCK_MASK)
    features = frozenset({str(MaskKind.BLOCK_SPARSE)})
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (16, 32, 64, 128),
        "block_n": (16, 32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
        "schedule": (IN_ORDER, AHEAD, AHEAD_FIXED),
    }
    # Blocks of 64 serve every mask whose blocks are 64 or more.
    preferences: ClassVar[tuple[tuple[int, int, int, int, int], ...]] = (
        (64, 64, 4, 3, AHEAD_FIXED),
        (64, 64, 4, 2, AHEAD_FIXED),
        (64, 64, 4, 2, IN_ORDER),
        (64, 32, 4, 2, IN_ORDER),
        (64, 32, 4, 1, IN_ORDER),
        (32, 16, 4, 1, IN_ORDER),
    )

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        return mask_problem(self, shape) or super().shape_problem(shape, limits)

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        """Return the broken rules, besides the range of every parameter: what `schedule_problem` says."""
        return super().rule_violations(config, shape, limits) or schedule_problem(config, shape, limits)

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _DENSE.shared_bytes(config, shape, limits)

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _DENSE.most_shared_bytes(config, shape, limits)

    def tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _DENSE.tensor_memory_columns(config, shape, limits)

    def most_tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _DENSE.most_tensor_memory_columns(config, shape, limits)

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        return _DENSE.softmax_cost(config)

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        names = tuple(self.parameters)
        candidates = [KernelConfig.of(self.name, dict(zip(names, values, strict=True))) for values in self.preferences]
        if limits.mma != "wgmma":  # as in the dense kernel, running ahead is for wgmma
            candidates = [config for config in candidates if config.parameters["schedule"] == IN_ORDER]
        return self.first_fitting(candidates, shape, limits)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        tensor, numbers = TensorArgument(shape.dtype), TensorArgument("int32")
        arguments: dict[str, Any] = dict.fromkeys(("Q", "K", "V", "Out"), tensor) | {"Lse": None, "scale_log2": 1.0}
        arguments |= {"Indices": numbers, "Before": numbers} | dict.fromkeys(LIST_SIZES, 1)
        arguments |= named_in_units(all_strides(shape, "qkvo"))
        arguments |= _DENSE.sizes(shape) | {"OPTIONS": Options(**_DENSE.constants(config, shape))}
        return specialize(flash_fwd_sparse_kernel, arguments, _DENSE.options(config))

    def bind(self, config: KernelConfig, shape: AttentionShape) -> SparseForwardLaunch:
        fixed = (*_DENSE.sizes(shape).values(), Options(**_DENSE.constants(config, shape)))
        return SparseForwardLaunch(shape, config, _DENSE.grid(config, shape), fixed, _DENSE.options(config))

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_fwd_sparse_kernel)


def mask_problem(kernel: AttentionKernel, shape: AttentionShape) -> str | None:
    """Return why a block-sparse kernel cannot serve a shape, or None."""
    if shape.features.mask is MaskKind.BLOCK_SPARSE:
        return None
    return f"{kernel.name} needs a block mask, but the shape has the mask `{shape.features.mask}`"


def fitting_mask(extras: Extras, shape: AttentionShape, query: Any) -> "BlockMask":
    """Return the block mask of a call.

    Raises:
        UsageError: it is missing, on another device than the query, or belongs to another shape.
    """
    from blocktune.kernels.values.block_mask import BlockMask  # imports torch

    mask = extras.block_mask
    if not isinstance(mask, BlockMask):
        raise UsageError(f"`block_mask` must be a BlockMask, but got {type(mask).__name__}. Make one: from_dense.")
    if mask.mask.device != query.device:
        raise UsageError(
            f"`block_mask` must be on the query's device, but got {mask.mask.device} and {query.device}. "
            "Make the BlockMask there."
        )
    mask.check_fits(shape)
    return mask
