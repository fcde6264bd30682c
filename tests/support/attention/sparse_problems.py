"""Block-sparse attention and what float64 autograd says of it under the same mask."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.sparse.kernel import FlashBackwardHopperSparse
from blocktune.kernels.portable.backward.sparse import FlashBackwardSparse
from blocktune.kernels.portable.forward.sparse import FlashForwardSparse
from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.reference import visible
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from tests.support.triton_modes import DEVICE

# Relative Frobenius error against float64, as for the dense kernels; gradients carry two more rounded operands.
TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 5e-6}
GRADIENT_TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-5}
SPARSE = Features(mask=MaskKind.BLOCK_SPARSE)
FORWARD, BACKWARD = FlashForwardSparse(), FlashBackwardSparse()
BACKWARDS = {kernel.name: kernel for kernel in (BACKWARD, FlashBackwardHopperSparse())}


def shape_of(**changes: Any) -> AttentionShape:
    base = {"batch": 1, "num_heads": 2, "num_heads_kv": 2, "seqlen_q": 96, "seqlen_k": 96, "head_dim": 16}
    base |= {"dtype": "float16", "features": SPARSE} | changes
    return AttentionShape(**({"head_dim_v": base["head_dim"]} | base))


def random_mask(
    shape: AttentionShape, density: float, block_q: int = 32, block_k: int = 32, batch: int = 1, heads: int = 1
) -> BlockMask:
    generator = torch.Generator().manual_seed(3)
    sizes = (batch, heads, -(-shape.seqlen_q // block_q), -(-shape.seqlen_k // block_k))
    return BlockMask(block_q, block_k, (torch.rand(sizes, generator=generator) < density).to(DEVICE))


@dataclass
class Problem:
    """Inputs of a shape, and what float64 says about them under a mask."""

    shape: AttentionShape
    mask: BlockMask
    layout: str = "bhsd"
    growth: float = 1.0

    def __post_init__(self) -> None:
        shape, generator = self.shape, torch.Generator().manual_seed(0)

        def draw(heads: int, rows: int, dim: int) -> torch.Tensor:
            sizes = (shape.batch, heads, rows, dim) if self.layout == "bhsd" else (shape.batch, rows, heads, dim)
            tensor = torch.randn(sizes, generator=generator).to(getattr(torch, shape.dtype)).to(DEVICE)
            return tensor if self.layout == "bhsd" else tensor.transpose(1, 2)

        self.q = draw(shape.num_heads, shape.seqlen_q, shape.head_dim)
        self.k = draw(shape.num_heads_kv, shape.seqlen_k, shape.head_dim)
        self.k = (self.k * torch.linspace(1, self.growth, shape.seqlen_k, device=DEVICE)[:, None]).to(self.k.dtype)
        self.v = draw(shape.num_heads_kv, shape.seqlen_k, shape.head_dim_v)
        self.dout = draw(shape.num_heads, shape.seqlen_q, shape.head_dim_v)
        self.scale = shape.head_dim**-0.5

    def expected(self) -> tuple[torch.Tensor, ...]:
        """out, lse, dq, dk and dv in float64, by autograd."""
        shape = self.shape
        q, k, v = (tensor.double().detach().requires_grad_() for tensor in (self.q, self.k, self.v))
        wide_k, wide_v = (tensor.repeat_interleave(shape.group_size, 1) for tensor in (k, v))
        seen = self.mask.to_dense(shape.seqlen_q, shape.seqlen_k)
        seen = seen & visible(shape.seqlen_q, shape.seqlen_k, shape.causal, seen.device)
        scores = (q @ wide_k.transpose(-1, -2) * self.scale).masked_fill(~seen, float("-inf"))
        lse = torch.logsumexp(scores, -1)
        # a row without keys: exp(-inf - 0) is 0, and so are its gradients
        reference = lse.detach().masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)
        weights = torch.exp(scores - reference)
        out = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300) @ wide_v
        gradients = torch.autograd.grad(out, (q, k, v), self.dout.double())
        return out.detach(), lse.detach(), *gradients

    def forward(self, config: KernelConfig) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = self.q.shape[:-1]
        out = torch.full((*sizes, self.shape.head_dim_v), float("nan"), dtype=self.q.dtype, device=DEVICE)
        lse = torch.full(sizes, float("nan"), dtype=torch.float32, device=DEVICE)
        FORWARD.bind(config, self.shape)(self.q, self.k, self.v, out, lse, self.scale, Extras(block_mask=self.mask))
        return out, lse

    def backward(self, config: KernelConfig) -> tuple[torch.Tensor, ...]:
        """dq, dk and dv from the output and log-sum-exp that float64 gives."""
        out, lse, *_ = self.expected()
        gradients = tuple(torch.full_like(tensor, float("nan")) for tensor in (self.q, self.k, self.v))
        inputs = (self.q, self.k, self.v, out.to(self.q.dtype), lse.float().contiguous(), self.dout)
        shape, kernel = replace(self.shape, direction=Direction.BACKWARD), BACKWARDS[config.kernel]
        assert not kernel.violations(config, shape, limits_for((9, 0)))
        kernel.bind(config, shape)(*inputs, *gradients, self.scale, Extras(block_mask=self.mask))
        return gradients


def forward_config(
    block_m: int = 32, block_n: int = 16, warps: int = 4, stages: int = 2, schedule: int = 0
) -> KernelConfig:
    return KernelConfig(FORWARD.name, block_m, block_n, warps, stages, (("schedule", schedule),))


def backward_config(
    block_m: int = 32, block_n: int = 16, kv_block_m: int = 16, kv_block_n: int = 32, warps: int = 4, stages: int = 2
) -> KernelConfig:
    own = (("kv_block_m", kv_block_m), ("kv_block_n", kv_block_n))
    return KernelConfig(BACKWARD.name, block_m, block_n, warps, stages, own)


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert torch.isfinite(got).all()
    # a row that sees one key has a gradient of zero, up to the rounding of what cancels
    size = max(float(expected.norm()), 1e-3 * expected.numel() ** 0.5)
    assert (got.double() - expected).norm() <= tolerance * size


def check_forward(problem: Problem, config: KernelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    assert not FORWARD.violations(config, problem.shape, limits_for((9, 0)))
    out, lse = problem.forward(config)
    expected, expected_lse, *_ = problem.expected()
    assert_near(out, expected, TOLERANCE[problem.shape.dtype])
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    seen = ~expected_lse.isneginf()
    assert ((lse.double() - expected_lse)[seen].abs() <= 1e-4 * (1 + expected_lse[seen].abs())).all()
    return out, lse


def check_backward(problem: Problem, config: KernelConfig) -> tuple[torch.Tensor, ...]:
    gradients = problem.backward(config)
    for got, expected in zip(gradients, problem.expected()[2:], strict=True):
        assert_near(got, expected, GRADIENT_TOLERANCE[problem.shape.dtype])
    return gradients


def large(head_dim: int, dtype: str, causal: Causal, **changes: Any) -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 8, "num_heads_kv": 2, "seqlen_q": 1024, "seqlen_k": 1100}
    return shape_of(**sizes | {"head_dim": head_dim, "dtype": dtype, "causal": causal} | changes)
