"""FlashAttention's first algorithm: keys outside, queries inside, output and row statistics in device memory.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (arXiv 2205.14135), Algorithm
1, as the paper has it: one program computes a whole head, and every tile of keys makes a pass over the queries in which
the output is read, rescaled, divided and written back. It is kept to show what FlashAttention-2 turned round.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import triton
import triton.language as tl

from blocktune.kernels.base.flash_kernel import (
    FLOAT32_BYTES,
    LOG2_E,
    contiguous_strides,
    padded_width,
    product_unit,
    tf32_tiles,
)
from blocktune.kernels.base.kernel import CompileSpec, SoftmaxCost
from blocktune.kernels.base.launch import TritonLaunch
from blocktune.kernels.base.loops import RoundTripLoops
from blocktune.kernels.base.on_chip import OnChip, shared_tile, softmax_tiles
from blocktune.kernels.base.precision import product_precision
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import TensorArgument, specialize
from blocktune.kernels.base.tile_bounds import forward_columns, most_forward_columns
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.historical.base import HistoricalKernel, strides_of
from blocktune.kernels.portable.forward.tiles import load_matrix, mask_scores
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal

SIZES = ("num_heads", "group_size", "seqlen_q", "seqlen_k", "causal_offset")
"""Integers that are not compiled in."""

STATISTICS = 2
"""Columns per row, in addition to its output, that stay in device memory: its sum and its maximum."""


@triton.jit
def first_values(
    acc_base, sums, maxima, stride_am, seqlen_q, HEAD_DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Line 2 of the algorithm: output 0, sums 0, maxima -inf, for all rows of a head."""
    columns = tl.arange(0, WIDTH_V)
    for row_start in tl.range(0, seqlen_q, BLOCK_M, num_stages=1):
        rows = row_start + tl.arange(0, BLOCK_M)
        there = rows < seqlen_q
        pointers = acc_base + rows.to(tl.int64)[:, None] * stride_am + columns[None, :]
        tl.store(pointers, tl.zeros([BLOCK_M, WIDTH_V], tl.float32), there[:, None] & (columns[None, :] < HEAD_DIM_V))
        tl.store(sums + rows, tl.zeros([BLOCK_M], tl.float32), there)
        tl.store(maxima + rows, tl.full([BLOCK_M], float("-inf"), tl.float32), there)


@triton.jit
def update_rows(
    q, k, v, acc_base, sums, maxima, row_start, tile, stride_am, seqlen_q, seqlen_k, causal_offset, scale_log2,
    HEAD_DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Lines 8 to 13 for q [BLOCK_M, WIDTH] and one tile of keys: the rows of output, sums and maxima as they are with
    these keys too. Exponents are in base 2. Rows that have seen no key keep a maximum of -inf, a sum and output of 0.
    """
    rows = row_start + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, WIDTH_V)
    there = rows < seqlen_q
    # [BLOCK_M, BLOCK_N]
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    if MASKED:
        scores = mask_scores(scores, row_start, tile, seqlen_k, causal_offset, CAUSAL)
    m_old = tl.load(maxima + rows, there, other=0.0)
    l_old = tl.load(sums + rows, there, other=0.0)
    # [BLOCK_M, WIDTH_V]
    out = load_matrix(acc_base, row_start, stride_am, seqlen_q, BLOCK_M, HEAD_DIM_V, WIDTH_V, True)
    m_tile = tl.max(scores, 1) * scale_log2
    m_new = tl.maximum(m_old, m_tile)
    # -inf minus -inf would be NaN
    p = tl.exp2(scores * scale_log2 - tl.where(m_tile == float("-inf"), 0.0, m_tile)[:, None])
    reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    of_old = l_old * tl.exp2(m_old - reference)
    of_tile = tl.exp2(m_tile - reference)
    l_new = of_old + of_tile * tl.sum(p, 1)
    product = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    divisor = tl.where(l_new == 0.0, 1.0, l_new)
    out = (of_old[:, None] * out + of_tile[:, None] * product) / divisor[:, None]
    pointers = acc_base + rows.to(tl.int64)[:, None] * stride_am + columns[None, :]
    tl.store(pointers, out, there[:, None] & (columns[None, :] < HEAD_DIM_V))
    tl.store(sums + rows, l_new, there)
    tl.store(maxima + rows, m_new, there)


@triton.jit
def last_values(
    acc_base, sums, maxima, out_base, lse_base, stride_am, stride_om, seqlen_q,
    HEAD_DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, CONVERT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What the paper leaves to the caller: the output in its own data type if that is not float32, and the natural
    log-sum-exp unless lse_base is None."""
    ln_2: tl.constexpr = 0.6931471805599453
    columns = tl.arange(0, WIDTH_V)
    for row_start in tl.range(0, seqlen_q, BLOCK_M, num_stages=1):
        rows = row_start + tl.arange(0, BLOCK_M)
        there = rows < seqlen_q
        if CONVERT:
            out = load_matrix(acc_base, row_start, stride_am, seqlen_q, BLOCK_M, HEAD_DIM_V, WIDTH_V, True)
            pointers = out_base + rows.to(tl.int64)[:, None] * stride_om + columns[None, :]
            tl.store(pointers, out.to(out_base.dtype.element_ty), there[:, None] & (columns[None, :] < HEAD_DIM_V))
        if lse_base is not None:
            total = tl.load(sums + rows, there, other=1.0)
            maximum = tl.load(maxima + rows, there, other=0.0)
            lse = (maximum + tl.log2(tl.where(total == 0.0, 1.0, total))) * ln_2
            tl.store(lse_base + rows, tl.where(total == 0.0, float("-inf"), lse), there)


@triton.jit(do_not_specialize=SIZES)
def flash_v1_kernel(
    Q, K, V, Out, Lse, Acc, Sums, Maxima, scale_log2,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_ab, stride_ah, stride_am,
    num_heads, group_size, seqlen_q, seqlen_k, causal_offset,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr, CONVERT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tensors of `flash_fwd_kernel`, and in device memory what one pass leaves to the next: Acc, float32 like Out
    (Out itself unless CONVERT), Sums and Maxima, float32 [batch, num_heads, seqlen_q]. This program computes one head.
    """
    batch_head = tl.program_id(0)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    head_kv = head // group_size
    first_row = batch_head.to(tl.int64) * seqlen_q
    acc_base = Acc + batch * stride_ab + head * stride_ah
    sums, maxima = Sums + first_row, Maxima + first_row
    first_values(acc_base, sums, maxima, stride_am, seqlen_q, HEAD_DIM_V, WIDTH_V, BLOCK_M)
    # what one thread wrote, another one may read in the next pass
    tl.debug_barrier()
    keys_seen = seqlen_k
    if CAUSAL:
        keys_seen = tl.maximum(0, tl.minimum(seqlen_k, seqlen_q + causal_offset))
    for tile in tl.range(0, tl.cdiv(keys_seen, BLOCK_N), num_stages=1):
        k = load_matrix(
            K + batch * stride_kb + head_kv * stride_kh, tile * BLOCK_N, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH,
            True,
        )  # fmt: skip
        v = load_matrix(
            V + batch * stride_vb + head_kv * stride_vh, tile * BLOCK_N, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V,
            WIDTH_V, True,
        )  # fmt: skip
        first_tile = 0
        if CAUSAL:  # no earlier query sees the first of these keys
            first_tile = tl.maximum(0, tile * BLOCK_N - causal_offset) // BLOCK_M
        for tile_m in tl.range(first_tile, tl.cdiv(seqlen_q, BLOCK_M), num_stages=1):
            row_start = tile_m * BLOCK_M
            q = load_matrix(
                Q + batch * stride_qb + head * stride_qh, row_start, stride_qm, seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True
            )
            update_rows(
                q, k, v, acc_base, sums, maxima, row_start, tile, stride_am, seqlen_q, seqlen_k, causal_offset,
                scale_log2, HEAD_DIM_V, WIDTH_V, CAUSAL, CAUSAL or RAGGED, PRECISION, BLOCK_M,
            )  # fmt: skip
        tl.debug_barrier()
    lse_base = None if Lse is None else Lse + first_row
    last_values(
        acc_base, sums, maxima, Out + batch * stride_ob + head * stride_oh, lse_base, stride_am, stride_om, seqlen_q,
        HEAD_DIM_V, WIDTH_V, CONVERT, BLOCK_M,
    )  # fmt: skip


class FlashV1(HistoricalKernel):
    """FlashAttention v1. The paper loads a tile when it needs it, so there is one stage."""

    name = "flash_v1"
    loops = RoundTripLoops()
    ladder_steps = ("v1", "paper")
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (16, 32, 64, 128),
        "block_n": (16, 32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1,),
    }
    preferences = (
        (64, 64, 4, 1),
        (64, 32, 4, 1),
        (32, 32, 4, 1),
        (16, 16, 4, 1),
    )

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of the tiles of queries, keys and values.

        Plain multiply-adds take them as float32, and P where Q was. Keys and values of float32 are there twice, as TF32
        numbers and as what these leave, in addition to Q on its way, or to P where warps exchange it. The compiler may
        use more, for the probabilities and to turn layouts round.
        """
        m, n, width, width_v = config.block_m, config.block_n, *_widths(shape)
        if limits.mma == "none":
            return FLOAT32_BYTES * (max(m * width, m * n) + n * (width + width_v))
        keys = shape.element_bytes * n * (width + width_v)
        if shape.element_bytes == FLOAT32_BYTES:
            return 2 * keys + FLOAT32_BYTES * m * columns_beside_keys(config, shape, limits)
        return shape.element_bytes * m * width + keys

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of float32, with an output that changes its layout as a whole."""
        if limits.mma == "none" or shape.element_bytes != FLOAT32_BYTES:
            return self.shared_bytes(config, shape, limits)
        m, n, width, width_v = config.block_m, config.block_n, *_widths(shape)
        return FLOAT32_BYTES * (2 * n * (width + width_v) + max(m * width, 2 * m * n, m * width_v))

    def tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        on_tensor_memory = product_unit(config, limits) == "tcgen05"
        return forward_columns(config, _widths(shape), shape.element_bytes) if on_tensor_memory else 0

    def most_tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        on_tensor_memory = product_unit(config, limits) == "tcgen05"
        return most_forward_columns(config, _widths(shape), shape.element_bytes) if on_tensor_memory else 0

    def own_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
        """Return one tile of each operand, as float32 for plain multiply-adds, with P where Q was; two of float32 keys
        and values for tensor cores. The output and the statistics of a tile of queries are in registers while it meets
        a tile of keys, and in device memory between two of these."""
        m, n, plain = config.block_m, config.block_n, limits.mma == "none"
        element_bytes, (width, width_v) = FLOAT32_BYTES if plain else shape.element_bytes, _widths(shape)
        queries = ("P, after Q", m, n) if plain and n > width else ("Q", m, width)
        count = 1 if plain else tf32_tiles(shape)
        if count > 1:
            queries = ("Q or P, in turns", m, columns_beside_keys(config, shape, limits))
        keys = (shared_tile(name, n, columns, element_bytes, count) for name, columns in (("K", width), ("V", width_v)))
        held = softmax_tiles(m, n, width_v, shape.element_bytes)
        return OnChip(tiles=(shared_tile(*queries, element_bytes), *keys, *held), num_warps=config.num_warps)

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        del config
        return SoftmaxCost(round_trip=True)

    def as_forward(self, config: KernelConfig, shape: AttentionShape) -> tuple[KernelConfig, AttentionShape]:
        """Return one block a head that visits its tiles one after another: as if they were the keys of one query
        tile."""
        keys = tiles_of(config, shape) * config.block_n
        return config, replace(shape, seqlen_q=config.block_m, seqlen_k=max(1, keys), causal=Causal.NONE)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_v1_kernel)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        tensor, numbers = TensorArgument(shape.dtype), TensorArgument("float32")
        arguments: dict[str, Any] = dict.fromkeys(("Q", "K", "V", "Out"), tensor) | {"Lse": None}
        arguments |= dict.fromkeys(("Acc", "Sums", "Maxima"), numbers) | {"scale_log2": 1.0}
        for letter in "qkvo":
            arguments |= contiguous_strides(shape, letter)
        output = contiguous_strides(shape, "o")
        arguments |= {name.replace("_o", "_a"): stride for name, stride in output.items()}
        arguments |= _sizes(shape) | _constants(config, shape)
        return specialize(flash_v1_kernel, arguments, _options(config))

    def bind(self, config: KernelConfig, shape: AttentionShape) -> TritonLaunch:
        fixed = (*_sizes(shape).values(), *_constants(config, shape).values())
        return TritonLaunch(
            flash_v1_kernel,
            (shape.batch * shape.num_heads, 1, 1),
            _leading,
            partial(_trailing, fixed),
            _options(config),
        )


def _widths(shape: AttentionShape) -> tuple[int, int]:
    """Return padded columns of a tile of Q or K, and of V."""
    return padded_width(shape.head_dim), padded_width(shape.head_dim_v)


def columns_beside_keys(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the columns of the float32 tile that block_m rows have in addition to keys and values: both halves of P
    where warps of `mma` exchange it and it is wider, else Q; none where tensor memory holds them."""
    unit, (width, width_v) = product_unit(config, limits), _widths(shape)
    if unit == "tcgen05":
        return 0
    exchanged = unit == "mma" and config.block_m < width_v
    return max(width, 2 * config.block_n) if exchanged else width


def tiles_of(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the pairs of a query tile and a key tile that a head's program computes."""
    if shape.causal is Causal.NONE:
        return -(-shape.seqlen_q // config.block_m) * -(-shape.seqlen_k // config.block_n)
    seen = (
        min(max(start + config.block_m + shape.causal_offset, 0), shape.seqlen_k)
        for start in range(0, shape.seqlen_q, config.block_m)
    )
    return sum(-(-keys // config.block_n) for keys in seen)


def _leading(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> tuple[Any, ...]:
    """Return the arguments that change with every call, new memory for what the passes leave to each other among
    them."""
    import torch

    rows = q.shape[:3]
    sums, maxima = (torch.empty(rows, dtype=torch.float32, device=q.device) for _ in range(STATISTICS))
    acc = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=q.device)
    return q, k, v, out, lse, acc, sums, maxima, scale * LOG2_E


def _trailing(fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    import torch

    _, heads, rows, dim = out.shape
    contiguous = (heads * rows * dim, rows * dim, dim)
    acc = out.stride()[:3] if out.dtype == torch.float32 else contiguous
    return *strides_of(q, k, v, out), *acc, *fixed


def _sizes(shape: AttentionShape) -> dict[str, int]:
    values = (shape.num_heads, shape.group_size, shape.seqlen_q, shape.seqlen_k, shape.causal_offset)
    return dict(zip(SIZES, values, strict=True))


def _constants(config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
    return {
        "HEAD_DIM": shape.head_dim,
        "HEAD_DIM_V": shape.head_dim_v,
        "WIDTH": padded_width(shape.head_dim),
        "WIDTH_V": padded_width(shape.head_dim_v),
        "CAUSAL": shape.causal is not Causal.NONE,
        "RAGGED": shape.seqlen_k % config.block_n != 0,
        "PRECISION": product_precision(shape.dtype),
        "CONVERT": shape.dtype != "float32",
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }


def _options(config: KernelConfig) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}
