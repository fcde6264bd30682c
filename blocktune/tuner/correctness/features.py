"""The question of a forward with features: as `tuner/correctness/forward.py` asks it, of entries of any length and
layout.

It covers some groups of heads, the first and the last among them, with all their query rows.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from blocktune.kernels.base.kernel import Launch, Thunk
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.correctness.feature_reference import Group
from blocktune.tuner.correctness.forward import (
    HARD,
    HARD_QUERY_SCALE,
    PLAIN,
    Tolerance,
    softmax_scale,
    tile_norms,
)
from blocktune.tuner.correctness.head_groups import MIN_GROUPS, chosen_groups
from blocktune.tuner.correctness.inputs import CheckInputs, make_inputs
from blocktune.tuner.correctness.memory import ROWS_PER_TILE


class FeatureQuestion:
    """Inputs of one shape with features, with the right answer for some groups. Offers what a `Question` does."""

    def __init__(self, inputs: CheckInputs, groups: Sequence[int], tolerance: Tolerance):
        self.inputs = inputs
        self.q, self.k, self.v = inputs.q, inputs.k, inputs.v
        self._tolerance = tolerance
        self._groups = [(group, *group.forward()) for group in (Group(inputs, number) for number in groups)]

    @property
    def flops(self) -> int:
        """Of one launch."""
        return self.inputs.flops

    @property
    def key_bytes(self) -> int:
        return self.inputs.key_bytes

    def new_result(self) -> Any:
        return empty_out(self.inputs)

    def poison(self, result: Any) -> None:
        result.fill_(float("nan"))

    def new_lse(self) -> Any:
        return empty_lse(self.inputs).fill_(float("nan"))

    def thunk(self, launch: Launch, result: Any, lse: Any | None = None) -> Thunk:
        scale = softmax_scale(self.inputs.shape)
        return functools.partial(launch, self.q, self.k, self.v, result, lse, scale, self.inputs.extras)

    def problem(self, out: Any, lse: Any | None = None) -> str | None:
        """Return what is wrong with a result, or None. `lse` is None where the launch did not compute it."""
        bad = out.numel() - int(torch.isfinite(out).sum())
        if bad:
            return f"{bad} of {out.numel()} output values are not finite"
        for group, right, right_lse in self._groups:
            problem = self._output_problem(group, out, right)
            if problem is None and lse is not None:
                problem = self._lse_problem(group, lse, right_lse)
            if problem is not None:
                return problem
        return None

    def _output_problem(self, group: Group, out: Any, right: Any) -> str | None:
        found = self.inputs.of_queries(out, group.entry)[group.heads].float()
        errors = tile_norms(found - right) / tile_norms(right).clamp_min(1e-20)
        worst = float(errors.max())
        if worst <= self._tolerance.output:
            return None
        head, tile = divmod(int(errors.argmax()), errors.shape[1])
        return (
            f"relative error {worst:.2e} in rows {tile * ROWS_PER_TILE}.. of batch {group.entry}, "
            f"head {group.heads.start + head}; allowed is {self._tolerance.output:.0e}"
        )

    def _lse_problem(self, group: Group, lse: Any, right: Any) -> str | None:
        found, empty = self.inputs.of_queries(lse, group.entry)[group.heads], torch.isneginf(right)
        if bool(torch.isnan(found).any()) or not bool(torch.equal(torch.isneginf(found), empty)):
            return "the log-sum-exp is NaN, or -inf in other rows than those without keys"
        worst = float((found - right)[~empty].abs().max()) if not bool(empty.all()) else 0.0
        if worst <= self._tolerance.lse:
            return None
        return f"error {worst:.2e} of the log-sum-exp; allowed is {self._tolerance.lse:.0e}"


def make_feature_questions(shape: AttentionShape, *, device: str, seed: int) -> tuple[FeatureQuestion, FeatureQuestion]:
    """Return the plain and the hard question of a forward shape with features; both share their keys, values and
    extras."""
    inputs, groups = make_inputs(shape, device=device, seed=seed), chosen_groups(shape, seed)
    hard = inputs.scaled(HARD_QUERY_SCALE[shape.dtype])
    return (
        FeatureQuestion(inputs, groups, PLAIN[shape.dtype]),
        FeatureQuestion(hard, groups[:MIN_GROUPS], HARD[shape.dtype]),
    )


def empty_out(inputs: CheckInputs) -> Any:
    """Return the memory for the output."""
    return inputs.q.new_empty(*inputs.q.shape[:3], inputs.shape.head_dim_v)


def empty_lse(inputs: CheckInputs) -> Any:
    """Return the memory for the log-sum-exp: [batch, num_heads, seqlen_q], or [num_heads, tokens] of packed
    sequences."""
    sizes = inputs.q.shape[1:3] if inputs.shape.features.varlen else inputs.q.shape[:3]
    return torch.empty(sizes, dtype=torch.float32, device=inputs.q.device)
