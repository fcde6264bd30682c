"""Attention with any features, for some query rows in one group of heads at a time: the right answers of large shapes.

It says what `kernels/values/reference.py` says of whole tensors, over entries of any length and layout, in bounded
memory, and can be differentiated by autograd. Rows that see no key have the output 0, the log-sum-exp -inf and no
gradients.
"""

from collections.abc import Iterator
from typing import Any

import torch

from blocktune.kernels.values.dropout import keep_threshold, pair_numbers, share_kept
from blocktune.kernels.values.features import UNLIMITED, MaskKind
from blocktune.kernels.values.shape import Causal
from blocktune.tuner.correctness.forward import softmax_scale
from blocktune.tuner.correctness.inputs import CheckInputs
from blocktune.tuner.correctness.memory import CHUNK_SCORES, ROWS_PER_TILE

_WORD = 0xFFFFFFFF
_WORD_BITS = 32
DROPOUT_SHARE = 8
"""How many times smaller chunks are with dropout, since its random words take that much more memory than scores."""


class Group:
    """One batch entry's query heads that share a key head. q [group_size, rows, dim], k and v [keys, dim], float32."""

    def __init__(self, inputs: CheckInputs, number: int) -> None:
        shape = inputs.shape
        self.inputs = inputs
        self.entry, self.head_kv = divmod(number, shape.num_heads_kv)
        self.heads = slice(self.head_kv * shape.group_size, (self.head_kv + 1) * shape.group_size)
        q, k, v = inputs.entry(self.entry)
        self.q, self.k, self.v = q[self.heads].float(), k[self.head_kv].float(), v[self.head_kv].float()

    def chunks(self) -> Iterator[slice]:
        """Cut the rows so that the scores of a chunk stay small."""
        rows, pairs = self.q.shape[1], self.k.shape[0] * self.q.shape[0]
        scores = CHUNK_SCORES // (DROPOUT_SHARE if self.inputs.shape.features.dropout else 1)
        step = max(ROWS_PER_TILE, scores // pairs)
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def forward(self) -> tuple[Any, Any]:
        """Return the output [group_size, rows, head_dim_v] and log-sum-exp [group_size, rows] in float32."""
        parts = [self.attend(self.q[:, rows], self.k, self.v, rows) for rows in self.chunks()]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)

    def gradients(self, dout: Any) -> tuple[Any, Any, Any]:
        """Return dq [group_size, rows, dim], dk and dv [1, keys, dim] for the gradient of the output, by autograd."""
        dq, dk, dv = torch.empty_like(self.q), torch.zeros_like(self.k), torch.zeros_like(self.v)
        for rows in self.chunks():
            q, k, v = (tensor.detach().requires_grad_() for tensor in (self.q[:, rows], self.k, self.v))
            with torch.enable_grad():
                out, _ = self.attend(q, k, v, rows)
            dq[:, rows], more_dk, more_dv = torch.autograd.grad(out, (q, k, v), dout[:, rows].float())
            dk += more_dk
            dv += more_dv
        return dq, dk[None], dv[None]

    def attend(self, q: Any, k: Any, v: Any, rows: slice) -> tuple[Any, Any]:
        """Return the output and log-sum-exp of some rows, whose queries are q."""
        scores, seen = self._scores(q @ k.T * softmax_scale(self.inputs.shape), rows)
        dead = ~seen.any(-1, keepdim=True)  # keeps its scores, so that nothing becomes NaN on the way back
        scores = scores.masked_fill(~(seen | dead), float("-inf"))
        lse = torch.logsumexp(scores, -1).masked_fill(dead.expand(*scores.shape[:-1], 1)[..., 0], float("-inf"))
        probabilities = torch.softmax(scores, -1).masked_fill(dead, 0.0)
        if self.inputs.shape.features.dropout:
            probabilities = probabilities * self._dropout_mask(rows) / share_kept(self.inputs.extras.dropout_p)
        return probabilities @ v, lse

    def _scores(self, scores: Any, rows: slice) -> tuple[Any, Any]:
        """Return the scaled products with all that is added to them, and which pairs take part, [1 or heads, rows,
        keys]."""
        features, extras = self.inputs.shape.features, self.inputs.extras
        distance = self._distance(rows)
        seen = self._visible_pairs(distance)[None]
        if features.softcap:
            scores = extras.softcap * torch.tanh(scores / extras.softcap)
        if features.alibi:
            scores = scores - self._of_entry(extras.alibi_slopes)[self.heads, None, None] * distance.abs()
        if features.mask is MaskKind.ADDITIVE:
            bias = self._of_pairs(extras.mask, rows).float()
            scores, seen = scores + bias.nan_to_num(neginf=0.0), seen & ~bias.isneginf()
        elif features.mask is MaskKind.BOOLEAN:
            seen = seen & self._of_pairs(extras.mask, rows)
        elif features.mask is MaskKind.BLOCK_SPARSE:
            seen = seen & self._active(rows)
        elif features.mask is MaskKind.TREE:
            seen = seen & self._drafts(rows)
        return scores, seen

    def _distance(self, rows: slice) -> Any:
        """Return, as [rows, keys], how many keys each key comes after the one on the query's diagonal."""
        device = self.q.device
        queries = torch.arange(rows.start, rows.stop, device=device)[:, None]
        return torch.arange(self.k.shape[0], device=device) - queries - self.inputs.diagonal(self.entry)

    def _visible_pairs(self, distance: Any) -> Any:
        """Return what causal mask and window leave."""
        shape = self.inputs.shape
        left, right = shape.features.window or (UNLIMITED, UNLIMITED)
        right = 0 if shape.causal is not Causal.NONE else right
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left != UNLIMITED:
            seen &= distance >= -left
        return seen if right == UNLIMITED else seen & (distance <= right)

    def _of_entry(self, values: Any) -> Any:
        """Return what stands for this entry in a tensor [batch or 1, ...]."""
        return values[self.entry if values.shape[0] > 1 else 0]

    def _of_pairs(self, mask: Any, rows: slice) -> Any:
        """Return [1 or heads, rows or 1, keys] of a mask that broadcasts."""
        own = self._of_entry(mask)
        own = own[self.heads] if own.shape[0] > 1 else own
        own = own[:, rows] if own.shape[1] > 1 else own
        return own[..., : self.k.shape[0]]

    def _active(self, rows: slice) -> Any:
        """Return [1 or heads, rows, keys] of the block mask."""
        blocks, device = self.inputs.extras.block_mask, self.q.device
        own = self._of_entry(blocks.mask)
        own = own[self.heads] if own.shape[0] > 1 else own
        queries = torch.arange(rows.start, rows.stop, device=device) // blocks.block_q
        return own[:, queries][..., torch.arange(self.k.shape[0], device=device) // blocks.block_k]

    def _drafts(self, rows: slice) -> Any:
        """Return [1, rows, keys] of the tree over the last keys; all keys before them are seen."""
        drafts = self.inputs.shape.seqlen_q
        words = self.inputs.extras.tree_mask[self.entry, rows].long() & _WORD  # type: ignore[index]
        number = torch.arange(self.k.shape[0], device=self.q.device) - (self.k.shape[0] - drafts)
        bit = number.clamp_min(0)
        set_bits = words[:, bit // _WORD_BITS] >> (bit % _WORD_BITS) & 1
        return ((set_bits == 1) | (number < 0))[None]

    def _dropout_mask(self, rows: slice) -> Any:
        """Return [heads, rows, keys], True where dropout keeps the pair."""
        shape, extras = self.inputs.shape, self.inputs.extras

        def positions(first: int, stop: int, *sizes: int) -> Any:
            return torch.arange(first, stop, dtype=torch.int64, device=self.q.device).view(sizes)

        first = self.entry * shape.num_heads
        heads = positions(first + self.heads.start, first + self.heads.stop, -1, 1, 1)
        queries = positions(rows.start, rows.stop, 1, -1, 1)
        numbers = pair_numbers(heads, queries, self.k.shape[0], extras.seed, extras.offset)
        return numbers >= keep_threshold(extras.dropout_p)
