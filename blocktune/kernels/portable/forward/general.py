"""FlashAttention-2 forward with every feature of dense scores: window, soft cap, ALiBi, masks, dropout, packed lengths,
and of where keys lie: a cache of which every entry is filled to its own length, and pages of one.

The loops of kernels/portable/forward/pointers.py, where a score may be more than a product
(kernels/portable/forward/scores.py). Each feature is a constant of the compilation, and one that is absent leaves no
instruction. Plain shapes have kernels of their own, and Hopper's forward (kernels/hopper/forward/kernel.py) competes
for windows, soft caps and packed lengths.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import triton
import triton.language as tl

from blocktune.kernels.base.feature_arguments import (
    CACHE_FEATURES,
    DENSE_FEATURES,
    RUN_TIME_INTEGERS,
    broadcast_strides,
    check_extras,
    example_arguments,
    feature_constants,
    few_queries_problem,
    lse_strides,
    mask_bytes,
    mask_element_bytes,
    run_time_numbers,
    run_time_sizes,
)
from blocktune.kernels.base.flash_kernel import (
    IN_ORDER,
    all_strides,
    heads_per_group,
    looked_up_bytes,
    more_pages_bytes,
)
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec, Launch, SoftmaxCost
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import TensorArgument, in_units, named_in_units, specialize
from blocktune.kernels.base.steps import Launcher, Step, Workspace, take_addresses
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.layouts.forward_bytes import forward_bytes, most_forward_bytes
from blocktune.kernels.layouts.forward_tiles import TILE_ALIGNMENT_BYTES, ForwardTiles
from blocktune.kernels.portable.forward.aligned_masks import MaskRows, mask_specs
from blocktune.kernels.portable.forward.arguments import (
    Dropout,
    Keys,
    Matrix,
    Options,
    Scoring,
    SequenceBounds,
    SoftmaxState,
)
from blocktune.kernels.portable.forward.general_tiles import attend_general
from blocktune.kernels.portable.forward.pointers import FlashForward
from blocktune.kernels.portable.forward.tiles import in_elements, load_matrix, locate_tile, store_rows
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape

NARROW_COLUMNS = 64
"""Of heads whose accumulators leave registers for the scores of a whole warpgroup's tile."""

_DENSE = FlashForward()
"""Its tiles are the same, and so is what they take."""


@triton.jit(do_not_specialize=RUN_TIME_INTEGERS)
def flash_fwd_general_kernel(
    Q, K, V, Out, Lse, Mask, Slopes, CuQ, CuK, Lengths, Table, scale, softcap, kept_share, seed_lo, seed_hi, offset,
    threshold, stride_mb, stride_mh, stride_mm, stride_mn, stride_sb, stride_sh, stride_table, stride_lb, stride_lh,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, diagonal, window_left, window_right,
    OPTIONS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of one (batch, head), with the options of features.

    The tensors of `flash_fwd_kernel` with the softmax scale in natural units. Mask (uint8 or float), strides
    (batch, head, query, key); Slopes float32, strides (batch, head); kept_share: 1 - dropout_p. With CuQ and CuK int32
    [batch + 1] the sequences are packed: seqlen_q is the longest, and a program beyond its sequence has nothing to do.
    Lse has strides (batch, head) and one value for each query of a head. Lengths int32 [batch]: keys of every entry of
    a cache; Table int32, rows stride_table apart: the pages of every entry, which take the place of entries in K and V.
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
    entry = 0 if OPTIONS.PACKED else batch  # packed sequences are one entry of the tensors
    entry_kv = batch if OPTIONS.CACHED and OPTIONS.PAGE_SIZE == 0 else 0 if OPTIONS.CACHED else entry
    q_base = Q + entry * q_strides.batch + head * q_strides.head
    k_base = K + entry_kv * k_strides.batch + head_kv * k_strides.head
    v_base = V + entry_kv * v_strides.batch + head_kv * v_strides.head
    out_base = Out + entry * o_strides.batch + head * o_strides.head
    lse_base = None if Lse is None else Lse + entry * stride_lb + head * stride_lh
    if OPTIONS.PACKED:
        begin_q = tl.load(CuQ + batch)
        seqlen_q = tl.load(CuQ + batch + 1) - begin_q
        q_base += begin_q.to(tl.int64) * q_strides.row
        out_base += begin_q.to(tl.int64) * o_strides.row
        if Lse is not None:
            lse_base += begin_q
    if OPTIONS.CACHED:
        seqlen_k = tl.load(Lengths + batch)
    elif OPTIONS.PACKED:
        begin_k = tl.load(CuK + batch)
        seqlen_k = tl.load(CuK + batch + 1) - begin_k
        k_base += begin_k.to(tl.int64) * k_strides.row
        v_base += begin_k.to(tl.int64) * v_strides.row
    if OPTIONS.PACKED:
        if row_start >= seqlen_q:
            return
    if (OPTIONS.PACKED or OPTIONS.CACHED) and not OPTIONS.UPPER_LEFT:
        diagonal = seqlen_k - seqlen_q
    sequence = SequenceBounds(seqlen_q, seqlen_k, diagonal, window_left, window_right)
    slope = tl.load(Slopes + batch * stride_sb + head * stride_sh) if OPTIONS.ALIBI else 0.0
    mask_base = Mask + batch * stride_mb + head * stride_mh if OPTIONS.MASK != 0 else None
    scoring = Scoring(scale, softcap, slope, mask_base, stride_mm, stride_mn)
    dropout = Dropout(batch_head, kept_share, seed_lo, seed_hi, offset, threshold)
    k_rows, v_rows = Matrix(k_base, k_strides.row, seqlen_k), Matrix(v_base, v_strides.row, seqlen_k)
    line = Table + batch * stride_table if OPTIONS.PAGE_SIZE > 0 else None
    keys = Keys(k_rows, v_rows, k_page=k_strides.batch, v_page=v_strides.batch, table=line)
    # [BLOCK_M, WIDTH]
    q = load_matrix(Matrix(q_base, q_strides.row, seqlen_q), row_start, BLOCK_M, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, True)
    acc, l_i, m_i = attend_general(q, keys, row_start, sequence, scoring, dropout, OPTIONS)
    if OPTIONS.DROPOUT:
        acc = acc / kept_share
    state = SoftmaxState(acc, l_i, m_i)
    store_rows(state, out_base, lse_base, row_start, o_strides.row, seqlen_q, OPTIONS.HEAD_DIM_V, OPTIONS.MASK == 2)


@dataclass(frozen=True, slots=True)
class GeneralForwardLaunch(Launcher):
    """What `bind` returns: launch(q, k, v, out, lse, scale, extras), for scale > 0.

    The extras are as `Extras` says, with lengths that ascend and do not leave the tensors: they are on the device, so
    that no launch looks at them. Packed tokens outside all sequences are not written.
    """

    features: Features
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]
    options: Mapping[str, int]

    def prepared(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras, *, pins: bool
    ) -> Launch:
        """Return the launch of tensors like these.

        Raises:
            UsageError: the tensor of a feature is missing.
        """
        del lse, scale
        check_extras(self.features, extras)
        rows = MaskRows.of(extras.mask, pins=pins)
        space = Workspace((rows.elements, rows.dtype))
        line = None if extras.block_table is None else extras.block_table.stride(0)
        of_features = *rows.strides, *broadcast_strides(extras.alibi_slopes, 2), line
        strides, unit = in_units((*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]))
        packed, fixed_strides = self.features.varlen, lse_strides(q)
        attend = Step(flash_fwd_general_kernel, self.grid, (*strides, *self.fixed, unit), self.options, pins=pins)

        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras) -> None:
            addressed = take_addresses(*rows.steps, attend)
            memory = space.new(q.device) if rows.elements else None  # lives until both kernels are enqueued
            (copied,) = (None,) if memory is None else space.parts(memory, as_addresses=addressed)
            mask = rows.read(extras.mask if addressed else mask_bytes(extras.mask), copied)  # both have one address
            tensors = mask, extras.alibi_slopes, extras.cu_seqlens_q, extras.cu_seqlens_k
            cache = extras.cache_seqlens, extras.block_table
            of_lse = lse_strides(q) if packed else fixed_strides
            attend(q, k, v, out, lse, *tensors, *cache, *run_time_numbers(extras, scale), *of_features, *of_lse)

        return launch


class FlashForwardGeneral(AttentionKernel):
    """The forward for shapes with features."""

    name = "flash_fwd_general"
    features = DENSE_FEATURES | CACHE_FEATURES
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (32, 64, 128),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3),
    }
    preferences: ClassVar[tuple[tuple[int, int, int, int], ...]] = (
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (64, 64, 4, 2),
        (64, 32, 4, 2),
        (64, 32, 4, 1),
        (32, 32, 4, 1),
    )
    crowded: ClassVar[tuple[tuple[int, int, int, int], ...]] = ((128, 32, 8, 3), *preferences[-3:])
    """With dropout where products are of `mma`, whose operands leave no registers for the words of 64 keys."""
    narrow: ClassVar[tuple[tuple[int, int, int, int], ...]] = ((64, 64, 4, 3), *preferences)
    boolean: ClassVar[tuple[tuple[int, int, int, int], ...]] = ((64, 32, 4, 3), *preferences)
    """head_dim up to 64, and boolean masks, on an H200: 6 to 20 % less time than the first preference takes."""
    few_rows: ClassVar[tuple[tuple[int, int, int, int], ...]] = ((32, 64, 4, 1), *preferences)
    """A mask and up to 32 queries, on an H200: up to a third less time, since larger tiles would be empty."""

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if not shape.features:
            return f"{self.name} is for shapes with features, and plain ones have faster kernels"
        return few_queries_problem(self.name, shape) or super().shape_problem(shape, limits)

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return what the loops of the plain kernel take in order, with a mask, the pairs that dropout keeps, and the
        pages of keys."""
        pages = looked_up_bytes(config, shape) * (limits.mma != "none")
        return max(forward_bytes(tiles) for tiles in _loops(config, shape, limits)) + pages

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        pages = looked_up_bytes(config, shape) + more_pages_bytes(config, shape, limits)
        pages += TILE_ALIGNMENT_BYTES * (shape.features.page_size > 0 and pages > 0)  # tiles may begin after them
        return max(most_forward_bytes(tiles) for tiles in _loops(config, shape, limits)) + pages

    def tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _DENSE.tensor_memory_columns(_in_order(config), shape, limits)

    def most_tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _DENSE.most_tensor_memory_columns(_in_order(config), shape, limits)

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        return _DENSE.softmax_cost(_in_order(config))

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        names, blocks = tuple(self.parameters), self._preferred(shape, limits)
        candidates = [KernelConfig.of(self.name, dict(zip(names, values, strict=True))) for values in blocks]
        return self.first_fitting(candidates, shape, limits)

    def _preferred(self, shape: AttentionShape, limits: ComputeLimits) -> tuple[tuple[int, int, int, int], ...]:
        """Return blocks, warps and stages of defaults, the best first."""
        if limits.mma == "mma" and shape.features.dropout:
            return self.crowded
        if limits.mma == "wgmma" and shape.features.mask is not MaskKind.NONE and shape.seqlen_q <= 32:
            return self.few_rows
        if limits.mma == "wgmma" and max(shape.head_dim, shape.head_dim_v) <= NARROW_COLUMNS:
            return self.narrow
        if limits.mma == "wgmma" and shape.features.mask is MaskKind.BOOLEAN:
            return self.boolean
        return self.preferences

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        arguments: dict[str, Any] = dict.fromkeys(("Q", "K", "V", "Out"), TensorArgument(shape.dtype)) | {"Lse": None}
        arguments |= example_arguments(shape)
        arguments |= named_in_units(all_strides(shape, "qkvo"))
        arguments |= self.sizes(shape) | {"OPTIONS": self.constants(config, shape)}
        return specialize(flash_fwd_general_kernel, arguments, _DENSE.options(config))

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        return mask_specs(shape)

    def bind(self, config: KernelConfig, shape: AttentionShape) -> GeneralForwardLaunch:
        fixed = (*self.sizes(shape).values(), self.constants(config, shape))
        return GeneralForwardLaunch(shape.features, _DENSE.grid(config, shape), fixed, _DENSE.options(config))

    def sizes(self, shape: AttentionShape) -> dict[str, int]:
        return run_time_sizes(shape, shape.batch * shape.num_heads, heads_per_group(shape))

    def constants(self, config: KernelConfig, shape: AttentionShape) -> Options:
        values = _DENSE.constants(_in_order(config), shape) | feature_constants(shape)
        values["RAGGED"] = _is_ragged(config, shape)
        return Options(**values)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_fwd_general_kernel)


def _loops(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[ForwardTiles, ...]:
    """Return the tiles of the loop over whole tiles, and those of a loop at the end of the keys."""
    features = shape.features
    tiles = replace(
        _DENSE.forward_tiles(_in_order(config), shape, limits),
        mask_element_bytes=mask_element_bytes(shape),
        dropout=features.dropout,
    )
    return (tiles, replace(tiles, mask_checked=True)) if _is_ragged(config, shape) else (tiles,)


def _is_ragged(config: KernelConfig, shape: AttentionShape) -> bool:
    """Return whether a tile of keys may reach beyond the last one of its sequence."""
    return shape.seqlen_k % config.block_n != 0 or shape.features.varlen or shape.features.cached


def _in_order(config: KernelConfig) -> KernelConfig:
    return replace(config, extra=(("schedule", IN_ORDER),))
