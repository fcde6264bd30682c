"""FlashAttention-2 forward over keys that were transposed in advance: a tile of keys arrives as the product wants it.

A kernel of its own writes K as contiguous [batch, num_heads_kv, head_dim, seqlen_k]; both kernels are one launch and
are timed together. Matrix units that read a shared tile either way round, and tiles whose columns Triton permutes,
leave no bank conflicts that it could avoid: this kernel is kept to be measured against that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import triton
import triton.language as tl

from blocktune.kernels.base.flash_kernel import (
    IN_ORDER,
    LOG2_E,
    RUN_TIME_SIZES,
    contiguous_strides,
    operand_widths,
    padded_width,
    swizzled_alike,
)
from blocktune.kernels.base.kernel import CompileSpec, Launch, SoftmaxCost
from blocktune.kernels.base.launch import TritonLaunch
from blocktune.kernels.base.loops import ForwardLoops
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import TensorArgument, specialize
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.historical.base import HistoricalKernel, is_aligned, strides_of
from blocktune.kernels.layouts.exchange import exchange_bytes
from blocktune.kernels.layouts.forward_bytes import forward_bytes, most_forward_bytes
from blocktune.kernels.layouts.forward_tiles import VECTOR_BYTES, ForwardTiles
from blocktune.kernels.layouts.register_layouts import TileSize, loaded
from blocktune.kernels.portable.forward.arguments import Keys, Matrix, Options, SequenceBounds, SoftmaxState
from blocktune.kernels.portable.forward.pointers import FlashForward
from blocktune.kernels.portable.forward.softmax import online_step
from blocktune.kernels.portable.forward.tiles import (
    key_tiles,
    load_matrix,
    locate_tile,
    mask_scores,
    no_state,
    store_rows,
)
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

_PLAIN = FlashForward()
"""Its tiles are the same but for the orientation of the keys, and so is what they take."""

TRANSPOSED = 5
"""The place of the transposed keys among the leading arguments."""
TRANSPOSE_WARPS = 4


@triton.jit(do_not_specialize=("num_heads_kv", "seqlen_k"))
def transpose_keys_kernel(
    K, KT, stride_kb, stride_kh, stride_kn, stride_tb, stride_th, stride_td, num_heads_kv, seqlen_k,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """KT [batch, num_heads_kv, HEAD_DIM, seqlen_k] of K [batch, num_heads_kv, seqlen_k, HEAD_DIM]; strides of (batch,
    head, row) in elements, the last is 1. This program turns BLOCK rows of one head of K."""
    tiles = tl.cdiv(seqlen_k, BLOCK)
    batch_head = tl.program_id(0) // tiles
    batch = (batch_head // num_heads_kv).to(tl.int64)
    head = (batch_head % num_heads_kv).to(tl.int64)
    start = tl.program_id(0) % tiles * BLOCK
    # [BLOCK, WIDTH]
    keys_of_head = Matrix(K + batch * stride_kb + head * stride_kh, stride_kn, seqlen_k)
    k = load_matrix(keys_of_head, start, BLOCK, HEAD_DIM, WIDTH, True)
    dims = tl.arange(0, WIDTH)
    keys = start + tl.arange(0, BLOCK)
    # [WIDTH, BLOCK]
    pointers = KT + batch * stride_tb + head * stride_th + dims.to(tl.int64)[:, None] * stride_td + keys[None, :]
    tl.store(pointers, k.T, (dims[:, None] < HEAD_DIM) & (keys[None, :] < seqlen_k))


@triton.jit
def load_turned(matrix, key, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CHECK_KEYS: tl.constexpr):
    """Return keys key..key+BLOCK-1 of a `Matrix` of DIM rows whose columns are keys, as [WIDTH, BLOCK], zeros
    outside."""
    dims = tl.arange(0, WIDTH)
    keys = key + tl.arange(0, BLOCK)
    # [WIDTH, BLOCK]
    pointers = matrix.base + dims.to(tl.int64)[:, None] * matrix.stride + keys[None, :]
    if CHECK_KEYS and DIM != WIDTH:
        return tl.load(pointers, mask=(dims[:, None] < DIM) & (keys[None, :] < matrix.rows), other=0.0)
    elif CHECK_KEYS:
        return tl.load(pointers, mask=keys[None, :] < matrix.rows, other=0.0)
    elif DIM != WIDTH:
        return tl.load(pointers, mask=dims[:, None] < DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def attend_turned(
    q, keys, state, first, stop, row_start, sequence, scale_log2,
    MASKED: tl.constexpr, STAGES: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Attend to key tiles first..stop-1 one after another, as `attend_in_order` does."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    CHECK_KEYS: tl.constexpr = MASKED and OPTIONS.RAGGED
    acc, l_i, m_i = state
    for tile in tl.range(first, stop, num_stages=STAGES):
        # [WIDTH, BLOCK_N]
        kt = load_turned(keys.k, tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, CHECK_KEYS)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, kt, input_precision=OPTIONS.PRECISION)
        if MASKED:
            scores = mask_scores(scores, row_start, tile, sequence.seqlen_k, sequence.diagonal, OPTIONS.CAUSAL)
        p, m_i, l_i, factor = online_step(scores, m_i, l_i, scale_log2, MASKED)
        # [BLOCK_N, WIDTH_V]
        v = load_matrix(keys.v, tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, CHECK_KEYS)
        # [BLOCK_M, WIDTH_V]
        acc = tl.dot(p.to(q.dtype), v, acc * factor[:, None], input_precision=OPTIONS.PRECISION)
    return SoftmaxState(acc, l_i, m_i)


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def flash_fwd_transposed_kernel(
    Q, V, Out, Lse, scale_log2, KT,
    stride_qb, stride_qh, stride_qm, stride_tb, stride_th, stride_td,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, causal_offset,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of one (batch, head), with the tensors of `flash_fwd_kernel` and in the place of K with KT
    [batch, num_heads / group_size, HEAD_DIM, seqlen_k], strides of (batch, head, dim)."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    tile_m, batch_head = locate_tile(
        tl.program_id(0), tl.cdiv(seqlen_q, BLOCK_M), batch_heads, head_group, OPTIONS.CAUSAL
    )
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    head_kv = head // group_size
    row_start = tile_m * BLOCK_M
    sequence = SequenceBounds(seqlen_q, seqlen_k, causal_offset)
    kt_base = KT + batch * stride_tb + head_kv * stride_th
    v_base = V + batch * stride_vb + head_kv * stride_vh
    queries = Matrix(Q + batch * stride_qb + head * stride_qh, stride_qm, seqlen_q)
    # [BLOCK_M, WIDTH]
    q = load_matrix(queries, row_start, BLOCK_M, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, True)
    keys = Keys(Matrix(kt_base, stride_td, seqlen_k), Matrix(v_base, stride_vn, seqlen_k))
    acc, l_i, _ = no_state(OPTIONS)
    state = SoftmaxState(acc, l_i, tl.full(l_i.shape, float("-inf"), tl.float32))
    full, stop = key_tiles(row_start, sequence, OPTIONS)
    state = attend_turned(q, keys, state, 0, full, row_start, sequence, scale_log2, False, OPTIONS.STAGES, OPTIONS)
    if OPTIONS.CAUSAL or OPTIONS.RAGGED:
        state = attend_turned(q, keys, state, full, stop, row_start, sequence, scale_log2, True, 1, OPTIONS)
    lse_base = None if Lse is None else Lse + batch_head.to(tl.int64) * seqlen_q
    out_base = Out + batch * stride_ob + head * stride_oh
    store_rows(state, out_base, lse_base, row_start, stride_om, seqlen_q, OPTIONS.HEAD_DIM_V)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposedLaunch(TritonLaunch):
    """What `bind` returns; transpose(k, kt) runs before the attention in every launch."""

    transpose: Any

    def _launch(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> Any:
        arguments = self.leading(q, k, v, out, lse, scale)
        self.transpose(k, arguments[TRANSPOSED])
        return self.function[self.grid](*arguments, *self.trailing(q, k, v, out), **self.options)

    def pinned(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> Launch:
        """Launch once, and return this launch itself: a shorter way is not worth its code for historical kernels."""
        self._launch(q, k, v, out, lse, scale)
        return self


class FlashForwardTransposed(HistoricalKernel):
    """FlashAttention-2 with keys transposed in advance. transpose_rows: keys that a program of the transpose turns."""

    name = "flash_fwd_transposed"
    loops = ForwardLoops(transposes="k")
    ladder_steps = ("transposed",)
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (32, 64, 128),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3),
        "transpose_rows": (32, 64, 128),
    }
    preferences = (
        (64, 64, 4, 2, 64),
        (64, 32, 4, 2, 64),
        (64, 32, 4, 1, 32),
        (32, 32, 4, 1, 32),
    )

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes for contiguous tensors of the launch that takes more."""
        return max(forward_bytes(_tiles(config, shape, limits)), _turned_bytes(config, shape, limits))

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return max(most_forward_bytes(_tiles(config, shape, limits)), _turned_bytes(config, shape, limits))

    def tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _PLAIN.tensor_memory_columns(plain_config(config), shape, limits)

    def most_tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _PLAIN.most_tensor_memory_columns(plain_config(config), shape, limits)

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        return _PLAIN.softmax_cost(plain_config(config))

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_fwd_transposed_kernel, transpose_keys_kernel)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        tensor = TensorArgument(shape.dtype)
        arguments: dict[str, Any] = dict.fromkeys(("Q", "V", "Out", "KT"), tensor) | {"Lse": None, "scale_log2": 1.0}
        for letter in "qvo":
            arguments |= contiguous_strides(shape, letter)
        arguments |= _turned_strides(shape) | _PLAIN.sizes(shape) | {"OPTIONS": _options(config, shape)}
        return specialize(flash_fwd_transposed_kernel, arguments, _PLAIN.options(config))

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        tensor = TensorArgument(shape.dtype)
        arguments: dict[str, Any] = {"K": tensor, "KT": tensor} | contiguous_strides(shape, "k")
        arguments |= _turned_strides(shape) | _transpose_arguments(config, shape)
        return (specialize(transpose_keys_kernel, arguments, {"num_warps": TRANSPOSE_WARPS}),)

    def bind(self, config: KernelConfig, shape: AttentionShape) -> TransposedLaunch:
        fixed = (*_PLAIN.sizes(shape).values(), _options(config, shape))
        return TransposedLaunch(
            function=flash_fwd_transposed_kernel,
            grid=_PLAIN.grid(config, shape),
            leading=_leading,
            trailing=partial(_trailing, _turned_strides(shape), fixed),
            options=_PLAIN.options(config),
            transpose=partial(_transpose, config, shape),
        )


def plain_config(config: KernelConfig) -> KernelConfig:
    """Return the same blocks of the plain kernel, whose tiles are computed in order."""
    return replace(config, kernel=_PLAIN.name, extra=(("schedule", IN_ORDER),))


def _tiles(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> ForwardTiles:
    tiles = _PLAIN.forward_tiles(plain_config(config), shape, limits)
    k_aligned, v_aligned = is_aligned(shape.seqlen_k), is_aligned(shape.head_dim_v)
    width_v = _width_v(config, shape)
    return replace(tiles, width_v=width_v, k_aligned=k_aligned, v_aligned=v_aligned, keys_whole=True)


def _turned_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes through which a tile of keys is turned round."""
    columns, rows = padded_width(shape.head_dim), config.parameters["transpose_rows"]
    vector, alike = VECTOR_BYTES // shape.element_bytes, rows == columns and is_aligned(shape.seqlen_k)
    came = loaded(TileSize(rows, columns), vector if alike or is_aligned(shape.head_dim) else 1, TRANSPOSE_WARPS)
    goes = loaded(TileSize(columns, rows), vector if is_aligned(shape.seqlen_k) else 1, TRANSPOSE_WARPS)
    return exchange_bytes(came.turned(columns), goes, 8 * shape.element_bytes, limits.cc)


def _width_v(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the columns of a tile of V: rows of transposed keys are block_n long; see `swizzled_alike`."""
    return swizzled_alike(config.block_n, operand_widths(shape)[1], shape.element_bytes)[1]


def _options(config: KernelConfig, shape: AttentionShape) -> Options:
    shared = _PLAIN.constants(plain_config(config), shape)
    return Options(**shared | {"WIDTH_V": _width_v(config, shape)})


def _turned_strides(shape: AttentionShape) -> dict[str, int]:
    """Return the strides of contiguous [batch, num_heads_kv, head_dim, seqlen_k], in elements."""
    head = shape.head_dim * shape.seqlen_k
    return {"stride_tb": shape.num_heads_kv * head, "stride_th": head, "stride_td": shape.seqlen_k}


def _transpose_arguments(config: KernelConfig, shape: AttentionShape) -> dict[str, int]:
    return {
        "num_heads_kv": shape.num_heads_kv,
        "seqlen_k": shape.seqlen_k,
        "HEAD_DIM": shape.head_dim,
        "WIDTH": padded_width(shape.head_dim),
        "BLOCK": config.parameters["transpose_rows"],
    }


def _transpose(config: KernelConfig, shape: AttentionShape, k: Any, kt: Any) -> None:
    arguments = _transpose_arguments(config, shape)
    tiles = -(-shape.seqlen_k // arguments["BLOCK"])
    strides = (*strides_of(k), *_turned_strides(shape).values())
    grid = (tiles * shape.batch * shape.num_heads_kv, 1, 1)
    transpose_keys_kernel[grid](k, kt, *strides, *arguments.values(), num_warps=TRANSPOSE_WARPS)


def _leading(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> tuple[Any, ...]:
    """Return the arguments that change with every call, new memory for the transposed keys among them."""
    batch, heads, rows, dim = k.shape
    kt = k.new_empty((batch, heads, dim, rows))
    return q, v, out, lse, scale * LOG2_E, kt


def _trailing(turned: Mapping[str, int], fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    return *strides_of(q), *turned.values(), *strides_of(v, out), *fixed
