"""Block-sparse FlashAttention backward: three functions, of which two walk the mask's lists.

`delta_kernel` takes rowsum(dout * out); `dq_kernel` owns query rows and walks their active key blocks; `dkv_kernel`
owns keys and walks the active query blocks of their column, for every query head that reads them. No atomic additions:
equal inputs give equal bits. Flops and traffic follow the mask's density (Dao et al., arXiv 2205.14135, proposition 4).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import triton
import triton.language as tl

from blocktune.kernels.block_mask import tile_shift
from blocktune.kernels.config import KernelConfig
from blocktune.kernels.device import ComputeLimits
from blocktune.kernels.extras import Extras
from blocktune.kernels.features import MaskKind
from blocktune.kernels.flash_fwd_sparse import LIST_SIZES, fitting_mask, sparse_shape_problem
from blocktune.kernels.flash_kernel import LOG2_E, RUN_TIME_SIZES, contiguous_strides, heads_per_group, padded_width
from blocktune.kernels.flash_sparse_gradients import load_row_values, store_matrix, walk_for_dkv, walk_for_dq
from blocktune.kernels.flash_sparse_tiles import steps_before
from blocktune.kernels.flash_tiles import key_tiles, load_matrix, locate_tile
from blocktune.kernels.kernel import AttentionKernel, CompileSpec
from blocktune.kernels.shape import AttentionShape, Causal, Direction
from blocktune.kernels.source_hash import hash_of_sources
from blocktune.kernels.specialize import TensorArgument, specialize

DELTA_ROWS, DELTA_WARPS = 64, 4
"""Rows and warps of a program that takes row sums: it waits for memory, whatever they are."""

ROW_VALUES_BYTES = 8
"""Of a query row, in float32: its log-sum-exp and delta."""

WARPGROUP_ROWS = 64
"""Rows of the smallest product of four warps, which reads both operands' buffers itself."""


@triton.jit(do_not_specialize=("num_heads", "seqlen_q"))
def delta_kernel(
    Out, Dout, Delta,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom,
    num_heads, seqlen_q,
    HEAD_DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Delta [batch, num_heads, seqlen_q] = rowsum(Dout * Out), float32."""
    batch_head = tl.program_id(1)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    row_start = tl.program_id(0) * BLOCK_M
    out_base = Out + batch * stride_ob + head * stride_oh
    dout_base = Dout + batch * stride_dob + head * stride_doh
    out = load_matrix(out_base, row_start, stride_om, seqlen_q, BLOCK_M, HEAD_DIM_V, WIDTH_V, True).to(tl.float32)
    dout = load_matrix(dout_base, row_start, stride_dom, seqlen_q, BLOCK_M, HEAD_DIM_V, WIDTH_V, True).to(tl.float32)
    rows = row_start + tl.arange(0, BLOCK_M)
    tl.store(Delta + batch_head.to(tl.int64) * seqlen_q + rows, tl.sum(out * dout, 1), mask=rows < seqlen_q)


@triton.jit(do_not_specialize=(*RUN_TIME_SIZES, *LIST_SIZES))
def dq_kernel(
    Q, K, V, Dout, Lse, Delta, Dq, Indices, Before, scale, scale_log2,
    stride_lb, stride_lh, stride_lr, num_blocks, row_shift, tile_shift,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh, stride_dqm,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, causal_offset,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of Dq for one (batch, head), with the lists of `BlockMask.rows`."""
    tile_m, batch_head = locate_tile(tl.program_id(0), tl.cdiv(seqlen_q, BLOCK_M), batch_heads, head_group, CAUSAL)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    row_start = tile_m * BLOCK_M
    listed = batch * stride_lb + head * stride_lh + (tile_m >> row_shift).to(tl.int64) * stride_lr
    full_tile, stop_tile = key_tiles(row_start, seqlen_k, causal_offset, BLOCK_M, BLOCK_N, CAUSAL)
    full = steps_before(Before + listed, full_tile, num_blocks, tile_shift)
    stop = steps_before(Before + listed, stop_tile, num_blocks, tile_shift)
    q_base = Q + batch * stride_qb + head * stride_qh
    dout_base = Dout + batch * stride_dob + head * stride_doh
    k_base = K + batch * stride_kb + head // group_size * stride_kh
    v_base = V + batch * stride_vb + head // group_size * stride_vh
    rows = row_start + tl.arange(0, BLOCK_M)
    row_values = batch_head.to(tl.int64) * seqlen_q
    log2_e: tl.constexpr = 1.4426950408889634
    lse_2 = load_row_values(Lse + row_values, rows, seqlen_q, float("inf"), True) * log2_e
    delta = load_row_values(Delta + row_values, rows, seqlen_q, 0.0, True)
    q = load_matrix(q_base, row_start, stride_qm, seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True)
    dout = load_matrix(dout_base, row_start, stride_dom, seqlen_q, BLOCK_M, HEAD_DIM_V, WIDTH_V, True)
    dq = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    dq = walk_for_dq(
        dq, q, dout, lse_2, delta, k_base, v_base, Indices + listed, tile_shift, 0, full, row_start, stride_kn,
        stride_vn, seqlen_k, causal_offset, scale_log2,
        BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, False, CAUSAL, RAGGED_K, STAGES, PRECISION,
    )  # fmt: skip
    if CAUSAL or RAGGED_K:
        dq = walk_for_dq(
            dq, q, dout, lse_2, delta, k_base, v_base, Indices + listed, tile_shift, full, stop, row_start, stride_kn,
            stride_vn, seqlen_k, causal_offset, scale_log2,
            BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, True, CAUSAL, RAGGED_K, 1, PRECISION,
        )  # fmt: skip
    store_matrix(dq * scale, Dq + batch * stride_dqb + head * stride_dqh, row_start, stride_dqm, seqlen_q, HEAD_DIM)


@triton.jit
def query_tiles(key_start, seqlen_q, causal_offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first, full) for causal attention: query tiles before first see none of the keys key_start..+BLOCK_N-1, those
    from full on see all of them."""
    stop = tl.cdiv(seqlen_q, BLOCK_M)
    first_row = tl.maximum(0, key_start - causal_offset)
    full_row = tl.maximum(0, key_start - causal_offset + BLOCK_N - 1)
    return tl.minimum(first_row // BLOCK_M, stop), tl.minimum(tl.cdiv(full_row, BLOCK_M), stop)


@triton.jit(do_not_specialize=(*RUN_TIME_SIZES, *LIST_SIZES))
def dkv_kernel(
    Q, K, V, Dout, Lse, Delta, Dk, Dv, Indices, Before, scale, scale_log2,
    stride_lb, stride_lh, stride_lr, num_blocks, row_shift, tile_shift,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, causal_offset,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED_Q: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of Dk and Dv for one (batch, key head), with the lists of `BlockMask.columns`: there a row of blocks
    is a block of keys, so that row_shift belongs to keys and tile_shift to queries."""
    num_tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    tile_n = tl.program_id(0) % num_tiles_n
    heads_kv = num_heads // group_size
    batch = (tl.program_id(0) // num_tiles_n // heads_kv).to(tl.int64)
    head_kv = (tl.program_id(0) // num_tiles_n % heads_kv).to(tl.int64)
    key_start = tile_n * BLOCK_N
    k_base = K + batch * stride_kb + head_kv * stride_kh
    v_base = V + batch * stride_vb + head_kv * stride_vh
    k = load_matrix(k_base, key_start, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, True)
    v = load_matrix(v_base, key_start, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, WIDTH_V, True)
    dk = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)
    for member in range(group_size):
        head = head_kv * group_size + member
        listed = batch * stride_lb + head * stride_lh + (tile_n >> row_shift).to(tl.int64) * stride_lr
        row_values = (batch * num_heads + head) * seqlen_q
        q_base = Q + batch * stride_qb + head * stride_qh
        dout_base = Dout + batch * stride_dob + head * stride_doh
        full = 0
        stop = steps_before(Before + listed, tl.cdiv(seqlen_q, BLOCK_M), num_blocks, tile_shift)
        if CAUSAL:
            first_tile, full_tile = query_tiles(key_start, seqlen_q, causal_offset, BLOCK_M, BLOCK_N)
            first = steps_before(Before + listed, first_tile, num_blocks, tile_shift)
            full = steps_before(Before + listed, full_tile, num_blocks, tile_shift)
            dk, dv = walk_for_dkv(
                dk, dv, k, v, q_base, dout_base, Lse + row_values, Delta + row_values, Indices + listed, tile_shift,
                first, full, key_start, stride_qm, stride_dom, seqlen_q, seqlen_k, causal_offset, scale_log2,
                BLOCK_M, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, True, CAUSAL, RAGGED_Q, 1, PRECISION,
            )  # fmt: skip
        dk, dv = walk_for_dkv(
            dk, dv, k, v, q_base, dout_base, Lse + row_values, Delta + row_values, Indices + listed, tile_shift,
            full, stop, key_start, stride_qm, stride_dom, seqlen_q, seqlen_k, causal_offset, scale_log2,
            BLOCK_M, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, False, CAUSAL, RAGGED_Q, STAGES, PRECISION,
        )  # fmt: skip
    store_matrix(dk * scale, Dk + batch * stride_dkb + head_kv * stride_dkh, key_start, stride_dkn, seqlen_k, HEAD_DIM)
    store_matrix(dv, Dv + batch * stride_dvb + head_kv * stride_dvh, key_start, stride_dvn, seqlen_k, HEAD_DIM_V)


@dataclass(frozen=True, slots=True)
class SparseBackwardLaunch:
    """What `bind` returns: launch(q, k, v, out, lse, dout, dq, dk, dv, scale, extras) with a `BlockMask` there."""

    shape: AttentionShape
    config: KernelConfig

    def __call__(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
        extras: Extras,
    ) -> None:  # fmt: skip
        """Raises:
        UsageError: the block mask is missing, belongs to another shape, or has blocks that the tiles do not divide.
        """
        mask = fitting_mask(extras, self.shape, q)
        own = self.config.parameters
        row_tiles = (
            tile_shift("block_m", mask.block_q, own["block_m"]),
            tile_shift("block_n", mask.block_k, own["block_n"]),
        )
        column_tiles = (
            tile_shift("kv_block_n", mask.block_k, own["kv_block_n"]),
            tile_shift("kv_block_m", mask.block_q, own["kv_block_m"]),
        )
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()  # autograd may hand in one value for all
        delta = lse.new_empty(lse.shape)
        self._launch_delta(out, dout, delta)
        scales = (scale, scale * LOG2_E)
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
        inputs, options = (q, k, v, dout, lse, delta), launch_options(self.config)
        sizes = tuple(run_time_sizes(self.shape).values())
        lists, blocks = mask.rows, mask.mask.shape
        dq_kernel[(tiles(self.shape.seqlen_q, own["block_m"]) * self.shape.batch * self.shape.num_heads,)](
            *inputs, dq, lists.indices, lists.before, *scales, *mask.strides(lists), blocks[3], *row_tiles,
            *strides, *dq.stride()[:3], *sizes, *dq_constants(self.config, self.shape).values(), **options,
        )  # fmt: skip
        lists = mask.columns
        dkv_kernel[(tiles(self.shape.seqlen_k, own["kv_block_n"]) * self.shape.batch * self.shape.num_heads_kv,)](
            *inputs, dk, dv, lists.indices, lists.before, *scales, *mask.strides(lists), blocks[2], *column_tiles,
            *strides, *dk.stride()[:3], *dv.stride()[:3], *sizes, *dkv_constants(self.config, self.shape).values(),
            **options,
        )  # fmt: skip

    def _launch_delta(self, out: Any, dout: Any, delta: Any) -> None:
        shape = self.shape
        constants = (shape.head_dim_v, padded_width(shape.head_dim_v), DELTA_ROWS)
        delta_kernel[(tiles(shape.seqlen_q, DELTA_ROWS), shape.batch * shape.num_heads)](
            out, dout, delta, *out.stride()[:3], *dout.stride()[:3], shape.num_heads, shape.seqlen_q, *constants,
            num_warps=DELTA_WARPS,
        )  # fmt: skip


class FlashBackwardSparse(AttentionKernel):
    """The backward under a block mask. Its tiles must divide the mask's blocks, which a launch checks.

    block_m queries and block_n keys are a tile of the function for dq, kv_block_m and kv_block_n of the one for dk and
    dv.
    """

    name = "flash_bwd_sparse"
    direction = Direction.BACKWARD
    features = frozenset({str(MaskKind.BLOCK_SPARSE), "deterministic"})
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (16, 32, 64, 128),
        "block_n": (16, 32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
        "kv_block_m": (16, 32, 64, 128),
        "kv_block_n": (16, 32, 64, 128),
    }
    # No block is larger than 64, so that they serve every mask whose blocks are 64 or more. The first one holds heads
    # of up to 64 elements in registers, the second one of up to 128.
    preferences: ClassVar[tuple[tuple[int, int, int, int, int, int], ...]] = (
        (64, 64, 4, 2, 64, 64),
        (64, 64, 8, 2, 64, 64),
        (64, 32, 8, 2, 32, 64),
        (64, 32, 8, 1, 32, 64),
        (32, 16, 4, 1, 16, 32),
        (16, 16, 4, 1, 16, 16),
    )

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        problem = sparse_shape_problem(self, shape)
        smallest = KernelConfig.of(self.name, {name: choices[0] for name, choices in self.parameters.items()})
        needed, limit = self.shared_bytes(smallest, shape, limits), limits.shared_per_block_optin_bytes
        if problem is None and needed > limit:
            return (
                f"`shared memory of the smallest blocks <= {limit} B` must hold for {self.name} on compute capability "
                f"{limits.name}, but head_dim {shape.head_dim} in {shape.dtype} needs {needed} B"
            )
        return problem

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Of the hungrier function: the tiles that a program owns, the buffers of those that it walks, and ds where
        warps exchange it. Read off the allocations of Triton 3.6, and never above them."""
        own = config.parameters
        dq = _tile_bytes(own["block_m"], own["block_n"], 0, config, shape, limits)
        dkv = _tile_bytes(own["kv_block_n"], own["kv_block_m"], ROW_VALUES_BYTES, config, shape, limits)
        return max(dq, dkv)

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        names, width = tuple(self.parameters), max(shape.head_dim, shape.head_dim_v)
        fitting = self.preferences[(width > 64) + (width > 128) :]
        candidates = [KernelConfig.of(self.name, dict(zip(names, values, strict=True))) for values in fitting]
        feasible = (config for config in candidates if not self.violations(config, shape, limits))
        return next(feasible, candidates[-1])

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        arguments = _common_arguments(shape) | dict.fromkeys(("Dk", "Dv"), TensorArgument(shape.dtype))
        for letter, name in (("k", "dk"), ("v", "dv")):
            arguments |= _gradient_strides(shape, letter, name)
        return specialize(dkv_kernel, arguments | dkv_constants(config, shape), launch_options(config))

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        tensor, numbers = TensorArgument(shape.dtype), TensorArgument("float32")
        arguments = _common_arguments(shape) | {"Dq": tensor} | _gradient_strides(shape, "q", "dq")
        dq = specialize(dq_kernel, arguments | dq_constants(config, shape), launch_options(config))
        row_sums = {"Out": tensor, "Dout": tensor, "Delta": numbers} | contiguous_strides(shape, "o")
        row_sums |= _gradient_strides(shape, "o", "do") | {"num_heads": 1, "seqlen_q": 1, "BLOCK_M": DELTA_ROWS}
        row_sums |= {"HEAD_DIM_V": shape.head_dim_v, "WIDTH_V": padded_width(shape.head_dim_v)}
        return dq, specialize(delta_kernel, row_sums, {"num_warps": DELTA_WARPS})

    def bind(self, config: KernelConfig, shape: AttentionShape) -> SparseBackwardLaunch:
        return SparseBackwardLaunch(shape, config)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(delta_kernel, dq_kernel, dkv_kernel)


def _tile_bytes(
    owned: int, walked: int, values_bytes: int, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits
) -> int:
    """Shared memory of a function whose programs own `owned` rows and walk tiles of `walked` rows, with values_bytes of
    row values each."""
    row_bytes = (padded_width(shape.head_dim) + padded_width(shape.head_dim_v)) * shape.element_bytes
    owned_bytes, walked_bytes = owned * row_bytes, walked * row_bytes
    short, stages = shape.element_bytes == 2, config.num_stages
    warpgroup = limits.mma in ("wgmma", "tcgen05") and owned >= WARPGROUP_ROWS
    if limits.mma == "none":  # no asynchronous copies: operands on their way to other threads
        return (2 if short else 1) * owned_bytes + walked_bytes
    if warpgroup and limits.mma == "tcgen05" and not short:  # half of what is owned may be in tensor memory
        return owned_bytes // 2 + (stages - 1) * walked_bytes
    if not short:  # each operand is split into two tf32 ones
        buffers = stages * walked_bytes if warpgroup else max(stages - 2, 0) * walked_bytes + walked_bytes // 2
        return 2 * owned_bytes + buffers
    values = (stages - 1) * walked * values_bytes
    if warpgroup:
        return owned_bytes + stages * walked_bytes + values
    exchanged = owned * walked * shape.element_bytes if owned < padded_width(shape.head_dim) else 0
    return owned_bytes + ((stages - 1) * walked_bytes or walked_bytes // 2) + values + exchanged


def tiles(length: int, block: int) -> int:
    return -(-length // block)


def launch_options(config: KernelConfig) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def run_time_sizes(shape: AttentionShape) -> dict[str, int]:
    """The integers that are not compiled in."""
    batch_heads = shape.batch * shape.num_heads
    heads = (shape.num_heads, shape.group_size, batch_heads, heads_per_group(shape))
    return dict(zip(RUN_TIME_SIZES, (*heads, shape.seqlen_q, shape.seqlen_k, shape.causal_offset), strict=True))


def dq_constants(config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
    """The constexpr arguments of `dq_kernel`."""
    own = config.parameters
    return _constants(config, shape, "RAGGED_K", shape.seqlen_k % own["block_n"] != 0, own["block_m"], own["block_n"])


def dkv_constants(config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
    """The constexpr arguments of `dkv_kernel`."""
    block_m, block_n = config.parameters["kv_block_m"], config.parameters["kv_block_n"]
    return _constants(config, shape, "RAGGED_Q", shape.seqlen_q % block_m != 0, block_m, block_n)


def _constants(
    config: KernelConfig, shape: AttentionShape, ragged_name: str, ragged: bool, block_m: int, block_n: int
) -> dict[str, Any]:
    return {
        "HEAD_DIM": shape.head_dim,
        "HEAD_DIM_V": shape.head_dim_v,
        "WIDTH": padded_width(shape.head_dim),
        "WIDTH_V": padded_width(shape.head_dim_v),
        "CAUSAL": shape.causal is not Causal.NONE,
        ragged_name: ragged,
        "PRECISION": "tf32x3" if shape.dtype == "float32" else "tf32",
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "STAGES": config.num_stages,
    }


def _common_arguments(shape: AttentionShape) -> dict[str, Any]:
    """What the functions for dq and for dk and dv both take, to be compiled offline."""
    numbers, lists = TensorArgument("float32"), TensorArgument("int32")
    arguments: dict[str, Any] = dict.fromkeys(("Q", "K", "V", "Dout"), TensorArgument(shape.dtype))
    arguments |= {"Lse": numbers, "Delta": numbers, "Indices": lists, "Before": lists}
    arguments |= {"scale": 1.0, "scale_log2": 1.0} | dict.fromkeys(LIST_SIZES, 1) | run_time_sizes(shape)
    for letter in "qkv":
        arguments |= contiguous_strides(shape, letter)
    return arguments | _gradient_strides(shape, "o", "do")


def _gradient_strides(shape: AttentionShape, letter: str, name: str) -> dict[str, int]:
    """The strides of the gradient `name` of a contiguous tensor."""
    return {key.replace(f"_{letter}", f"_{name}"): value for key, value in contiguous_strides(shape, letter).items()}
