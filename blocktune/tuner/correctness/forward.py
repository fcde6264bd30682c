"""Whether a candidate computes attention: its output and log-sum-exp against a float32 reference.

A config gets two questions. The plain one has normally distributed inputs, as a trained model's are roughly. The hard
one scales the queries up until the softmax is nearly one-hot and a row's maximum is found late, which a kernel that
takes shortcuts around the running maximum must survive.

The reference is exact but limited: it covers all query rows of as many (batch, head) pairs as `REFERENCE_FLOPS` pay
for, the first and the last always among them, and is computed in chunks that keep the score matrix small. The heads
outside are checked for values that are not finite. Errors are taken per tile of 64 rows, so that one wrong tile cannot
hide in the norm of a whole head.
"""

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blocktune.kernels.base.kernel import Launch, Thunk
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal
from blocktune.tuner.correctness.inputs import key_bytes, make_inputs, scaled_queries
from blocktune.tuner.correctness.memory import CHUNK_SCORES, MAX_REFERENCE_BYTES, ROWS_PER_TILE

REFERENCE_FLOPS = 2e12
"""About 0.1 s on a data-centre GPU and a second on a small one."""
MIN_HEADS = 4


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative Frobenius error of an output tile, and largest absolute error of the log-sum-exp."""

    output: float
    lse: float


# Rounding the probabilities and the output to the data type costs about 1.6 units of its relative rounding error, in
# the Frobenius norm: 2.5e-3 for bfloat16 (2^-9 a rounding), 3e-4 for float16 (2^-12). For float32 the products count:
# three passes of tf32 leave a few 1e-6, one alone would leave 5e-4. The bounds leave a factor of two to five and stay
# below the damage of one wrong row in a tile (1/8). The hard question amplifies the rounding of scores of several
# hundred: a single pass of tf32 would be wrong by a tenth there. e4m3 rounds a probability by up to 1/16, 2.6e-2 in
# the norm, and wgmma adds 8-bit products with about 14 bits, which may take up to 2e-2 over 16384 keys; in a hard
# question one probability is nearly all of a row.
PLAIN = {
    "bfloat16": Tolerance(6e-3, 1e-3),
    "float16": Tolerance(1.5e-3, 1e-3),
    "float32": Tolerance(5e-5, 1e-4),
    FP8: Tolerance(6e-2, 1e-2),
}
HARD = {
    "bfloat16": Tolerance(2e-2, 5e-2),
    "float16": Tolerance(6e-3, 5e-2),
    "float32": Tolerance(1e-2, 5e-2),
    FP8: Tolerance(9e-2, 1e-1),
}
HARD_QUERY_SCALE = {"bfloat16": 80.0, "float16": 16.0, "float32": 80.0, FP8: 16.0}
"""Makes exp of (score - first tile's maximum) overflow the data type's exponent range in some rows."""


class Question:
    """Inputs of one shape, with the right answer for some heads."""

    def __init__(self, shape: AttentionShape, q: Any, k: Any, v: Any, heads: Sequence[int], tolerance: Tolerance):
        self.q, self.k, self.v = q, k, v
        self.shape = self._shape = shape
        self._tolerance = tolerance
        self._batch = torch.tensor([head // shape.num_heads for head in heads], device=q.device)
        self._head = torch.tensor([head % shape.num_heads for head in heads], device=q.device)
        self._out, self._lse = self._reference()

    @property
    def flops(self) -> int:
        """Of one launch."""
        return self.shape.flops

    @property
    def key_bytes(self) -> int:
        return key_bytes(self.shape)

    @property
    def answer(self) -> tuple[Any, Any]:
        """The reference of the chosen heads in float32: output [heads, seqlen_q, head_dim_v], lse [heads, seqlen_q]."""
        return self._out, self._lse

    def new_result(self) -> Any:
        """Return the memory for what a launch writes."""
        size = (*self.q.shape[:3], self._shape.head_dim_v)
        return torch.empty(size, dtype=getattr(torch, self.shape.out_dtype), device=self.q.device)

    def poison(self, result: Any) -> None:
        """Fill a result with NaN, so that nothing left by an earlier launch can pass."""
        result.fill_(float("nan"))

    def new_lse(self) -> Any:
        """Return poisoned memory for the log-sum-exp."""
        return torch.full(self.q.shape[:3], float("nan"), dtype=torch.float32, device=self.q.device)

    def thunk(self, launch: Launch, result: Any, lse: Any | None = None) -> Thunk:
        """Return one launch of these inputs into `result`, and into `lse` unless that is None."""
        return functools.partial(launch, self.q, self.k, self.v, result, lse, softmax_scale(self._shape))

    def problem(self, out: Any, lse: Any | None = None) -> str | None:
        """Return what is wrong with a result, or None. `lse` is None where the launch did not compute it."""
        bad = out.numel() - int(torch.isfinite(out).sum())
        if bad:
            return f"{bad} of {out.numel()} output values are not finite"
        return self._output_problem(out) or (None if lse is None else self._lse_problem(lse))

    def _output_problem(self, out: Any) -> str | None:
        difference = out[self._batch, self._head].float() - self._out
        errors = tile_norms(difference) / tile_norms(self._out).clamp_min(1e-20)
        worst = float(errors.max())
        if worst <= self._tolerance.output:
            return None
        head, tile = divmod(int(errors.argmax()), errors.shape[1])
        return (
            f"relative error {worst:.2e} in rows {tile * ROWS_PER_TILE}.. of batch {int(self._batch[head])}, "
            f"head {int(self._head[head])}; allowed is {self._tolerance.output:.0e}"
        )

    def _lse_problem(self, lse: Any) -> str | None:
        found = lse[self._batch, self._head]
        empty = torch.isneginf(self._lse)
        if bool(torch.isnan(lse).any()) or not bool(torch.equal(torch.isneginf(found), empty)):
            return "the log-sum-exp is NaN, or -inf in other rows than those without keys"
        worst = float((found - self._lse)[~empty].abs().max()) if not bool(empty.all()) else 0.0
        if worst <= self._tolerance.lse:
            return None
        return f"error {worst:.2e} of the log-sum-exp; allowed is {self._tolerance.lse:.0e}"

    def _reference(self) -> tuple[Any, Any]:
        """Return the output [heads, seqlen_q, head_dim_v] and log-sum-exp [heads, seqlen_q] in float32."""
        shape = self._shape
        per_head = shape.seqlen_q * shape.seqlen_k
        step = max(1, CHUNK_SCORES // per_head)
        outs, lses = [], []
        for start in range(0, len(self._batch), step):
            batch, head = self._batch[start : start + step], self._head[start : start + step]
            kv_head = head // shape.group_size
            q, k, v = self.q[batch, head], self.k[batch, kv_head], self.v[batch, kv_head]
            parts = [_reference_rows(q, k, v, rows, shape) for rows in _row_chunks(shape)]
            outs.append(torch.cat([out for out, _ in parts], dim=1))
            lses.append(torch.cat([lse for _, lse in parts], dim=1))
        return torch.cat(outs), torch.cat(lses)


def make_questions(shape: AttentionShape, *, device: str, seed: int) -> tuple[Question, Question]:
    """Return the plain and the hard question of a shape; both share their keys and values."""
    inputs = make_inputs(shape, device=device, seed=seed)
    q, k, v = inputs.q, inputs.k, inputs.v
    heads = chosen_heads(shape, seed)
    plain = Question(shape, q, k, v, heads, PLAIN[shape.dtype])
    hard = Question(shape, scaled_queries(q, HARD_QUERY_SCALE[shape.dtype]), k, v, heads[:MIN_HEADS], HARD[shape.dtype])
    return plain, hard


def softmax_scale(shape: AttentionShape) -> float:
    """Return the scale that candidates are checked and timed with."""
    return 1.0 / math.sqrt(shape.head_dim)


def chosen_heads(shape: AttentionShape, seed: int) -> tuple[int, ...]:
    """Return which of the batch * num_heads pairs the reference covers: the first, the last, then random ones."""
    total = shape.batch * shape.num_heads
    flops_per_head = max(1, 2 * (shape.head_dim + shape.head_dim_v) * shape.seqlen_q * shape.seqlen_k)
    bytes_per_head = 4 * shape.seqlen_q * (shape.head_dim + 2 * shape.head_dim_v)
    affordable = min(REFERENCE_FLOPS / flops_per_head, MAX_REFERENCE_BYTES / bytes_per_head)
    others = random.Random(seed).sample(range(1, total - 1), k=max(0, total - 2))
    ordered = dict.fromkeys((0, total - 1, *others))
    return tuple(ordered)[: max(MIN_HEADS, int(affordable))]


def _row_chunks(shape: AttentionShape) -> Iterator[tuple[int, int]]:
    """Cut the query rows so that a chunk's scores stay small and, if causal, its rows see no keys, some or all."""
    offset = shape.causal_offset
    marks = {0, shape.seqlen_q}
    if shape.causal is not Causal.NONE:
        marks |= {min(max(0, row), shape.seqlen_q) for row in (-offset, shape.seqlen_k - offset)}
    step = max(ROWS_PER_TILE, CHUNK_SCORES // shape.seqlen_k)
    edges = sorted(marks)
    for first, last in itertools.pairwise(edges):
        for start in range(first, last, step):
            yield start, min(start + step, last)


def _reference_rows(q: Any, k: Any, v: Any, rows: tuple[int, int], shape: AttentionShape) -> tuple[Any, Any]:
    """Return the reference of some query rows; lower-right alignment over the keys that the last row sees is their
    mask."""
    start, stop = rows
    part = q[None, :, start:stop]
    last_sees = stop + shape.causal_offset
    scale = softmax_scale(shape)
    if shape.causal is Causal.NONE or start + shape.causal_offset + 1 >= shape.seqlen_k:
        out, lse = attention_reference(part, k[None], v[None], causal=Causal.NONE, scale=scale)
    elif last_sees <= 0:
        out = torch.zeros(*part.shape[:3], v.shape[-1], device=q.device)
        lse = torch.full(part.shape[:3], float("-inf"), device=q.device)
    else:
        seen = (k[None, :, :last_sees], v[None, :, :last_sees])
        out, lse = attention_reference(part, *seen, causal=Causal.LOWER_RIGHT, scale=scale)
    return out[0], lse[0]


def tile_norms(values: Any) -> Any:
    """Return the Frobenius norms [heads, tiles] of values [heads, rows, dim], in tiles of 64 rows."""
    rows = values.square().sum(-1)
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % ROWS_PER_TILE))
    return padded.unflatten(1, (-1, ROWS_PER_TILE)).sum(-1).sqrt()
