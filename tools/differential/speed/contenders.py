"""The launches of a case: ours, and those of the kernel that PyTorch chooses by itself."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blocktune.runtime.dispatch.dispatcher import attention
from blocktune.runtime.selection import pytorch_rival
from tools.differential.speed.cases import SpeedCase

Attend = Callable[..., Tensor]
Launch = Callable[[], Any]


def launches_of(case: SpeedCase, *, kernels: bool = False) -> tuple[Launch, Launch]:
    """Return our launch of a case and PyTorch's, each of which has run once. kernels: our kernels serve it also where
    PyTorch's is expected to be faster."""
    if kernels:
        pytorch_rival.shipped_rival = _no_rival
    torch.manual_seed(0)
    tensors, options = _tensors(case), _options(case)
    return _launch(attention, case, tensors, options), _launch(scaled_dot_product_attention, case, tensors, options)


@cache
def _no_rival(*kind: Any) -> pytorch_rival.PytorchRival | None:
    """Return that nothing is known of PyTorch's kernels."""
    del kind
    return None


def _launch(attend: Attend, case: SpeedCase, tensors: list[Tensor], options: dict[str, Any]) -> Launch:
    def forward() -> Tensor:
        return attend(*tensors, **options)

    for _ in range(4):  # ours records what it will repeat
        out = forward()
    if not case.backward:
        return forward
    grad = torch.randn_like(out)

    def backward() -> Any:
        return torch.autograd.grad(out, tensors, grad, retain_graph=True)

    for _ in range(3):
        backward()
    return backward


def _tensors(case: SpeedCase) -> list[Tensor]:
    """Return query, key and value [batch, heads, length, head_dim]."""
    dtype = getattr(torch, case.dtype)

    def random(heads: int, length: int, width: int) -> Tensor:
        sizes = (case.batch, length, heads, width) if case.length_first else (case.batch, heads, length, width)
        made = torch.randn(sizes, dtype=dtype, device="cuda")
        return (made.transpose(1, 2) if case.length_first else made).requires_grad_(case.backward)

    return [
        random(case.num_heads, case.seqlen_q, case.head_dim),
        random(case.num_heads_kv, case.seqlen_k, case.head_dim),
        random(case.num_heads_kv, case.seqlen_k, case.head_dim_v),
    ]


def _options(case: SpeedCase) -> dict[str, Any]:
    options: dict[str, Any] = {"is_causal": case.causal, "enable_gqa": case.num_heads != case.num_heads_kv}
    if case.mask != "none":
        seen = torch.rand(case.seqlen_q, case.seqlen_k, device="cuda") > 0.2
        added = torch.zeros(seen.shape, dtype=getattr(torch, case.dtype), device="cuda").masked_fill(~seen, -5.0)
        options["attn_mask"] = seen if case.mask == "boolean" else added
    return options
