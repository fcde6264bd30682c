"""Memory that calls of long contexts take beside their tensors: it is to grow with the tokens, not with their square.

python -m tests.programs.bench.long_memory results/h200.long-memory.table.json

A forward takes its output, the log-sum-exp of every row and what its kernel needs; a backward takes the gradients and
what its kernel needs. Both are what PyTorch's allocator holds at most, less what it held before the call.
"""

import json
import sys
from pathlib import Path

import torch

from blocktune import attention
from blocktune.db.exchange.document import save_text
from tests.support.ranks.document import new_document, table

LENGTHS = (8192, 16384, 32768, 65536, 131072)
HEADS, HEAD_DIM = 16, 128
COLUMNS = (
    "tokens", "q, k and v, MB", "forward, MB", "of it output, MB", "backward, MB", "of it gradients, MB",
    "bytes a token and head, forward", "bytes a token and head, backward",
)  # fmt: skip
HOW = f"bfloat16, causal, batch 1, {HEADS} heads of {HEAD_DIM} columns; the peak of PyTorch's allocator during a call."


def peak_bytes(before: int) -> int:
    """Return how much more than `before` was held at most since the peak was last reset."""
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def held_bytes() -> int:
    """Return what is held now, from which on peaks count."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def bytes_of(length: int) -> tuple[int, int, int]:
    """Return the bytes of one tensor, and the peaks of a forward and of its backward."""
    q, k, v, dout = (
        torch.randn(1, HEADS, length, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for _ in range(4)
    )  # fmt: skip
    for tensor in (q, k, v):
        tensor.requires_grad_()
    before = held_bytes()
    out = attention(q, k, v, is_causal=True)
    forward = peak_bytes(before)
    before = held_bytes()
    torch.autograd.grad(out, (q, k, v), dout)
    return q.numel() * q.element_size(), forward, peak_bytes(before)


def cells(length: int, tensor: int, forward: int, backward: int) -> list[str]:
    """Return a row of the table."""
    sizes = (3 * tensor, forward, tensor, backward, 3 * tensor)
    each = (f"{size / (length * HEADS):,.0f}" for size in (forward, backward))
    return [f"{length:,}", *(f"{size / 1e6:,.1f}" for size in sizes), *each]


def main() -> None:
    out, rows = Path(sys.argv[1]), []
    bytes_of(LENGTHS[0])  # compiles, and fills what is kept between calls
    for length in LENGTHS:
        rows.append(cells(length, *bytes_of(length)))
        print(*rows[-1], sep=" | ", flush=True)
    document = table(new_document(torch.device("cuda")), HOW, COLUMNS, rows)
    save_text(json.dumps(document, indent=1, sort_keys=True) + "\n", out)


if __name__ == "__main__":
    main()
