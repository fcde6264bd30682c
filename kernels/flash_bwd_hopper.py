"""Attention backward for Hopper (compute capability 9.0) in Gluon: warp-specialised, asynchronous, five products.

Three launches: `prepare_kernel` (row statistics, empty dq sums), `flash_bwd_hopper_kernel`, whose blocks own 128 keys
and add their parts of dq to float32 sums in global memory, and `finish_kernel` (dq in its type). The device functions
and what makes them fast are in hopper_bwd_tiles.py. The order of those additions varies, so that dq is not equal to the
bit in every run; dk and dv are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from triton.experimental.gluon import language as gl

from blocktune.kernels.config import KernelConfig
from blocktune.kernels.errors import UsageError
from blocktune.kernels.extras import Extras
from blocktune.kernels.flash_kernel import LOG2_E, contiguous_strides
from blocktune.kernels.hopper_bwd_passes import finish_kernel, prepare_kernel
from blocktune.kernels.hopper_bwd_tiles import SIZES, flash_bwd_hopper_kernel
from blocktune.kernels.hopper_descriptors import describe, descriptor, is_describable
from blocktune.kernels.kernel import AttentionKernel, CompileSpec, SoftmaxCost
from blocktune.kernels.limits import ComputeLimits
from blocktune.kernels.shape import AttentionShape, Causal, Direction
from blocktune.kernels.source_hash import hash_of_sources
from blocktune.kernels.specialize import DescriptorArgument, TensorArgument, specialize

BLOCK_M, BLOCK_N = 64, 128
"""Queries of a step, and keys of a block: 64 for each of its two computing warpgroups."""
WARPS = 4
"""Of a warpgroup; also what the copying warp takes: itself, and three idle ones up to a whole warpgroup."""
LENGTH_DIVISOR = 128
PASS_ROWS = 32
"""Rows of a program of the pass before."""
GROUP_BYTES = 32 << 20
"""Queries, their gradients and float32 dq of the heads that causal blocks work on together: a part of the L2 cache."""
SMALLEST_SCALE = 1e-30
"""Scales nearer to zero are taken for this one: the log-sum-exp is divided by the scale."""


class FlashBackwardHopper(AttentionKernel):
    """The warp-specialised backward kernel of Hopper.

    fold_lse, fold_delta: the statistics of a query are the initial accumulators of its products. named_barriers: bit 0
    for the exchange of dS, bit 1 for the release of stages. persistent: as many blocks as multiprocessors.
    """

    name = "flash_bwd_hopper"
    direction = Direction.BACKWARD
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (BLOCK_M,),
        "block_n": (BLOCK_N,),
        "num_warps": (WARPS,),
        "num_stages": (2, 3, 4),
        "fold_lse": (0, 1),
        "fold_delta": (0, 1),
        "named_barriers": (0, 1, 2, 3),
        "persistent": (0, 1),
    }

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if limits.cc != (9, 0):
            return f"{self.name} is made of wgmma (compute capability 9.0 alone), but got {limits.name}"
        if shape.element_bytes != 2:
            return f"{self.name} computes float16 and bfloat16, but got {shape.dtype}"
        if shape.head_dim not in (64, 128) or shape.head_dim_v != shape.head_dim:
            return (
                f"`head_dim == head_dim_v`, 64 or 128, must hold for {self.name}, but got (head_dim={shape.head_dim}, "
                f"head_dim_v={shape.head_dim_v})"
            )
        if shape.seqlen_q % LENGTH_DIVISOR or shape.seqlen_k % LENGTH_DIVISOR:
            return (
                f"`seqlen % {LENGTH_DIVISOR} == 0` must hold for {self.name}, but got (seqlen_q={shape.seqlen_q}, "
                f"seqlen_k={shape.seqlen_k})"
            )
        if shape.causal is not Causal.NONE and shape.seqlen_q != shape.seqlen_k:
            return f"{self.name} is causal for equal lengths only, but got {shape.seqlen_q} and {shape.seqlen_k}"
        return None

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """K and V; the stages of Q, dO and two float32 statistics; two buffers of dS; dQ, half by half; barriers."""
        row_bytes = shape.head_dim * shape.element_bytes
        stage_bytes = 2 * BLOCK_M * row_bytes + 2 * BLOCK_M * 4
        ds_bytes = 2 * BLOCK_N * BLOCK_M * shape.element_bytes
        dq_bytes = 2 * 64 * half_of_dq(shape) * 4
        return 2 * BLOCK_N * row_bytes + config.num_stages * stage_bytes + ds_bytes + dq_bytes

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        """What was best on an H200 over lengths of 2048 and 8192, causal and full."""
        stages, fold_lse = (2, 1) if shape.head_dim == 128 else (3, 0)
        values = (BLOCK_M, BLOCK_N, WARPS, stages, fold_lse, 1, 3, 1)
        return KernelConfig.of(self.name, dict(zip(self.parameters, values, strict=True)))

    def total_warps(self, config: KernelConfig) -> int:
        return 3 * WARPS

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        persistent = bool(config.parameters["persistent"])
        return SoftmaxCost(
            rescales=False, products_overlap=True, copying_warps=WARPS, persistent=persistent, products=5
        )

    def layout_problem(self, q: Any, k: Any, v: Any) -> str | None:
        for name, tensor in (("query", q), ("key", k), ("value", v)):
            if not is_describable(tensor):
                return (
                    f"rows of {name} must be contiguous, and 16 must divide its address and its strides in bytes, for "
                    f"{self.name}"
                )
        return super().layout_problem(q, k, v)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(prepare_kernel, flash_bwd_hopper_kernel, finish_kernel)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        query = DescriptorArgument(shape.dtype, (1, 1, BLOCK_M, shape.head_dim), swizzled=True)
        key = DescriptorArgument(shape.dtype, (1, 1, BLOCK_N, shape.head_dim), swizzled=True)
        statistic = DescriptorArgument("float32", (BLOCK_M,), swizzled=True)
        arguments: dict[str, Any] = {"q_desc": query, "k_desc": key, "v_desc": key, "do_desc": query}
        arguments |= {"dq_desc": _sums_stand_in(shape), "dk_desc": query, "dv_desc": query}
        arguments |= {"lse_desc": statistic, "delta_desc": statistic, "counter": TensorArgument("int32")}
        arguments |= {"scale": 1.0, "scale_log2": 1.0} | _sizes(shape) | _constants(config, shape)
        return specialize(flash_bwd_hopper_kernel, arguments, {"num_warps": WARPS})

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        own, sums = TensorArgument(shape.dtype), TensorArgument("float32")
        strides = tuple(contiguous_strides(shape, "o").values())
        before: dict[str, Any] = {"out": own, "dout": own, "lse": sums, "lse_log2": sums, "delta": sums}
        before |= {"dq_sums": sums, "counter": TensorArgument("int32")}
        before |= dict(zip(("stride_ob", "stride_oh", "stride_om"), strides, strict=True))
        before |= dict(zip(("stride_gb", "stride_gh", "stride_gm"), strides, strict=True))
        lengths = {"num_heads": shape.num_heads, "seqlen_q": shape.seqlen_q}
        before |= lengths | {"HEAD_DIM": shape.head_dim, "ROWS": PASS_ROWS}
        after: dict[str, Any] = {"dq_sums": sums, "dq": own, "scale": 1.0}
        after |= dict(zip(("stride_b", "stride_h", "stride_m"), strides, strict=True)) | lengths
        after |= {"HEAD_DIM": shape.head_dim, "HALF": half_of_dq(shape), "TRANSPOSED": is_deferred(shape)}
        options = {"num_warps": WARPS}
        return specialize(prepare_kernel, before, options), specialize(finish_kernel, after, options)

    def bind(self, config: KernelConfig, shape: AttentionShape) -> "BackwardLaunch":
        fixed = (*_sizes(shape).values(), *_constants(config, shape).values())
        return BackwardLaunch(shape, fixed, bool(config.parameters["persistent"]))


def is_deferred(shape: AttentionShape) -> bool:
    """Whether dq of a block is computed behind the next one, which takes registers that head_dim 128 has not."""
    return shape.head_dim == 64


def half_of_dq(shape: AttentionShape) -> int:
    """Columns of the accumulator that holds a warpgroup's half of dq of 64 queries: queries where it is transposed."""
    return BLOCK_M // 2 if is_deferred(shape) else shape.head_dim // 2


def _heads_per_group(shape: AttentionShape) -> int:
    """Key heads whose queries, gradients and sums fill `GROUP_BYTES`."""
    head_bytes = 8 * shape.seqlen_q * shape.head_dim * shape.group_size
    return min(shape.batch * shape.num_heads_kv, max(1, GROUP_BYTES // head_bytes))


def _sizes(shape: AttentionShape) -> dict[str, int]:
    heads = shape.batch * shape.num_heads_kv
    values = (shape.seqlen_q, shape.seqlen_k, shape.num_heads_kv, shape.group_size, heads, _heads_per_group(shape))
    return dict(zip(SIZES, values, strict=True))


def _constants(config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
    own = config.parameters
    return {
        "STAGES": config.num_stages,
        "CAUSAL": shape.causal is not Causal.NONE,
        "GROUPED": shape.group_size > 1,
        "DEFER": is_deferred(shape),
        "FOLD_LSE": bool(own["fold_lse"]),
        "FOLD_DELTA": bool(own["fold_delta"]),
        "NAMED": own["named_barriers"],
        "PERSISTENT": bool(own["persistent"]),
    }


def _sums_descriptor(sums: Any, elements: int, half: int) -> Any:
    """Of the float32 sums of dq, as rows of 64 values that are stored without a swizzle."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return descriptor(sums, [elements // 64, 64], [64, 1], [half, 64], layout)


def _sums_stand_in(shape: AttentionShape) -> Any:
    from triton import language as tl
    from triton.runtime.jit import MockTensor

    return _sums_descriptor(MockTensor(tl.float32), 64, half_of_dq(shape))


def _statistic_descriptor(values: Any, count: int) -> Any:
    return descriptor(values, [count], [1], [BLOCK_M], gl.NVMMASharedLayout.get_default_for([BLOCK_M], gl.float32))


@dataclass(frozen=True, slots=True)
class BackwardLaunch:
    """What `bind` returns. Every launch has a workspace and a tile counter of its own, so that launches of several
    streams and captured graphs do not meet."""

    shape: AttentionShape
    fixed: tuple[Any, ...]
    persistent: bool

    def __call__(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
        extras: Extras | None = None,
    ) -> None:  # fmt: skip
        """Enqueues the three kernels.

        Raises:
            UsageError: a gradient lies in memory as the copy engine cannot write it.
        """
        import torch

        shape = self.shape
        dout = dout if is_describable(dout) else dout.contiguous()
        count = shape.batch * shape.num_heads * shape.seqlen_q
        lse_log2, delta = (torch.empty(count, dtype=torch.float32, device=q.device) for _ in range(2))
        sums = torch.empty(count * shape.head_dim, dtype=torch.float32, device=q.device)
        counter = torch.empty(1, dtype=torch.int32, device=q.device)
        lengths = shape.num_heads, shape.seqlen_q
        prepare_kernel[(count // PASS_ROWS,)](
            out, dout, lse, lse_log2, delta, sums, counter, *out.stride()[:3], *dout.stride()[:3], *lengths,
            HEAD_DIM=shape.head_dim, ROWS=PASS_ROWS, num_warps=WARPS,
        )  # fmt: skip
        statistics = _statistic_descriptor(lse_log2, count), _statistic_descriptor(delta, count)
        half = half_of_dq(shape)
        sums_desc = _sums_descriptor(sums, count * shape.head_dim, half)
        self._main((q, k, v, dout, dk, dv), sums_desc, statistics, counter, scale)
        finish_kernel[(count // BLOCK_M * 2,)](
            sums, dq, scale, *dq.stride()[:3], *lengths,
            HEAD_DIM=shape.head_dim, HALF=half, TRANSPOSED=is_deferred(shape), num_warps=WARPS,
        )  # fmt: skip

    def _main(self, tensors: Any, sums: Any, statistics: Any, counter: Any, scale: float) -> None:
        q, k, v, dout, dk, dv = (_described(*pair) for pair in zip(tensors, BLOCK_ROWS, strict=True))
        scale_log2 = (scale if abs(scale) > SMALLEST_SCALE else SMALLEST_SCALE) * LOG2_E
        flash_bwd_hopper_kernel[self._grid(tensors[0].device)](
            q, k, v, dout, sums, dk, dv, *statistics, counter, float(scale), scale_log2, *self.fixed, num_warps=WARPS
        )

    def _grid(self, device: Any) -> tuple[int]:
        import torch

        tiles = self.shape.seqlen_k // BLOCK_N * self.shape.batch * self.shape.num_heads_kv
        if not self.persistent:
            return (tiles,)
        return (min(tiles, torch.cuda.get_device_properties(device).multi_processor_count),)


BLOCK_ROWS = (BLOCK_M, BLOCK_N, BLOCK_N, BLOCK_M, BLOCK_M, BLOCK_M)
"""Of q, k, v, dout, dk and dv."""


def _described(tensor: Any, block_rows: int) -> Any:
    if not is_describable(tensor):
        raise UsageError(
            "Rows of a gradient must be contiguous, and 16 must divide its address and its strides in bytes, but got "
            f"strides {tensor.stride()} and address {tensor.data_ptr():#x}. Allocate it with torch.empty_like."
        )
    return describe(tensor, block_rows)
