"""FlashAttention's first algorithm: keys outside, queries inside, output and row statistics in device memory.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (arXiv 2205.14135), Algorithm
1, as the paper has it: one program computes a whole head, and every tile of keys makes a pass over the queries in which
the output is read, rescaled, divided and written back. It is kept to show what FlashAttention-2 turned round.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

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
from blocktune.kernels.historical.v1_memory import most_round_trip_bytes, round_trip_bytes
from blocktune.kernels.historical.v1_passes import SIZES, flash_v1_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal

STATISTICS = 2
"""Columns per row, in addition to its output, that stay in device memory: its sum and its maximum."""


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
        return round_trip_bytes(config, shape, limits)

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return most_round_trip_bytes(config, shape, limits)

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
