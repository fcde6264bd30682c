"""FlashAttention-2 forward with a head dimension that is padded beyond need: what breaking bank conflicts so costs.

Rows whose length is a power of two put equal columns of all rows into the same banks of shared memory. The remedy of
hand-written kernels is one column more; Triton's tiles have widths of powers of two, so the next one is twice as wide.
The loads of the padding are masked, its products are computed. For matrix instructions Triton permutes ("swizzles") the
columns of shared tiles by itself, which avoids the conflicts without any padding: this kernel is kept to be measured
against that.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import triton
import triton.language as tl

from blocktune.kernels.base.flash_kernel import IN_ORDER, LOG2_E, RUN_TIME_SIZES, contiguous_strides, operand_widths
from blocktune.kernels.base.kernel import MAX_HEAD_DIM, MIN_HEAD_DIM, CompileSpec, SoftmaxCost
from blocktune.kernels.base.launch import TritonLaunch
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import TensorArgument, specialize
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.historical.base import HistoricalKernel, is_aligned, strides_of
from blocktune.kernels.layouts.forward_bytes import forward_bytes, most_forward_bytes
from blocktune.kernels.layouts.forward_tiles import ForwardTiles
from blocktune.kernels.portable.forward.arguments import Keys, Matrix, Options, SequenceBounds, SoftmaxState
from blocktune.kernels.portable.forward.pointers import FlashForward
from blocktune.kernels.portable.forward.tiles import (
    attend_in_order,
    key_tiles,
    load_matrix,
    locate_tile,
    no_state,
    store_rows,
)
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

_PLAIN = FlashForward()
"""Its tiles are the same but for their width, and so is what they take."""


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def flash_fwd_padded_kernel(
    Q, K, V, Out, Lse, scale_log2,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, causal_offset,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of one (batch, head), a key tile after the other, with the tensors of `flash_fwd_kernel`.
    Columns HEAD_DIM(_V)..WIDTH(_V)-1 of every tile are zeros that are never loaded."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    tile_m, batch_head = locate_tile(
        tl.program_id(0), tl.cdiv(seqlen_q, BLOCK_M), batch_heads, head_group, OPTIONS.CAUSAL
    )
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    head_kv = head // group_size
    row_start = tile_m * BLOCK_M
    sequence = SequenceBounds(seqlen_q, seqlen_k, causal_offset)
    k_base = K + batch * stride_kb + head_kv * stride_kh
    v_base = V + batch * stride_vb + head_kv * stride_vh
    queries = Matrix(Q + batch * stride_qb + head * stride_qh, stride_qm, seqlen_q)
    # [BLOCK_M, WIDTH]
    q = load_matrix(queries, row_start, BLOCK_M, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, True)
    keys = Keys(Matrix(k_base, stride_kn, seqlen_k), Matrix(v_base, stride_vn, seqlen_k))
    acc, l_i, _ = no_state(OPTIONS)
    state = SoftmaxState(acc, l_i, tl.full(l_i.shape, float("-inf"), tl.float32))
    full, stop = key_tiles(row_start, sequence, OPTIONS)
    state = attend_in_order(
        q, keys, state, 0, full, row_start, sequence, scale_log2, False, False, OPTIONS.STAGES, OPTIONS
    )
    if OPTIONS.CAUSAL or OPTIONS.RAGGED:
        state = attend_in_order(q, keys, state, full, stop, row_start, sequence, scale_log2, True, False, 1, OPTIONS)
    lse_base = None if Lse is None else Lse + batch_head.to(tl.int64) * seqlen_q
    out_base = Out + batch * stride_ob + head * stride_oh
    store_rows(state, out_base, lse_base, row_start, stride_om, seqlen_q, OPTIONS.HEAD_DIM_V)


def next_width(head_dim: int) -> int:
    """Return the next power of two above the head dimension: twice one that is a power of two itself."""
    return max(2 * MIN_HEAD_DIM, 1 << head_dim.bit_length())


class FlashForwardPadded(HistoricalKernel):
    """FlashAttention-2 with padding. The accumulators are twice as wide, so a tile has 64 queries."""

    name = "flash_fwd_padded"
    ladder_steps: ClassVar[tuple[str, ...]] = ("padded",)
    largest_head_dim = MAX_HEAD_DIM // 2
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (32, 64),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3),
    }
    preferences = (
        (64, 64, 4, 2),
        (64, 32, 4, 2),
        (64, 32, 4, 1),
        (32, 32, 4, 1),
    )

    def multiplied(self, shape: AttentionShape) -> AttentionShape:
        """Return the shape whose head dimensions are those that are multiplied."""
        return padded_shape(shape)

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes for contiguous tensors."""
        return forward_bytes(self._tiles(config, shape, limits))

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return most_forward_bytes(self._tiles(config, shape, limits))

    def _tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> ForwardTiles:
        tiles = _PLAIN.forward_tiles(plain_config(config), self.multiplied(shape), limits)
        return replace(tiles, k_aligned=is_aligned(shape.head_dim), v_aligned=is_aligned(shape.head_dim_v))

    def tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _PLAIN.tensor_memory_columns(plain_config(config), padded_shape(shape), limits)

    def most_tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _PLAIN.most_tensor_memory_columns(plain_config(config), padded_shape(shape), limits)

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        return _PLAIN.softmax_cost(plain_config(config))

    def as_forward(self, config: KernelConfig, shape: AttentionShape) -> tuple[KernelConfig, AttentionShape]:
        """Return the padded products; the bytes of the padding are counted too, though they are not loaded."""
        return config, self.multiplied(shape)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_fwd_padded_kernel)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        tensor = TensorArgument(shape.dtype)
        arguments: dict[str, Any] = dict.fromkeys(("Q", "K", "V", "Out"), tensor) | {"Lse": None, "scale_log2": 1.0}
        for letter in "qkvo":
            arguments |= contiguous_strides(shape, letter)
        arguments |= _PLAIN.sizes(shape) | {"OPTIONS": self._options(config, shape)}
        return specialize(flash_fwd_padded_kernel, arguments, _PLAIN.options(config))

    def bind(self, config: KernelConfig, shape: AttentionShape) -> TritonLaunch:
        fixed = (*_PLAIN.sizes(shape).values(), self._options(config, shape))
        return TritonLaunch(
            flash_fwd_padded_kernel,
            _PLAIN.grid(config, shape),
            _leading,
            partial(_trailing, fixed),
            _PLAIN.options(config),
        )

    def _options(self, config: KernelConfig, shape: AttentionShape) -> Options:
        width, width_v = operand_widths(self.multiplied(shape))
        return Options(**_PLAIN.constants(plain_config(config), shape) | {"WIDTH": width, "WIDTH_V": width_v})


def padded_shape(shape: AttentionShape) -> AttentionShape:
    """Return the shape whose head dimensions are those that are multiplied."""
    return replace(shape, head_dim=next_width(shape.head_dim), head_dim_v=next_width(shape.head_dim_v))


def plain_config(config: KernelConfig) -> KernelConfig:
    """Return the same blocks of the plain kernel, whose tiles are computed in order."""
    return replace(config, kernel=_PLAIN.name, extra=(("schedule", IN_ORDER),))


def _leading(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> tuple[Any, ...]:
    return q, k, v, out, lse, scale * LOG2_E


def _trailing(fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    return *strides_of(q, k, v, out), *fixed
