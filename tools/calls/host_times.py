"""Host time of calls next to PyTorch's, on a GPU: microseconds of forwards and of training calls, by kind.

python -m tools.calls.host_times [NAME ...]

A training call is a forward and `torch.autograd.grad` of it, of tensors so small that the host's part is all that
counts. Calls are measured in turns, and the calmest round counts.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from blocktune import attention
from tests.support.attention.host_time import calmest

CALLS = 1000
SIZE = (1, 4, 128, 64)

Attend = Callable[..., Tensor]
Kind = tuple[list[Tensor], dict[str, Any]]
"""The tensors of a call and its options."""


def kinds(device: str) -> dict[str, Kind]:
    """Return the calls by name."""

    def three(
        size: tuple[int, ...] = SIZE, *, heads_kv: int = 4, dtype: torch.dtype = torch.bfloat16, rows: bool = False
    ) -> list[Tensor]:
        batch, heads, length, dim = size
        made = []
        for count in (heads, heads_kv, heads_kv):
            shape = (batch, length, count, dim) if rows else (batch, count, length, dim)
            tensor = torch.randn(shape, dtype=dtype, device=device)
            made.append((tensor.transpose(1, 2) if rows else tensor).requires_grad_())
        return made

    causal = {"is_causal": True}
    mask = torch.rand(128, 128, device=device) > 0.3
    return {
        "plain": (three(), {}),
        "causal": (three(), causal),
        "causal, rows": (three(rows=True), causal),
        "groups": (three(heads_kv=2), causal | {"enable_gqa": True}),
        "float32": (three(dtype=torch.float32), {}),
        "boolean mask": (three(), {"attn_mask": mask}),
        "additive mask": (three(), {"attn_mask": torch.randn(128, 128, dtype=torch.bfloat16, device=device)}),
        "dropout": (three(), {"dropout_p": 0.1}),
        "width 8": (three((1, 4, 128, 8)), {}),
        "width 67": (three((1, 4, 128, 67)), causal),
        "width 67, rows": (three((1, 4, 128, 67), rows=True), causal),
        "width 128": (three((1, 4, 128, 128)), causal),
        "256 rows of 2 heads": (three((3, 2, 256, 96), heads_kv=2), causal),
    }


def forward_of(attend: Attend, kind: Kind) -> Callable[[], Any]:
    """Return the call without gradients."""
    tensors, options = [tensor.detach() for tensor in kind[0]], kind[1]
    return lambda: attend(*tensors, **options)


def training_of(attend: Attend, kind: Kind) -> Callable[[], Any]:
    """Return the call and its gradients."""
    tensors, options = kind
    grad = torch.randn_like(attend(*tensors, **options))
    return lambda: torch.autograd.grad(attend(*tensors, **options), tensors, grad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="names of calls; all by default")
    given = parser.parse_args()
    known = kinds("cuda")
    for name in given.names or known:
        for what, made in (("forward", forward_of), ("training", training_of)):
            calls = {"ours": made(attention, known[name]), "PyTorch": made(sdpa, known[name])}
            for call in calls.values():
                for _ in range(5):  # resolve, record, repeat
                    call()
            times = calmest(calls, CALLS)
            ours, own = (times[who].median_us for who in ("ours", "PyTorch"))
            print(f"{name:20s} {what:9s} {ours:7.1f} us, PyTorch {own:7.1f} us, ratio {ours / own:.2f}", flush=True)


if __name__ == "__main__":
    main()
