"""FlashAttention-2 forward with masked pointers: runs wherever Triton does.

out = softmax(scale * q k^T) v for one block of query rows a program, with K and V read tile by tile (FlashAttention-2,
arXiv 2307.08691, algorithm 1). Any lengths, head dimensions up to 256, grouped query heads and outer strides.
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
    FlashKernel,
    all_strides,
)
from blocktune.kernels.base.kernel import CompileSpec, SoftmaxCost
from blocktune.kernels.base.launch import TritonLaunch
from blocktune.kernels.base.specialize import TensorArgument, in_units, named_in_units, specialize
from blocktune.kernels.portable.forward.arguments import Keys, Matrix, Options, SequenceBounds
from blocktune.kernels.portable.forward.tiles import attend, in_elements, load_matrix, locate_tile, store_rows
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

ADDRESS_INSTRUCTIONS = 6.0
"""Of 16 bytes: the copy, a 64-bit addition in three, a predicate and the swizzled place in shared memory."""


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def flash_fwd_kernel(
    Q, K, V, Out, Lse, scale_log2,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, causal_offset,
    OPTIONS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of one (batch, head).

    Q [batch, num_heads, seqlen_q, HEAD_DIM], K and V [batch, num_heads / group_size, seqlen_k, HEAD_DIM(_V)], Out like
    Q with HEAD_DIM_V; strides of (batch, head, row) in UNIT elements, the last is 1 element. Lse [batch, num_heads,
    seqlen_q] or None. scale_log2: the softmax scale times log2(e). OPTIONS: `Options`.
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
    queries = Matrix(Q + batch * q_strides.batch + head * q_strides.head, q_strides.row, seqlen_q)
    # [BLOCK_M, WIDTH]
    q = load_matrix(queries, row_start, BLOCK_M, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, True)
    k_base = K + batch * k_strides.batch + head_kv * k_strides.head
    v_base = V + batch * v_strides.batch + head_kv * v_strides.head
    keys = Keys(Matrix(k_base, k_strides.row, seqlen_k), Matrix(v_base, v_strides.row, seqlen_k))
    state = attend(q, keys, row_start, sequence, scale_log2, OPTIONS)
    lse_base = None if Lse is None else Lse + batch_head.to(tl.int64) * seqlen_q
    out_base = Out + batch * o_strides.batch + head * o_strides.head
    store_rows(state, out_base, lse_base, row_start, o_strides.row, seqlen_q, OPTIONS.HEAD_DIM_V)


class FlashForward(FlashKernel):
    """The portable forward kernel."""

    name = "flash_fwd"
    ladder_steps = ("v2", "tuned")
    flex_options: ClassVar[Mapping[str, bool]] = {}
    preferences = (
        (128, 64, 8, 3, AHEAD_FIXED),
        (128, 64, 8, 2, AHEAD_FIXED),
        (64, 64, 4, 2, AHEAD_FIXED),
        (128, 64, 8, 2, IN_ORDER),
        (64, 64, 4, 2, IN_ORDER),
        (64, 32, 4, 1, IN_ORDER),
        (32, 32, 4, 1, IN_ORDER),
    )

    @property
    def function(self) -> Any:
        return flash_fwd_kernel

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        return replace(super().softmax_cost(config), address_instructions=ADDRESS_INSTRUCTIONS)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        tensor = TensorArgument(shape.dtype)
        arguments: dict[str, Any] = {
            "Q": tensor,
            "K": tensor,
            "V": tensor,
            "Out": tensor,
            "Lse": None,
            "scale_log2": 1.0,
        }
        arguments |= named_in_units(all_strides(shape, "qkvo"))
        arguments |= self.sizes(shape) | {"OPTIONS": Options(**self.constants(config, shape))}
        return specialize(flash_fwd_kernel, arguments, self.options(config))

    def bind(self, config: KernelConfig, shape: AttentionShape) -> TritonLaunch:
        fixed = (*self.sizes(shape).values(), Options(**self.constants(config, shape)))
        return TritonLaunch(
            flash_fwd_kernel, self.grid(config, shape), _leading, partial(_trailing, fixed), self.options(config)
        )


def _leading(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> tuple[Any, ...]:
    return q, k, v, out, lse, scale * LOG2_E


def _trailing(fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    strides, unit = in_units((*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]))
    return *strides, *fixed, unit
