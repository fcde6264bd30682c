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
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCHEDULE: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Q [batch, num_heads, seqlen_q, HEAD_DIM], K and V [batch, num_heads / group_size, seqlen_k, HEAD_DIM(_V)], Out
    like Q with HEAD_DIM_V; strides of (batch, head, row) in UNIT elements, the last is 1 element. Lse [batch,
    num_heads, seqlen_q] or None. scale_log2: the softmax scale times log2(e). This program computes BLOCK_M rows of one
    (batch, head).
    """
    stride_qb, stride_qh, stride_qm = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    stride_kb, stride_kh, stride_kn = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    stride_vb, stride_vh, stride_vn = in_elements(stride_vb, stride_vh, stride_vn, UNIT)
    stride_ob, stride_oh, stride_om = in_elements(stride_ob, stride_oh, stride_om, UNIT)
    tile_m, batch_head = locate_tile(tl.program_id(0), tl.cdiv(seqlen_q, BLOCK_M), batch_heads, head_group, CAUSAL)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    head_kv = head // group_size
    row_start = tile_m * BLOCK_M
    # [BLOCK_M, WIDTH]
    q = load_matrix(
        Q + batch * stride_qb + head * stride_qh, row_start, stride_qm, seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True
    )
    acc, l_i, m_i = attend(
        q, K + batch * stride_kb + head_kv * stride_kh, V + batch * stride_vb + head_kv * stride_vh,
        row_start, 0, 0, stride_kn, stride_vn, seqlen_k, causal_offset, scale_log2,
        BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, CAUSAL, RAGGED, SCHEDULE, STAGES, PRECISION, False,
    )  # fmt: skip
    lse_base = None if Lse is None else Lse + batch_head.to(tl.int64) * seqlen_q
    store_rows(
        acc, l_i, m_i, Out + batch * stride_ob + head * stride_oh, lse_base, row_start, stride_om, seqlen_q, HEAD_DIM_V
    )


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
        arguments |= self.sizes(shape) | self.constants(config, shape)
        return specialize(flash_fwd_kernel, arguments, self.options(config))

    def bind(self, config: KernelConfig, shape: AttentionShape) -> TritonLaunch:
        fixed = (*self.sizes(shape).values(), *self.constants(config, shape).values())
        return TritonLaunch(
            flash_fwd_kernel, self.grid(config, shape), _leading, partial(_trailing, fixed), self.options(config)
        )


def _leading(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> tuple[Any, ...]:
    return q, k, v, out, lse, scale * LOG2_E


def _trailing(fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    strides, unit = in_units((*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]))
    return *strides, *fixed, unit
