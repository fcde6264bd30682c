"""Forward and backward passes of libraries' operators at real sizes, through their public functions.

The kernels are those of `fla-core` and `liger-kernel` as they are installed, and those of examples/. Nothing here names
a kernel: whatever these passes launch under `@triton.autotune` is what is measured.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

BF16 = torch.bfloat16
TOKENS, HIDDEN, HEADS, HEAD_DIM = 8192, 4096, 16, 128

Step = Callable[[str], None]
"""Runs an operator forward and backward on a device."""


def _random(device: str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_()


def _back(out: Any) -> None:
    """Run the backward pass of a result, or of the first of several."""
    first: Tensor = out[0] if isinstance(out, tuple) else out
    first.backward(torch.ones_like(first))


def _back_through_gates(out: Any) -> None:
    """Run the backward pass where the library does: it refuses that of gated chunks on Hopper before Triton 3.7.1."""
    if tuple(int(part) for part in triton.__version__.split(".")[:3]) >= (3, 7, 1):
        _back(out)


def _heads(device: str, count: int) -> list[Tensor]:
    """Return tensors of one sequence: [batch, tokens, heads, head_dim]."""
    return [_random(device, 1, TOKENS, HEADS, HEAD_DIM) for _ in range(count)]


def _gate(device: str, *shape: int) -> Tensor:
    """Return logarithms of forget gates near one."""
    return functional.logsigmoid(torch.randn(shape, device=device) + 4.0).detach().requires_grad_()


def gated_delta_rule(device: str) -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v = _heads(device, 3)
    beta = torch.rand(1, TOKENS, HEADS, device=device, dtype=BF16).requires_grad_()
    gate = _gate(device, 1, TOKENS, HEADS)
    _back_through_gates(chunk_gated_delta_rule(q, k, v, gate, beta, use_qk_l2norm_in_kernel=True))


def gla(device: str) -> None:
    from fla.ops.gla import chunk_gla

    q, k, v = _heads(device, 3)
    _back(chunk_gla(q, k, v, _gate(device, 1, TOKENS, HEADS, HEAD_DIM)))


def kda(device: str) -> None:
    from fla.ops.kda import chunk_kda

    q, k, v = _heads(device, 3)
    beta = torch.rand(1, TOKENS, HEADS, device=device, dtype=BF16).requires_grad_()
    _back(chunk_kda(q, k, v, _gate(device, 1, TOKENS, HEADS, HEAD_DIM), beta, use_qk_l2norm_in_kernel=True))


def simple_gla(device: str) -> None:
    """Mamba-2 in its dual form: one gate for each head."""
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v = _heads(device, 3)
    _back_through_gates(chunk_simple_gla(q, k, v, _gate(device, 1, TOKENS, HEADS)))


def fla_rms_norm(device: str) -> None:
    from fla.modules.norm.layernorm import rms_norm

    _back(rms_norm(_random(device, 1, TOKENS, 1024), _random(device, 1024), None))


def fla_layer_norm(device: str) -> None:
    from fla.modules.norm.layernorm import layer_norm

    _back(layer_norm(_random(device, 1, TOKENS, HEAD_DIM), _random(device, HEAD_DIM), _random(device, HEAD_DIM)))


def fla_l2_norm(device: str) -> None:
    from fla.modules.norm.l2norm import l2norm

    _back(l2norm(_random(device, 1, TOKENS, HEADS, HEAD_DIM)))


def fla_swiglu(device: str) -> None:
    from fla.modules.activations.ops import swiglu

    _back(swiglu(_random(device, 1, TOKENS, HIDDEN), _random(device, 1, TOKENS, HIDDEN)))


def fla_rotary(device: str) -> None:
    from fla.modules.rotary.ops import rotary_embedding

    angles = torch.outer(torch.arange(TOKENS, device=device), torch.rand(HEAD_DIM // 2, device=device))
    x = _random(device, 1, TOKENS, HEADS, HEAD_DIM)
    _back(rotary_embedding(x, angles.cos().to(BF16), angles.sin().to(BF16)))


def liger_dyt(device: str) -> None:
    from liger_kernel.ops.dyt import LigerDyTFunction

    alpha, gamma, beta = _random(device, 1), _random(device, HIDDEN), _random(device, HIDDEN)
    out = LigerDyTFunction.apply(_random(device, 1, TOKENS, HIDDEN), alpha, gamma, beta)
    if device != "cpu":  # its backward pass counts the multiprocessors
        _back(out)


def liger_mlp(device: str) -> None:
    from liger_kernel.ops.mlp import LigerMLPFunction, gemm_swiglu

    x, gate, up = _random(device, 1, TOKENS, 1024), _random(device, HIDDEN, 1024), _random(device, HIDDEN, 1024)
    if device == "cpu":  # the whole of it asks for a GPU
        gemm_swiglu(x.detach(), gate.detach(), up.detach(), 1.0, True)
    else:
        _back(LigerMLPFunction.apply(x, gate, up, _random(device, 1024, HIDDEN)))


def liger_moe(device: str) -> None:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    experts, inner, chosen = 8, 1024, 2
    weights, index = torch.rand(TOKENS, experts, device=device).softmax(-1).topk(chosen)
    x, up = _random(device, TOKENS, 1024), _random(device, experts, 2 * inner, 1024)
    down = _random(device, experts, 1024, inner)
    weights = weights.to(BF16).requires_grad_()
    _back(LigerFusedMoEFunction.apply(x, up, down, index.to(torch.int32), weights))


def example(module: str, function: str, *shapes: tuple[int, ...]) -> Step:
    """Return the pass of an example's function on random tensors."""

    def step(device: str) -> None:
        made = [torch.randn(shape, device=device, dtype=BF16) for shape in shapes]
        getattr(import_module(f"examples.{module}"), function)(*made)

    return step


def grouped_matmul(device: str) -> None:
    from examples.autotuned_grouped_matmul import COLUMNS, EXPERTS, INNER, grouped_matmul

    a, b = torch.randn(TOKENS, INNER, device=device, dtype=BF16), torch.randn(EXPERTS, INNER, COLUMNS, device=device)
    ends = torch.linspace(0, TOKENS, EXPERTS + 1, device=device).to(torch.int32)[1:].contiguous()
    grouped_matmul(a, b.to(BF16), ends)


FLA: dict[str, Step] = {
    "fla gated delta rule": gated_delta_rule,
    "fla gla": gla,
    "fla kda": kda,
    "fla simple gla": simple_gla,
    "fla rms norm": fla_rms_norm,
    "fla layer norm": fla_layer_norm,
    "fla l2 norm": fla_l2_norm,
    "fla swiglu": fla_swiglu,
    "fla rotary": fla_rotary,
}
LIGER: dict[str, Step] = {"liger dyt": liger_dyt, "liger mlp": liger_mlp, "liger moe": liger_moe}
EXAMPLES: dict[str, Step] = {
    "example matmul": example("autotuned_matmul", "matmul", (4096, 4096), (4096, 4096)),
    "example softmax": example("autotuned_softmax", "softmax", (8192, 4000)),
    "example attention": example("autotuned_attention", "attention", *[(32, 4096, 128)] * 3),
    "example grouped matmul": grouped_matmul,
}
STEPS: dict[str, Step] = FLA | LIGER | EXAMPLES


def model_step(name: str, device: str) -> None:
    """Run what one layer of a small model launches: `fla` is a gated delta network, `liger` a mixture of experts."""
    if name == "fla":
        for step in (fla_rms_norm, gated_delta_rule, fla_swiglu):
            step(device)
    else:
        for step in (liger_dyt, liger_moe):
            step(device)
