"""Forward and backward passes of libraries' operators at real sizes, through their public functions.

The kernels are those of `fla-core` and `liger-kernel` as they are installed, and those of examples/: whatever these
passes launch under `@triton.autotune` is what is measured. The cross-entropy has no tuner in its library, and is put
under ours.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import triton
from packaging.version import Version
from torch import Tensor
from torch.nn import functional

from blocktune import space
from tests.support.libraries.chosen_constants import tuned_in

BF16 = torch.bfloat16
TOKENS, HIDDEN, HEADS, HEAD_DIM = 8192, 4096, 16, 128

Step = Callable[[str], list[Tensor]]
"""Runs an operator forward and backward on a device; returns its result and the gradients of its inputs."""


def _random(device: str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_()


def _back(out: Any, *inputs: Tensor) -> list[Tensor]:
    """Run the backward pass of a result, or of the first of several; return the result and the inputs' gradients."""
    first: Tensor = out[0] if isinstance(out, tuple) else out
    first.backward(torch.ones_like(first))
    return [first.detach(), *(each.grad for each in inputs if each.grad is not None)]


def _back_through_gates(out: Any, *inputs: Tensor) -> list[Tensor]:
    """Run the backward pass where the library does: it refuses that of gated chunks on Hopper before Triton 3.7.1."""
    if Version(triton.__version__).release >= (3, 7, 1):
        return _back(out, *inputs)
    return [out[0].detach()]


def _heads(device: str, count: int) -> list[Tensor]:
    """Return tensors of one sequence: [batch, tokens, heads, head_dim]."""
    return [_random(device, 1, TOKENS, HEADS, HEAD_DIM) for _ in range(count)]


def _gate(device: str, *shape: int) -> Tensor:
    """Return logarithms of forget gates near one."""
    return functional.logsigmoid(torch.randn(shape, device=device) + 4.0).detach().requires_grad_()


def _write_strength(device: str) -> Tensor:
    """Return how much of each token the delta rule writes."""
    return torch.rand(1, TOKENS, HEADS, device=device, dtype=BF16).requires_grad_()


def delta_rule(device: str) -> list[Tensor]:
    from fla.ops.delta_rule import chunk_delta_rule

    q, k, v = _heads(device, 3)
    beta = _write_strength(device)
    return _back(chunk_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True), q, k, v, beta)


def gated_delta_rule(device: str) -> list[Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v = _heads(device, 3)
    beta, gate = _write_strength(device), _gate(device, 1, TOKENS, HEADS)
    out = chunk_gated_delta_rule(q, k, v, gate, beta, use_qk_l2norm_in_kernel=True)
    return _back_through_gates(out, q, k, v, gate, beta)


def gla(device: str) -> list[Tensor]:
    from fla.ops.gla import chunk_gla

    q, k, v = _heads(device, 3)
    gate = _gate(device, 1, TOKENS, HEADS, HEAD_DIM)
    return _back(chunk_gla(q, k, v, gate), q, k, v, gate)


def kda(device: str) -> list[Tensor]:
    from fla.ops.kda import chunk_kda

    q, k, v = _heads(device, 3)
    beta, gate = _write_strength(device), _gate(device, 1, TOKENS, HEADS, HEAD_DIM)
    return _back(chunk_kda(q, k, v, gate, beta, use_qk_l2norm_in_kernel=True), q, k, v, gate, beta)


def simple_gla(device: str) -> list[Tensor]:
    """Mamba-2 in its dual form: one gate for each head."""
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v = _heads(device, 3)
    gate = _gate(device, 1, TOKENS, HEADS)
    return _back_through_gates(chunk_simple_gla(q, k, v, gate), q, k, v, gate)


def fla_rms_norm(device: str) -> list[Tensor]:
    from fla.modules.norm.layernorm import rms_norm

    x, weight = _random(device, 1, TOKENS, 1024), _random(device, 1024)
    return _back(rms_norm(x, weight, None), x, weight)


def fla_layer_norm(device: str) -> list[Tensor]:
    from fla.modules.norm.layernorm import layer_norm

    x, weight, bias = _random(device, 1, TOKENS, HEAD_DIM), _random(device, HEAD_DIM), _random(device, HEAD_DIM)
    return _back(layer_norm(x, weight, bias), x, weight, bias)


def fla_l2_norm(device: str) -> list[Tensor]:
    from fla.modules.norm.l2norm import l2norm

    x = _random(device, 1, TOKENS, HEADS, HEAD_DIM)
    return _back(l2norm(x), x)


def fla_swiglu(device: str) -> list[Tensor]:
    from fla.modules.activations.ops import swiglu

    x, y = _random(device, 1, TOKENS, HIDDEN), _random(device, 1, TOKENS, HIDDEN)
    return _back(swiglu(x, y), x, y)


def fla_hgrn(device: str) -> list[Tensor]:
    """The gated linear recurrence of HGRN, a number for each channel."""
    from fla.ops.hgrn import chunk_hgrn

    x, gate = _random(device, 1, TOKENS, 1024), _gate(device, 1, TOKENS, 1024)
    return _back(chunk_hgrn(x, gate), x, gate)


def fla_rotary(device: str) -> list[Tensor]:
    from fla.modules.rotary.ops import rotary_embedding

    angles = torch.outer(torch.arange(TOKENS, device=device), torch.rand(HEAD_DIM // 2, device=device))
    x = _random(device, 1, TOKENS, HEADS, HEAD_DIM)
    return _back(rotary_embedding(x, angles.cos().to(BF16), angles.sin().to(BF16)), x)


def liger_dyt(device: str) -> list[Tensor]:
    from liger_kernel.ops.dyt import LigerDyTFunction

    x, alpha = _random(device, 1, TOKENS, HIDDEN), _random(device, 1)
    gamma, beta = _random(device, HIDDEN), _random(device, HIDDEN)
    return _back(LigerDyTFunction.apply(x, alpha, gamma, beta), x, alpha, gamma, beta)


def liger_mlp(device: str) -> list[Tensor]:
    from liger_kernel.ops.mlp import LigerMLPFunction, gemm_swiglu, swiglu_backward_dI

    x, down = _random(device, 1, TOKENS, 1024), _random(device, 1024, HIDDEN)
    gate, up = _random(device, HIDDEN, 1024), _random(device, HIDDEN, 1024)
    if device == "cpu":  # the whole of it asks for a GPU
        kept, _ = gemm_swiglu(x.detach(), gate.detach(), up.detach(), 1.0, True)
        return [swiglu_backward_dI(gate.detach(), up.detach(), kept)]
    return _back(LigerMLPFunction.apply(x, gate, up, down), x, gate, up, down)


def liger_moe(device: str) -> list[Tensor]:
    """Sixteen experts of the size that a model with 1B active and 7B parameters has."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    experts, inner, chosen, hidden = 16, 1024, 2, 2048
    shares, index = torch.rand(TOKENS, experts, device=device).softmax(-1).topk(chosen)
    x, up = _random(device, TOKENS, hidden), _random(device, experts, 2 * inner, hidden)
    down, weights = _random(device, experts, hidden, inner), shares.to(BF16).requires_grad_()
    out = LigerFusedMoEFunction.apply(x, up, down, index.to(torch.int32), weights)
    return _back(out, x, up, down, weights)


def liger_cross_entropy(device: str) -> list[Tensor]:
    """The loss of a vocabulary of 128,256 words; the kernel writes the gradient over the scores."""
    module, words = import_module("liger_kernel.ops.cross_entropy"), 128_256
    scores, right = _random(device, TOKENS // 2, words), torch.randint(words, (TOKENS // 2,), device=device)
    configs = space(BLOCK_SIZE=(32768, 16384, 8192, 4096), num_warps=(32, 16, 8))  # the library's own first
    with tuned_in(module, "liger_cross_entropy_kernel", configs, ["n_cols"], restore_value=["X_ptr"]):
        return _back(module.LigerCrossEntropyFunction.apply(scores, right, None), scores)


def example(module: str, function: str, *shapes: tuple[int, ...]) -> Step:
    """Return the pass of an example's function on random tensors."""

    def step(device: str) -> list[Tensor]:
        made = [torch.randn(shape, device=device, dtype=BF16) for shape in shapes]
        return [getattr(import_module(f"examples.{module}"), function)(*made)]

    return step


def grouped_matmul(device: str) -> list[Tensor]:
    from examples.autotuned_grouped_matmul import COLUMNS, EXPERTS, INNER, grouped_matmul

    a, b = torch.randn(TOKENS, INNER, device=device, dtype=BF16), torch.randn(EXPERTS, INNER, COLUMNS, device=device)
    ends = torch.linspace(0, TOKENS, EXPERTS + 1, device=device).to(torch.int32)[1:].contiguous()
    return [grouped_matmul(a, b.to(BF16), ends)]


STEPS: dict[str, Step] = {
    "liger moe weights": liger_moe,
    "fla l2 norm": fla_l2_norm,
    "fla layer norm": fla_layer_norm,
    "fla rotary": fla_rotary,
    "fla swiglu": fla_swiglu,
    "fla gated delta rule": gated_delta_rule,
    "liger moe": liger_moe,
    "fla hgrn": fla_hgrn,
    "liger dyt": liger_dyt,
    "fla rms norm": fla_rms_norm,
    "liger cross entropy": liger_cross_entropy,
    "liger mlp": liger_mlp,
    "fla simple gla": simple_gla,
    "example softmax": example("autotuned_softmax", "softmax", (8192, 4000)),
    "example matmul": example("autotuned_matmul", "matmul", (4096, 4096), (4096, 4096)),
    "example attention": example("autotuned_attention", "attention", *[(32, 4096, 128)] * 3),
    "example grouped matmul": grouped_matmul,
    "fla delta rule": delta_rule,
    "fla kda": kda,
    "fla gla": gla,
}
"""By name, in the order in which they are measured: first what says the most in little time, then what is unlike the
rest."""

ONLY: dict[str, str] = {"liger moe weights": "*_dW?_kernel"}
"""The kernels that a pass is made for, where they are not all: the others run with the first config of their lists."""

MODELS: dict[str, tuple[Step, ...]] = {
    "fla": (fla_rms_norm, fla_hgrn, fla_swiglu),
    "liger": (liger_mlp,),
}
"""What one layer of a small model launches in training: HGRN with its MLP, and the MLP of a dense transformer."""

LIBRARIES = {
    "fla": ("fla.ops.hgrn", "fla.modules.norm.layernorm", "fla.modules.activations.ops"),
    "liger": ("liger_kernel.ops",),
}
"""What a model imports."""


def model_step(name: str, device: str) -> None:
    """Run forward and backward passes of one layer of a small model."""
    for step in MODELS[name]:
        step(device)
