"""Memory that calls of long contexts take beside their tensors: it is to grow with the tokens, not with their square.

python -m tools.bench.long_memory results/h200.long-memory.table.json

A forward takes its output, the log-sum-exp of every row and what its kernel needs; the first one of a shape also what
it is compared with. A backward takes the gradients and what its kernel needs. Each is what PyTorch's allocator holds at
most during the call, less what it held before. Of some backwards the most counts: gradients of one that are still there
when the next begins would be missing from that one's.
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
BACKWARDS = 3
COLUMNS = (
    "tokens", "q, k and v, MB", "output, MB", "forward, MB", "first forward, MB", "gradients, MB", "backward, MB",
    "forward, bytes a row", "backward, bytes a row",
)  # fmt: skip
HOW = (
    f"bfloat16, causal, batch 1, {HEADS} heads of {HEAD_DIM} columns; the peak of PyTorch's allocator during a call, "
    "less what it held before; of backwards the most of three. The first forward of a shape is compared with the "
    "definition of attention in float64. "
    "A row is a token of one head."
)


def peak_bytes(before: int) -> int:
    """Return how much more than `before` was held at most since the peak was last reset."""
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def held_bytes() -> int:
    """Return what is held now, from which on peaks count."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def bytes_of(length: int) -> tuple[int, int, int, int]:
    """Return the bytes of one tensor, and the peaks of a forward, of the first forward, and of a backward."""
    q, k, v, dout = (
        torch.randn(1, HEADS, length, HEAD_DIM, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for _ in range(4)
    )  # fmt: skip
    forwards = []
    for _ in range(2):
        before = held_bytes()
        out = attention(q, k, v, is_causal=True)
        forwards.append(peak_bytes(before))
        del out
    out = attention(q, k, v, is_causal=True)
    backwards = []
    for _ in range(BACKWARDS):
        before = held_bytes()
        torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        backwards.append(peak_bytes(before))
    first, later = forwards
    return q.numel() * q.element_size(), later, first, max(backwards)


def cells(length: int, tensor: int, forward: int, first: int, backward: int) -> list[str]:
    """Return a row of the table."""
    sizes = (3 * tensor, tensor, forward, first, 3 * tensor, backward)
    each = (f"{size / (length * HEADS):,.0f}" for size in (forward, backward))
    return [f"{length:,}", *(f"{size / 1e6:,.1f}" for size in sizes), *each]


def main() -> None:
    out, rows = Path(sys.argv[1]), []
    bytes_of(LENGTHS[0] // 2)  # compiles, and fills what is kept between calls
    for length in LENGTHS:
        rows.append(cells(length, *bytes_of(length)))
        print(*rows[-1], sep=" | ", flush=True)
    document = table(new_document(torch.device("cuda")), HOW, COLUMNS, rows)
    save_text(json.dumps(document, indent=1, sort_keys=True) + "\n", out)


if __name__ == "__main__":
    main()
