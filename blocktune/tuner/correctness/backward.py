"""Whether a candidate computes the gradients of attention: dq, dk and dv against a float32 reference.

The answer is autograd's of the definition, some rows at a time. It covers whole groups: a few key/value heads with all
their query heads. `out` and `lse`, which a backward gets from the forward, are the float32 reference's for every head,
so that no other kernel's error counts.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blocktune.kernels.base.kernel import Launch, Thunk
from blocktune.kernels.values.features import NO_FEATURES
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.correctness.feature_reference import Group
from blocktune.tuner.correctness.features import empty_lse, empty_out
from blocktune.tuner.correctness.forward import Question, Tolerance, softmax_scale, tile_norms
from blocktune.tuner.correctness.head_groups import chosen_groups
from blocktune.tuner.correctness.inputs import CheckInputs, make_inputs
from blocktune.tuner.correctness.memory import ROWS_PER_TILE

GRADIENTS = ("dq", "dk", "dv")

# Probabilities and dS are rounded to the data type between the products, as are out and the gradients themselves: about
# 2.5e-3 in bfloat16 and 3e-4 in float16, over tiles of 64 rows up to three times as much where gradients nearly cancel.
PLAIN_GRADIENTS = {"bfloat16": 1.5e-2, "float16": 3e-3, "float32": 2e-4}
HARD_GRADIENTS = {"bfloat16": 4e-2, "float16": 1e-2, "float32": 2e-3}
HARD_QUERY_SCALE = 6.0
"""Scores of a few tens: most probabilities underflow, and the largest of a row is found late."""


class GradientQuestion:
    """A backward's inputs, with the right gradients for some groups of heads. Offers what a forward `Question` does."""

    def __init__(self, inputs: CheckInputs, dout: Any, groups: Sequence[int], tolerance: float):
        self.inputs = inputs
        self.q, self.k, self.v = inputs.q, inputs.k, inputs.v
        self.dout = dout
        self.out, self.lse = _forward(inputs)
        self._tolerance = tolerance
        self._rights = _join_alike([right for number in groups for right in self._rights_of(Group(inputs, number))])

    @property
    def flops(self) -> int:
        """Of one launch."""
        return self.inputs.flops

    @property
    def key_bytes(self) -> int:
        return self.inputs.key_bytes

    def new_result(self) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in (self.q, self.k, self.v))

    def poison(self, result: Any) -> None:
        for gradient in result:
            gradient.fill_(float("nan"))

    def new_lse(self) -> None:
        """Return None: a backward writes no log-sum-exp."""

    def thunk(self, launch: Launch, result: Any, lse: Any | None = None) -> Thunk:
        del lse
        given = (self.q, self.k, self.v, self.out, self.lse, self.dout, *result, softmax_scale(self.inputs.shape))
        extras = (self.inputs.extras,) if self.inputs.shape.features else ()
        return functools.partial(launch, *given, *extras)

    def problem(self, result: Any, lse: Any | None = None) -> str | None:
        """Return what is wrong with (dq, dk, dv), or None."""
        del lse
        for name, gradient in zip(GRADIENTS, result, strict=True):
            bad = gradient.numel() - int(torch.isfinite(gradient).sum())
            if bad:
                return f"{bad} of {gradient.numel()} values of {name} are not finite"
        by_name = dict(zip(GRADIENTS, result, strict=True))
        errors = [self._errors(by_name[right.name], right) for right in self._rights]
        worst = torch.stack([of_tiles.max() for of_tiles in errors]).tolist()  # one wait for the GPU
        for right, of_tiles, largest in zip(self._rights, errors, worst, strict=True):
            if largest > self._tolerance:
                head, tile = divmod(int(of_tiles.argmax()), of_tiles.shape[1])
                group = right.groups[head * len(right.groups) // of_tiles.shape[0]]
                return (
                    f"relative error {largest:.2e} of {right.name} in rows {tile * ROWS_PER_TILE}.. of batch "
                    f"{group.entry}, key head {group.head_kv}; allowed is {self._tolerance:.0e}"
                )
        return None

    def _errors(self, gradient: Any, right: "_Right") -> Any:
        """Return the relative errors [heads, tiles] of a gradient in the heads of some groups."""
        found = torch.cat([self._group_gradient(gradient, right.name, group) for group in right.groups])
        return tile_norms(found.float() - right.gradient) / right.norms

    def _group_gradient(self, gradient: Any, name: str, group: Group) -> Any:
        """Return a gradient in the heads of one group: [heads, rows, columns]."""
        if name == "dq":
            return self.inputs.of_queries(gradient, group.entry)[group.heads]
        return self.inputs.of_keys(gradient, group.entry)[group.head_kv][None]

    def _rights_of(self, group: Group) -> Iterator["_Right"]:
        dout = self.inputs.of_queries(self.dout, group.entry)[group.heads]
        for name, gradient in zip(GRADIENTS, group.gradients(dout), strict=True):
            norms = tile_norms(gradient)
            # a tile of gradients that nearly cancel is judged by what a tile of this tensor usually is
            yield _Right(name, (group,), gradient, norms.maximum(norms.median()).clamp_min(1e-20))


@dataclass(frozen=True, slots=True)
class _Right:
    """The right gradient [heads, rows, columns] for some groups of heads, and norms [heads, tiles] to judge it by."""

    name: str
    groups: tuple[Group, ...]
    gradient: Any
    norms: Any


def _join_alike(rights: Iterable[_Right]) -> list[_Right]:
    """Return the same gradients with those of the same size as one, which takes few launches to judge."""
    alike: dict[tuple[str, Any], list[_Right]] = {}
    for right in rights:
        alike.setdefault((right.name, right.gradient.shape), []).append(right)
    return [
        _Right(
            name,
            tuple(group for right in same for group in right.groups),
            torch.cat([right.gradient for right in same]),
            torch.cat([right.norms for right in same]),
        )
        for (name, _), same in alike.items()
    ]


def make_gradient_questions(
    shape: AttentionShape, *, device: str, seed: int
) -> tuple[GradientQuestion, GradientQuestion]:
    """Return the plain and the hard question of a backward shape; both share keys, values and the output's gradient."""
    inputs, groups = make_inputs(shape, device=device, seed=seed), chosen_groups(shape, seed)
    dout = empty_out(inputs).normal_(generator=torch.Generator(device=device).manual_seed(seed + 1))
    hard = inputs.scaled(HARD_QUERY_SCALE)
    return (
        GradientQuestion(inputs, dout, groups, PLAIN_GRADIENTS[shape.dtype]),
        GradientQuestion(hard, dout, groups, HARD_GRADIENTS[shape.dtype]),
    )


def _forward(inputs: CheckInputs) -> tuple[Any, Any]:
    """Return the output, in the data type, and log-sum-exp of every head, by the float32 reference."""
    shape = inputs.shape
    out, lse = empty_out(inputs), empty_lse(inputs)
    if shape.features == NO_FEATURES:
        every_head = range(shape.batch * shape.num_heads)
        answer = Question(shape, inputs.q, inputs.k, inputs.v, every_head, Tolerance(0.0, 0.0)).answer
        return out.copy_(answer[0].view(out.shape)), lse.copy_(answer[1].view(lse.shape))
    for number in range(shape.batch * shape.num_heads_kv):
        group = Group(inputs, number)
        part, part_lse = group.forward()
        inputs.of_queries(out, group.entry)[group.heads] = part.to(out.dtype)
        inputs.of_queries(lse, group.entry)[group.heads] = part_lse
    return out, lse
