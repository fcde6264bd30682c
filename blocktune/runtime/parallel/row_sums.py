"""Results of blocks for the same rows, added up as they come.

A sum to which more will be added is float32, or float64 of such tensors; the last one is rounded to the tensors' own
type. What the first block finds for all rows is the memory of the results.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktune.kernels.portable.partials.rows import add_partial
from blocktune.runtime.parallel.plan.additions import additions_of
from blocktune.runtime.parallel.plan.layout import Range


@dataclass(frozen=True, slots=True)
class Join:
    """Rows to which a part is added. rows: among all. inside: among those of the part. before: the sum so far. after:
    the memory of the new one."""

    rows: slice
    inside: slice
    before: Tensor
    after: Tensor


class RowSums:
    """Memory [batch, heads, rows, dim] in which partial results for rows meet.

    Args:
        like: a tensor with the type of the results, where they are.
        sizes: of the results.
        blocks: the rows of each part, in the order in which they come.
    """

    def __init__(self, like: Tensor, sizes: Sequence[int], blocks: Sequence[Range]) -> None:
        self._like, self._sizes = like, tuple(sizes)
        self._additions = iter(additions_of(self._sizes[2], tuple(blocks)))
        self._results: Tensor | None = None
        self._wide: Tensor | None = None

    def joins(self, rows: Range, part: Tensor) -> Iterator[Join]:
        """Yield where the next part is to be added; nowhere if it is the first one and of all rows."""
        additions = next(self._additions)
        if self._results is None and rows == (0, self._sizes[2]):
            self._results = part
        for addition in additions:
            first, last = addition.rows
            before = self._wide_sums() if addition.reads_wide else self._narrow_sums()
            after = self._wide_sums() if addition.writes_wide else self._narrow_sums()
            place, inside = slice(first, last), slice(first - rows[0], last - rows[0])
            yield Join(place, inside, before[:, :, place], after[:, :, place])

    def results(self) -> Tensor:
        """Return the sums of all parts."""
        return self._narrow_sums().to(self._like.dtype)

    def _narrow_sums(self) -> Tensor:
        if self._results is None:
            self._results = self._like.new_zeros(self._sizes)
        return self._results

    def _wide_sums(self) -> Tensor:
        if self._wide is None:
            dtype = torch.promote_types(self._like.dtype, torch.float32)
            self._wide = self._like.new_empty(self._sizes, dtype=dtype)
        return self._wide


class GradientSums(RowSums):
    """Gradients of rows."""

    def add(self, rows: Range, part: Tensor) -> None:
        """Add the gradients of some rows."""
        for join in self.joins(rows, part):
            own = part[:, :, join.inside]
            if join.before.dtype == own.dtype != join.after.dtype:
                join.after.copy_(join.before).add_(own)  # torch.add would round to their type first
            else:
                torch.add(join.before, own, out=join.after)


class AttentionSums:
    """Output and log-sum-exp per query row over the blocks' keys, and over attention sinks.

    Args:
        query: [batch, heads, rows, head_dim].
        head_dim_v: of the output.
        blocks: the query rows of each block, in the order in which they come.
        sinks: None, or a logit for each head that joins the softmax of its rows in the end.
    """

    def __init__(self, query: Tensor, head_dim_v: int, blocks: Sequence[Range], sinks: Tensor | None = None) -> None:
        self._rows: Range = (0, query.shape[2])
        blocks = blocks if sinks is None else [*blocks, self._rows]
        self._out = RowSums(query, (*query.shape[:3], head_dim_v), blocks)
        self._query, self._head_dim_v, self._sinks = query, head_dim_v, sinks
        self._dtype = torch.promote_types(query.dtype, torch.float32)
        self._lse: Tensor | None = None

    def add(self, rows: Range, part: Tensor, lse: Tensor) -> None:
        """Add attention of some rows over further keys."""
        if self._lse is None and rows == self._rows:
            self._lse = lse
        for join in self._out.joins(rows, part):
            sums = self._sums()[:, :, join.rows]
            add_partial(join.before, sums, part[:, :, join.inside], lse[:, :, join.inside], join.after)

    def results(self) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp over all keys."""
        if self._sinks is not None:
            self._add_sinks(self._sinks)
        return self._out.results(), self._sums()

    def _add_sinks(self, sinks: Tensor) -> None:
        """Add a key with these logits and a value of zeros."""
        sizes = self._query.shape[:3]
        lse = sinks.to(self._dtype)[:, None].expand(sizes).contiguous()
        part = self._query.new_zeros(self._head_dim_v).expand(*sizes, -1)
        self.add(self._rows, part if self._lse is not None else part.contiguous(), lse)

    def _sums(self) -> Tensor:
        if self._lse is None:
            self._lse = self._query.new_full(self._query.shape[:3], -torch.inf, dtype=self._dtype)
        return self._lse
