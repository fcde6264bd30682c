"""Whether a candidate computes the gradients of attention: dq, dk and dv against a float32 reference.

The answer is computed by the definition (FlashAttention-2, arXiv 2307.08691, section 2.3.2), a block of rows at a
time: with P = softmax(scale q k^T) and dP = dout v^T, dv = P^T dout, dS = P (dP - rowsum(dout out)), dq = scale dS k
and dk = scale dS^T q. It covers whole groups: a few key/value heads with all their query heads. `out` and `lse`, which
a backward gets from the forward, are the float32 reference's for every head, so that no other kernel's error counts.
"""

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch

from blocktune.kernels.kernel import Launch
from blocktune.kernels.reference import visible
from blocktune.kernels.shape import AttentionShape, Causal
from blocktune.tuner.bench import Thunk
from blocktune.tuner.check import (
    CHUNK_SCORES,
    REFERENCE_FLOPS,
    ROWS_PER_TILE,
    Question,
    Tolerance,
    softmax_scale,
    tile_norms,
)

MIN_GROUPS = 2
GRADIENTS = ("dq", "dk", "dv")

# Probabilities and dS are rounded to the data type between the products, as are out and the gradients themselves: about
# 2.5e-3 in bfloat16 and 3e-4 in float16, over tiles of 64 rows up to three times as much where gradients nearly cancel.
PLAIN_GRADIENTS = {"bfloat16": 1.5e-2, "float16": 3e-3, "float32": 2e-4}
HARD_GRADIENTS = {"bfloat16": 4e-2, "float16": 1e-2, "float32": 2e-3}
HARD_QUERY_SCALE = 6.0
"""Scores of a few tens: most probabilities underflow, and the largest of a row is found late."""


class GradientQuestion:
    """Inputs of a backward, with the right gradients of some groups of heads. Offers what a forward `Question` does."""

    def __init__(self, forward: Question, dout: Any, groups: Sequence[int], tolerance: float):
        shape = self._shape = forward.shape
        self.q, self.k, self.v = forward.q, forward.k, forward.v
        self.dout = dout
        out, lse = forward.answer
        self.out = out.to(self.q.dtype).view(shape.batch, shape.num_heads, shape.seqlen_q, shape.head_dim_v)
        self.lse = lse.view(shape.batch, shape.num_heads, shape.seqlen_q).contiguous()
        self._groups = tuple(groups)
        self._tolerance = tolerance
        self._expected = [self._reference(group) for group in self._groups]

    def new_result(self) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in (self.q, self.k, self.v))

    def poison(self, result: Any) -> None:
        for gradient in result:
            gradient.fill_(float("nan"))

    def new_lse(self) -> None:
        """A backward writes none."""

    def thunk(self, launch: Launch, result: Any, lse: Any | None = None) -> Thunk:
        del lse
        given = (self.q, self.k, self.v, self.out, self.lse, self.dout)
        return functools.partial(launch, *given, *result, softmax_scale(self._shape))

    def problem(self, result: Any, lse: Any | None = None) -> str | None:
        """What is wrong with (dq, dk, dv), or None."""
        del lse
        for name, gradient in zip(GRADIENTS, result, strict=True):
            bad = gradient.numel() - int(torch.isfinite(gradient).sum())
            if bad:
                return f"{bad} of {gradient.numel()} values of {name} are not finite"
        for group, expected in zip(self._groups, self._expected, strict=True):
            for name, gradient, right in zip(GRADIENTS, result, expected, strict=True):
                problem = self._difference(name, gradient, right, group)
                if problem is not None:
                    return problem
        return None

    def _difference(self, name: str, gradient: Any, right: Any, group: int) -> str | None:
        batch, head_kv = divmod(group, self._shape.num_heads_kv)
        found = gradient[batch, self._heads(head_kv)] if name == "dq" else gradient[batch, head_kv : head_kv + 1]
        # a tile of gradients that nearly cancel is judged by what a tile of this tensor usually is
        usual = tile_norms(right).median()
        errors = tile_norms(found.float() - right) / tile_norms(right).clamp_min(float(usual))
        worst = float(errors.max())
        if worst <= self._tolerance:
            return None
        tile = int(errors.argmax()) % errors.shape[1]
        return (
            f"relative error {worst:.2e} of {name} in rows {tile * ROWS_PER_TILE}.. of batch {batch}, "
            f"key head {head_kv}; allowed is {self._tolerance:.0e}"
        )

    def _heads(self, head_kv: int) -> slice:
        size = self._shape.group_size
        return slice(head_kv * size, (head_kv + 1) * size)

    def _reference(self, group: int) -> tuple[Any, Any, Any]:
        """dq [group_size, seqlen_q, head_dim], dk and dv [1, seqlen_k, head_dim(_v)] in float32."""
        batch, head_kv = divmod(group, self._shape.num_heads_kv)
        q, dout = (tensor[batch, self._heads(head_kv)].float() for tensor in (self.q, self.dout))
        k, v = (tensor[batch, head_kv].float() for tensor in (self.k, self.v))
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        step = max(ROWS_PER_TILE, CHUNK_SCORES // (self._shape.seqlen_k * self._shape.group_size))
        for start in range(0, self._shape.seqlen_q, step):
            rows = slice(start, min(start + step, self._shape.seqlen_q))
            dq[:, rows], more_dk, more_dv = self._rows_gradients(q[:, rows], k, v, dout[:, rows], rows)
            dk += more_dk
            dv += more_dv
        return dq, dk[None], dv[None]

    def _rows_gradients(self, q: Any, k: Any, v: Any, dout: Any, rows: slice) -> tuple[Any, Any, Any]:
        shape, scale = self._shape, softmax_scale(self._shape)
        scores = q @ k.T * scale
        if shape.causal is not Causal.NONE:
            seen = visible(shape.seqlen_q, shape.seqlen_k, shape.causal, q.device)[rows]
            scores.masked_fill_(~seen, float("-inf"))
        probabilities = torch.softmax(scores, -1).nan_to_num_(0.0)  # a row without keys has none
        delta = (dout * (probabilities @ v)).sum(-1, keepdim=True)
        dscores = probabilities * (dout @ v.T - delta) * scale
        return dscores @ k, (dscores.mT @ q).sum(0), (probabilities.mT @ dout).sum(0)


def make_gradient_questions(
    shape: AttentionShape, *, device: str, seed: int
) -> tuple[GradientQuestion, GradientQuestion]:
    """The plain and the hard question of a backward shape; both share keys, values and the output's gradient."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(heads: int, rows: int, dim: int) -> Any:
        dtype = getattr(torch, shape.dtype)
        return torch.randn(shape.batch, heads, rows, dim, dtype=dtype, device=device, generator=generator)

    q = normal(shape.num_heads, shape.seqlen_q, shape.head_dim)
    k = normal(shape.num_heads_kv, shape.seqlen_k, shape.head_dim)
    v = normal(shape.num_heads_kv, shape.seqlen_k, shape.head_dim_v)
    dout = normal(shape.num_heads, shape.seqlen_q, shape.head_dim_v)
    every_head, groups = range(shape.batch * shape.num_heads), chosen_groups(shape, seed)

    def question(factor: float, bound: float) -> GradientQuestion:
        forward = Question(shape, q * factor, k, v, every_head, Tolerance(0.0, 0.0))
        return GradientQuestion(forward, dout, groups, bound)

    return question(1.0, PLAIN_GRADIENTS[shape.dtype]), question(HARD_QUERY_SCALE, HARD_GRADIENTS[shape.dtype])


def chosen_groups(shape: AttentionShape, seed: int) -> tuple[int, ...]:
    """Which of the batch * num_heads_kv groups the reference covers: the first, the last, then random ones."""
    total = shape.batch * shape.num_heads_kv
    flops = 5 * (shape.head_dim + shape.head_dim_v) * shape.seqlen_q * shape.seqlen_k * shape.group_size
    others = random.Random(seed).sample(range(1, total - 1), k=max(0, total - 2))
    ordered = tuple(dict.fromkeys((0, total - 1, *others)))
    return ordered[: max(MIN_GROUPS, int(REFERENCE_FLOPS / 4 / flops))]
