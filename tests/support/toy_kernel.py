"""A kernel of somebody else's, in a file of its own: the shortest forward that competes with ours."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import triton
import triton.language as tl

from blocktune.kernels.base.flash_kernel import LOG2_E, contiguous_strides, padded_width
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec
from blocktune.kernels.base.launch import TritonLaunch
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import TensorArgument, specialize
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal


@triton.jit
def toy_kernel(
    Q, K, V, Out, Lse, scale_log2,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    num_heads, group_size, seqlen_q, seqlen_k,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Q [batch, num_heads, seqlen_q, WIDTH], K and V with num_heads / group_size heads and seqlen_k rows, Out like Q,
    Lse [batch, num_heads, seqlen_q] or None. This program computes BLOCK_M rows of one head."""
    batch, head = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
    rows, columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    inside = rows[:, None] < seqlen_q
    q_rows = Q + batch * stride_qb + head * stride_qh + rows[:, None] * stride_qm
    q = tl.load(q_rows + columns, mask=inside, other=0.0)  # [BLOCK_M, WIDTH]
    k_base = K + batch * stride_kb + head // group_size * stride_kh
    v_base = V + batch * stride_vb + head // group_size * stride_vh
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for start in range(0, seqlen_k, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        there = keys[:, None] < seqlen_k
        k = tl.load(k_base + keys[:, None] * stride_kn + columns, mask=there, other=0.0)  # [BLOCK_N, WIDTH]
        v = tl.load(v_base + keys[:, None] * stride_vn + columns, mask=there, other=0.0)
        scores = tl.where(keys[None, :] < seqlen_k, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])  # [BLOCK_M, BLOCK_N]
        shrink = tl.exp2(maximum - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        maximum = higher
    out_rows = Out + batch * stride_ob + head * stride_oh + rows[:, None] * stride_om
    tl.store(out_rows + columns, (acc / total[:, None]).to(Out.dtype.element_ty), mask=inside)
    if Lse is not None:
        lse = (maximum + tl.log2(total)) * 0.6931471805599453
        tl.store(Lse + tl.program_id(1) * seqlen_q + rows, lse, mask=rows < seqlen_q)


class ToyForward(AttentionKernel):
    """Full attention of 16 bits, with heads that are as wide as their values and a power of two."""

    name = "toy"
    dtypes = frozenset(("float16", "bfloat16"))
    ladder_steps = ("tuned",)
    flex_options: ClassVar[Mapping[str, bool]] = {}
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (64, 128),
        "block_n": (32, 64),
        "num_warps": (4,),
        "num_stages": (2,),
    }

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if shape.causal is not Causal.NONE:
            return f"{self.name} computes full attention, but got a causal shape"
        if shape.head_dim != shape.head_dim_v or shape.head_dim != padded_width(shape.head_dim):
            return f"{self.name} takes heads as wide as their values, a power of two, but got head_dim={shape.head_dim}"
        return super().shape_problem(shape, limits)

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        del limits
        buffers = config.num_stages - 1  # of each of K and V
        return (config.block_m + 2 * buffers * config.block_n) * shape.head_dim * shape.element_bytes

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        del shape, limits
        return KernelConfig(self.name, 64, 32, 4, 2)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(toy_kernel)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        tensors = dict.fromkeys(("Q", "K", "V", "Out"), TensorArgument(shape.dtype))
        arguments: dict[str, Any] = {**tensors, "Lse": None, "scale_log2": 1.0}
        for letter in "qkvo":
            arguments |= contiguous_strides(shape, letter)
        return specialize(toy_kernel, arguments | _sizes(config, shape), _options(config))

    def bind(self, config: KernelConfig, shape: AttentionShape) -> TritonLaunch:
        grid = (-(-shape.seqlen_q // config.block_m), shape.batch * shape.num_heads, 1)
        sizes = tuple(_sizes(config, shape).values())

        def trailing(*tensors: Any) -> tuple[Any, ...]:
            return *(stride for tensor in tensors for stride in tensor.stride()[:3]), *sizes

        return TritonLaunch(toy_kernel, grid, _leading, trailing, _options(config))


def _sizes(config: KernelConfig, shape: AttentionShape) -> dict[str, int]:
    return {
        "num_heads": shape.num_heads,
        "group_size": shape.group_size,
        "seqlen_q": shape.seqlen_q,
        "seqlen_k": shape.seqlen_k,
        "WIDTH": shape.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }


def _options(config: KernelConfig) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def _leading(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> tuple[Any, ...]:
    return q, k, v, out, lse, scale * LOG2_E
