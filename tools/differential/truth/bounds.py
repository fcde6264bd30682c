"""Whether a computed tensor is right.

An element of ours may differ from the truth (float64 of the same inputs) by

    3 * E + (c * eps + 8 * 2^-24 * S) * M

E is PyTorch's own largest error in the tensor: of scaled_dot_product_attention by its MATH backend, with everything
computed in the type (`allow_fp16_bf16_reduction_math_sdp`), which is what "in the type" means; the fused backends have
errors of their own with some masks. For functions that PyTorch has not, and float32 masks, which PyTorch rounds, it is
the definition computed in the type, except for soft caps, which are float32.

The rest is a floor, since E is luck where a tensor has few elements. M is the sum of the magnitudes of the terms that
make the element: rounding probabilities and results to the type (a relative eps / 2 each) changes it by no more than
eps * M, so c is 2 for the output, and 4 for gradients, whose terms are products of two rounded factors. It is 1 for
gradients of ALiBi's slopes (a) and sinks (s): sums of many terms, of which one factor is rounded. S is the size
of the terms in the row's scores: they are summed in float32, and an error of a score is a relative error of its
probability. Gradients are made of exp(score - log-sum-exp), which nothing divides by its sum: there the factor of M is
exp(8 * 2^-24 * S) - 1, the same for small errors. Where that bound is beyond the type, an infinity is within it.

Where a value is not finite:

* Truth, rounded to the type, and PyTorch both finite: ours must be finite and within the bound. An infinity of the
  truth's sign counts as the least number that rounds to it, 65520 in float16, where that is within the bound of the
  truth. Farther from the edge it is an error.
* Truth finite, PyTorch not: the type overflows on the way. Ours must be right in the output, by the bound with E of the
  definition computed in float32 and rounded. Gradients are excused: their factors are stored in the type.
* Truth and PyTorch both not finite: the output must not be finite either: a NaN that a query sees is not swallowed. In
  gradients it spreads as the order of the computation has it; but of a NaN in a mask, by the row.
* Inputs that are not finite excuse ours where truth and PyTorch disagree: a hidden NaN may come through, as 0 * NaN, or
  not. Where an output is finite nevertheless and the truth is, it must be right.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 3.0
GRADIENT_UNITS = 4.0
UNITS = {"out": 2.0, "a": 1.0, "s": 1.0}
"""Of tensors other than query, key and value."""

SCORE_UNITS = 8.0 * 2.0**-24
MOST = 700.0
"""An exponent of float64."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How one tensor did. ratio: the largest error over its bound; swallowed: elements that are finite and must not be;
    lost: elements that are not finite and must be; error and theirs: the largest finite ones."""

    name: str
    ratio: float
    error: float
    theirs: float
    lost: int
    swallowed: int

    @property
    def is_right(self) -> bool:
        return self.ratio <= 1.0 and not self.lost and not self.swallowed


def compare_errors(
    name: str,
    ours: Tensor,
    truth: Tensor,
    theirs: Tensor,
    magnitude: Tensor,
    score_size: Tensor,
    dtype: torch.dtype,
    *,
    poisoned: bool,
    strict: bool = False,
    wider: Tensor | None = None,
) -> Comparison:
    """ours against the truth. dtype: the type of the computation; wider: the definition in float32, of an output;
    poisoned: whether an input is not finite; strict: what is no number may not be swallowed in gradients, either.
    score_size broadcasts to the tensor."""
    if not ours.numel():
        return Comparison(name, 0.0, 0.0, 0.0, 0, 0)
    is_output = name == "out"
    ours, theirs = ours.detach().double(), theirs.detach().double()
    right = truth.to(dtype).isfinite()
    known = right & theirs.isfinite()
    units = UNITS.get(name, GRADIENT_UNITS) * torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    of_scores = SCORE_UNITS * torch.as_tensor(score_size, dtype=torch.float64, device=magnitude.device)
    floor = (units + (of_scores if is_output else of_scores.clamp(max=MOST).expm1())) * magnitude + tiny
    own = _largest(theirs - truth, known)
    if is_output and wider is not None:
        judged = right
        wider = wider.double()
        own = torch.maximum(own, _largest(wider - truth, right & wider.isfinite()))
    else:
        judged = known
    bound = FACTOR * own + floor
    ours = _with_edges(ours, truth, bound, dtype)
    present = ours.isfinite()
    lost = judged & ~present & (bound < torch.finfo(dtype).max)
    if poisoned:
        lost = lost & known
        judged = right if is_output else known
    error = torch.where(judged & present, (ours - truth).abs(), 0.0)
    ratio = torch.where(error > 0, error / bound, 0.0).amax()  # a bound may be infinity times 0, which is no number
    swallowed = ~truth.isfinite() & ~theirs.isfinite() & present & (is_output or strict)
    found = torch.stack((ratio, error.amax(), own, lost.sum().double(), swallowed.sum().double())).tolist()
    return Comparison(name, found[0], found[1], found[2], int(found[3]), int(found[4]))


def _with_edges(ours: Tensor, truth: Tensor, bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Ours, with the least number that rounds to infinity in the place of infinities that the bound explains."""
    limits = torch.finfo(dtype)
    half_step = limits.max * limits.eps / (2.0 - limits.eps) / 2.0  # between the largest numbers of the type
    edge = (limits.max + half_step) * truth.sign()
    explained = (ours == edge * float("inf")) & ((edge - truth).abs() <= bound)
    return torch.where(explained, edge, ours)


def _largest(error: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, error.abs(), 0.0).amax()
