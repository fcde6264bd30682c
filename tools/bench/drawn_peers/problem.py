"""The tensors of a cell on the GPU, token first as models have them, and attention of them in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import AttentionShape, Causal
from tools.bench.drawn_peers.cells import Cell

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes attention of query, key and value as a problem has them."""

Run = Callable[[], tuple[Tensor, ...]]
"""Enqueues what is timed and returns the output, or the gradients of query, key and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A cell's tensors.

    query, key, value, dout: [batch, length, heads, dim]; of packed sequences [tokens, heads, dim]; key and value of
    pages [pages, page_size, heads, dim]. begins: where packed sequences begin, and the end. filled: the keys of each
    entry. table: the pages of each entry.
    """

    cell: Cell
    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor | None = None
    begins: Tensor | None = None
    filled: Tensor | None = None
    table: Tensor | None = None

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """Draw the tensors of a cell."""
        torch.manual_seed(0)
        shape, more = cell.shape, {}
        rows_q: tuple[int, ...] = (shape.batch, shape.seqlen_q)
        rows_k: tuple[int, ...] = (shape.batch, shape.seqlen_k)
        if shape.features.varlen:
            rows_q = rows_k = (sum(cell.lengths),)
            more["begins"] = _int32(0, *accumulate(cell.lengths))
        elif shape.features.page_size:
            pages = shape.batch * shape.seqlen_k // shape.features.page_size
            rows_k = (pages, shape.features.page_size)
            more["filled"] = _int32(*cell.lengths)
            more["table"] = torch.randperm(pages, device="cuda").view(shape.batch, -1).int()
        if cell.is_backward:
            more["dout"] = _normal(*rows_q, shape.num_heads, shape.head_dim_v)
        return cls(
            cell=cell,
            query=_normal(*rows_q, shape.num_heads, shape.head_dim),
            key=_normal(*rows_k, shape.num_heads_kv, shape.head_dim),
            value=_normal(*rows_k, shape.num_heads_kv, shape.head_dim_v),
            **more,
        )

    @property
    def shape(self) -> AttentionShape:
        return self.cell.shape

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return float(self.shape.head_dim**-0.5)

    @property
    def is_causal(self) -> bool:
        return self.shape.causal is not Causal.NONE

    @property
    def sides(self) -> tuple[int, int]:
        """The window as FlashAttention takes it, where a causal mask bounds the right side."""
        left, right = self.shape.features.window or (UNLIMITED, UNLIMITED)
        return left, 0 if self.is_causal and left != UNLIMITED else right

    def run(self, attend: Attend) -> Run:
        """Return what is timed of somebody's attention: the forward, or the backward of one that ran before."""
        tensors = self.query, self.key, self.value
        if not self.cell.is_backward:
            return lambda: (attend(*tensors),)
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = attend(*leaves)
        return lambda: torch.autograd.grad(out, leaves, self.dout, retain_graph=True)


def _normal(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16, device="cuda")


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")
