"""FlashAttention-2 forward with K and V loaded through tensor descriptors (TMA), for compute capability 9.0 and newer.

The same computation as kernels/portable/forward/pointers.py; the copy engine computes the addresses and fills with
zeros outside.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import triton
import triton.language as tl

from blocktune.kernels.base.flash_kernel import (
    AHEAD_FIXED,
    IN_ORDER,
    LOG2_E,
    RUN_TIME_SIZES,
    SWIZZLE_BYTES,
    FlashKernel,
    all_strides,
    operand_widths,
    product_unit,
)
from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.base.launch import TritonLaunch
from blocktune.kernels.base.specialize import DescriptorArgument, TensorArgument, in_units, named_in_units, specialize
from blocktune.kernels.base.tile_bounds import BARRIER_BYTES
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.layouts.forward_tiles import ForwardTiles
from blocktune.kernels.portable.forward.arguments import Keys, Matrix, Options, SequenceBounds
from blocktune.kernels.portable.forward.tiles import attend, in_elements, load_matrix, locate_tile, store_rows
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

TMA_ALIGNMENT_BYTES = 16
"""A descriptor's base address and outer strides are multiples of this (CUDA driver API, cuTensorMapEncodeTiled)."""


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def flash_fwd_tma_kernel(
    Q, k_desc, v_desc, Out, Lse, scale_log2,
    stride_qb, stride_qh, stride_qm, stride_ob, stride_oh, stride_om,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, causal_offset,
    OPTIONS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute what `flash_fwd_kernel` computes, with descriptors of K and V [batch, num_heads / group_size, seqlen_k,
    HEAD_DIM(_V)] whose blocks are [1, 1, BLOCK_N, WIDTH(_V)].
    """
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    q_strides = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    o_strides = in_elements(stride_ob, stride_oh, stride_om, UNIT)
    tile_m, batch_head = locate_tile(
        tl.program_id(0), tl.cdiv(seqlen_q, BLOCK_M), batch_heads, head_group, OPTIONS.CAUSAL
    )
    batch = batch_head // num_heads
    head = batch_head % num_heads
    row_start = tile_m * BLOCK_M
    sequence = SequenceBounds(seqlen_q, seqlen_k, causal_offset)
    q_base = Q + batch.to(tl.int64) * q_strides.batch + head.to(tl.int64) * q_strides.head
    # [BLOCK_M, WIDTH]
    q = load_matrix(Matrix(q_base, q_strides.row, seqlen_q), row_start, BLOCK_M, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, True)
    keys = Keys(Matrix(k_desc, 0, seqlen_k), Matrix(v_desc, 0, seqlen_k), batch, head // group_size)
    state = attend(q, keys, row_start, sequence, scale_log2, OPTIONS)
    lse_base = None if Lse is None else Lse + batch_head.to(tl.int64) * seqlen_q
    out_base = Out + batch.to(tl.int64) * o_strides.batch + head.to(tl.int64) * o_strides.head
    store_rows(state, out_base, lse_base, row_start, o_strides.row, seqlen_q, OPTIONS.HEAD_DIM_V)


class FlashForwardTma(FlashKernel):
    """The forward kernel for GPUs with a tensor copy engine."""

    name = "flash_fwd_tma"
    ladder_steps = ("tuned",)
    flex_options: ClassVar[Mapping[str, bool]] = {"fwd_USE_TMA": True}
    preferences = (
        (64, 64, 4, 3, AHEAD_FIXED),
        (64, 64, 4, 2, AHEAD_FIXED),
        (64, 32, 4, 2, AHEAD_FIXED),
        (64, 64, 4, 2, IN_ORDER),
        (64, 32, 4, 2, IN_ORDER),
        (64, 32, 4, 1, IN_ORDER),
        (32, 32, 4, 1, IN_ORDER),
    )

    @property
    def function(self) -> Any:
        return flash_fwd_tma_kernel

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if limits.cc < (9, 0):
            return f"{self.name} needs a tensor copy engine (compute capability 9.0 or newer), but got {limits.name}"
        for name, dim in (("head_dim", shape.head_dim), ("head_dim_v", shape.head_dim_v)):
            if dim * shape.element_bytes % TMA_ALIGNMENT_BYTES:
                return (
                    f"`{name} * element size` must be a multiple of {TMA_ALIGNMENT_BYTES} B for {self.name}, "
                    f"but got {name}={dim}, {shape.dtype}"
                )
        return super().shape_problem(shape, limits)

    def layout_problem(self, q: Any, k: Any, v: Any) -> str | None:
        for name, tensor in (("key", k), ("value", v)):
            steps = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1])]
            if any(step % TMA_ALIGNMENT_BYTES for step in steps):
                return f"the address and strides of {name} must be multiples of {TMA_ALIGNMENT_BYTES} B for {self.name}"
        return super().layout_problem(q, k, v)

    def forward_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> ForwardTiles:
        return replace(super().forward_tiles(config, shape, limits), keys_whole=True)

    def barrier_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits, depth: int) -> int:
        """Return 8 bytes per load in flight. K and V have an array each, aligned to 16 bytes; ahead on wgmma they share
        one."""
        one_array, in_order = BARRIER_BYTES * depth, config.parameters["schedule"] == IN_ORDER
        on_wgmma = product_unit(config, limits) == "wgmma"
        if config.num_stages == 1:
            return one_array * (_places_of_lone_barrier(config, shape) if on_wgmma and in_order else 1)
        return one_array if on_wgmma and not in_order else one_array + -(-one_array // 16) * 16

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        tensor, (width, width_v) = TensorArgument(shape.dtype), operand_widths(shape)
        arguments: dict[str, Any] = {
            "Q": tensor,
            "k_desc": DescriptorArgument(shape.dtype, (1, 1, config.block_n, width)),
            "v_desc": DescriptorArgument(shape.dtype, (1, 1, config.block_n, width_v)),
            "Out": tensor,
            "Lse": None,
            "scale_log2": 1.0,
        }
        arguments |= named_in_units(all_strides(shape, "qo"))
        arguments |= self.sizes(shape) | {"OPTIONS": Options(**self.constants(config, shape), TMA=True)}
        return specialize(flash_fwd_tma_kernel, arguments, self.options(config))

    def bind(self, config: KernelConfig, shape: AttentionShape) -> TritonLaunch:
        key_block, value_block = ([1, 1, config.block_n, width] for width in operand_widths(shape))
        fixed = (*self.sizes(shape).values(), Options(**self.constants(config, shape), TMA=True))
        return TritonLaunch(
            flash_fwd_tma_kernel,
            self.grid(config, shape),
            _leading,
            partial(_trailing, fixed),
            self.options(config),
            ((1, partial(_describe, key_block)), (2, partial(_describe, value_block))),
        )


def _places_of_lone_barrier(config: KernelConfig, shape: AttentionShape) -> int:
    """Return how many barriers would fit the place of the one that K and V have where they take turns.

    Where K and V end at the same byte after Q, the next place that they may begin at is a swizzle's eight rows away.
    """
    width, width_v = operand_widths(shape)
    if width != width_v or config.block_n <= config.block_m:
        return 1
    return min(SWIZZLE_BYTES, width * shape.element_bytes)


def _leading(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> tuple[Any, ...]:
    return q, k, v, out, lse, scale * LOG2_E


def _describe(block: list[int], tensor: Any) -> Any:
    """Return the descriptor of K or V without its constructor's checks, which take longer than all the rest of it.

    `layout_problem` makes them once for every kind of tensor, not at every launch.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = tensor, tensor.shape, tensor.stride(), block
    return made


def _trailing(fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    strides, unit = in_units((*q.stride()[:3], *out.stride()[:3]))
    return *strides, *fixed, unit
