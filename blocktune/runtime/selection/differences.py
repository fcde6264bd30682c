"""By how much results differ from the sampled rows of attention, and by how much rounding may make them differ.

A backward is given gradients of the output in the sampled rows alone. All gradients of keys and values then come from
these rows, so that few scores say what they must be.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktune.kernels.values.shape import FP8, AttentionShape
from blocktune.runtime.selection.row_sample import RowSample

KEYS = 256
"""Keys of a head whose gradients are compared, spread over its length."""

_ROUNDINGS = 8
"""Of probabilities, their gradients and results in the tensors' type: twice what the kernels do, and more."""

_STEPS = 4
"""Of the smallest number above 0, by which a gradient may be wrong."""

_SCORE_ERROR = 2.0**-20
"""Of a score in float32, relative to the greatest of its row: as an exponent it is the error of a probability."""

_GRADIENT_SCORE_ERROR = 2.0**-17
"""Of a score relative to a log-sum-exp that is rounded more than once, where scores are added upon it."""

_BENT_ERROR = 2.0**-9
"""Of a score under a soft cap, relative to the cap: four times the error of a GPU's hyperbolic tangent."""

_BIAS_ERROR = 2.0**-8
"""Of a score under ALiBi, whose distances are multiplied apart from it, and cancel in part."""

_SHORT_UNIT = 2.0**-5
"""The rounding error of 8-bit probabilities."""

_LARGEST_SIZE = 2.0**20
"""Of scores whose gradients are compared: the Hopper backward knows no probabilities of scores above 2^22. Nor does a
row of masked keys have one weight for all then: they count as -2^50, next to which float32 keeps scores of 2^26."""


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """Numbers that a config has left, those that attention has, and by how much they may differ."""

    found: Tensor
    expected: Tensor
    bound: Tensor

    @property
    def worst(self) -> float:
        """The greatest difference as a multiple of its bound; infinite where a number is missing. What is not finite by
        the definition, or near the largest number of the type, is not compared."""
        large = torch.finfo(self.found.dtype).max
        comparable = self.expected.isfinite() & self.bound.isfinite() & (self.expected.abs() <= large)
        distance = (self.found.double() - self.expected).abs()
        multiple = (distance / self.bound).nan_to_num(nan=float("inf"), posinf=float("inf"))
        close = (self.expected.abs() + self.bound > large) & self.found.isinf()  # rounded to infinity
        worst = torch.where(comparable & ~close, multiple, 0.0)
        return float(worst.max()) if worst.numel() else 0.0


def _magnitude(part: Tensor) -> Tensor:
    return part.abs()


def _unit_and_least(shape: AttentionShape, dtype: torch.dtype) -> tuple[float, float]:
    """Return the relative rounding error of probabilities, and the smallest number above 0 of the type, in steps of
    which a probability is rounded that is far below the greatest one of its row."""
    kind = torch.finfo(dtype)
    if shape.dtype == FP8 or shape.features.is_short:
        return _SHORT_UNIT, 2.0**-9
    least = max(kind.smallest_normal * kind.eps, torch.finfo(torch.float32).smallest_normal)
    return kind.eps / 2 if dtype is not torch.float32 else 2.0**-18, least


def _score_error(shape: AttentionShape, softcap: float, sample: RowSample, factor: float) -> Tensor:
    """Return the error of a row's probabilities that rounded scores explain, [rows, 1]."""
    bent = _BENT_ERROR * softcap if shape.features.softcap else 0.0
    return factor * (1 + sample.size) + bent + (_BIAS_ERROR if shape.features.alibi else 0.0)


def _at(tensor: Tensor, sample: RowSample) -> Tensor:
    """Return the sampled rows of an output, or of a gradient of the queries."""
    return tensor[sample.entry, sample.head, sample.places].to(sample.device)


def forward_differences(
    shape: AttentionShape, found: Sequence[RowSample], softcap: float, out: Tensor, lse: Tensor | None
) -> Iterator[OutputDifference]:
    """Yield the differences of the output and, unless it is None, of the log-sum-exp."""
    unit, least = _unit_and_least(shape, out.dtype)
    for sample in found:
        weights = sample.dropped_weights
        error = _ROUNDINGS * unit + _score_error(shape, softcap, sample, _SCORE_ERROR)
        share = 1.0 if sample.kept is None or not weights.numel() else sample.kept.amax().clamp_min(1.0)
        greatest = torch.nn.functional.pad(sample.weights, (0, 1)).amax(-1, keepdim=True)  # of no keys, 0
        visible = sample.value.sums((sample.weights > 0).double() * share, _magnitude)
        bound = error * sample.value.sums(weights, _magnitude) + least * (1 + greatest * visible) + 1e-30
        yield OutputDifference(_at(out, sample), sample.value.sums(weights), bound)
        if lse is not None:
            yield _difference_of_sums(shape, softcap, sample, lse)


def _difference_of_sums(shape: AttentionShape, softcap: float, sample: RowSample, lse: Tensor) -> OutputDifference:
    """Return the difference of the rows' log-sum-exp."""
    own = _of_head(lse, sample)[sample.places].to(sample.device)
    error = _score_error(shape, softcap, sample, _SCORE_ERROR)[:, 0] + 2.0**-10
    is_short = shape.dtype == FP8 or shape.features.is_short
    bound = error + (2.0**-3 if is_short else 0.0) + sample.lse.abs() * 2.0**-20
    empty = sample.lse.isneginf()
    coded = (sample.lse < -1e37) & (sample.size[:, 0] > _LARGEST_SIZE)
    bound = bound.masked_fill(coded, float("inf"))  # which says how many masked keys count
    # -inf stands for a row without keys, which is compared as a number that no other row has
    found = torch.where(empty & own.isneginf(), 0.0, own.double())
    return OutputDifference(found, sample.lse.masked_fill(empty, 0.0), bound.masked_fill(empty, 1e-30))


def _of_head(lse: Tensor, sample: RowSample) -> Tensor:
    """Return the log-sum-exp of a sample's head, which has no batch entries where sequences are packed."""
    return lse[sample.head] if lse.dim() == 2 else lse[sample.entry, sample.head]


def set_up_backward(found: Sequence[RowSample], out: Tensor, lse: Tensor, dout: Tensor) -> None:
    """Write output, log-sum-exp and a gradient of the output in the sampled rows; all others see no key."""
    lse.fill_(float("-inf"))
    for sample in found:
        place = sample.entry, sample.head, sample.places
        out[place] = sample.value.sums(sample.dropped_weights).to(out)
        _of_head(lse, sample)[sample.places] = sample.lse.to(lse)
        numbers = torch.arange(len(sample.places) * dout.shape[-1], device=sample.device, dtype=torch.float64)
        dout[place] = (1.7 * numbers).sin().view(len(sample.places), -1).to(dout)


def backward_differences(
    shape: AttentionShape, found: Sequence[RowSample], softcap: float, scale: float, tensors: Sequence[Tensor]
) -> Iterator[OutputDifference]:
    """Yield the differences of the gradients; none where 16 bits hold no gradient of a score, or where scores are too
    large. tensors: output, its gradient, dq, dk and dv."""
    out, dout, dq, dk, dv = tensors
    unit, least = _unit_and_least(shape, out.dtype)
    totals: dict[tuple[int, int, int], tuple[OutputDifference, ...]] = {}
    for sample in found:
        own = _at(dout, sample).double()
        slopes, terms = _slopes(sample, _at(out, sample).double(), own)
        sizes = sample.weights * terms
        if not sizes.numel() or sample.size.max() > _LARGEST_SIZE or sizes.max() > torch.finfo(out.dtype).max / 8:
            return
        error = _ROUNDINGS * unit + _score_error(shape, softcap, sample, _GRADIENT_SCORE_ERROR)
        doubt = error * sizes + least * (1 + terms + sample.weights * own.abs().sum(-1, keepdim=True))
        yield OutputDifference(
            _at(dq, sample),
            scale * sample.key.sums(slopes),
            scale * sample.key.sums(doubt, _magnitude) + _STEPS * least,
        )
        count = slopes.shape[1]
        keys = torch.linspace(0, count - 1, min(KEYS, count), device=sample.device).long().unique()
        of_keys = sample.entry, sample.kv_head, keys + sample.keys.start
        found_dk, found_dv = (tensor[of_keys].to(sample.device) for tensor in (dk, dv))
        weights = sample.dropped_weights
        summands = (
            OutputDifference(
                found_dk, scale * slopes[:, keys].T @ sample.query, scale * doubt[:, keys].T @ sample.query.abs()
            ),
            OutputDifference(found_dv, weights[:, keys].T @ own, (error * weights + least)[:, keys].T @ own.abs()),
        )
        head = sample.entry, sample.kv_head, sample.keys.start
        earlier = totals.get(head)
        totals[head] = summands if earlier is None else tuple(map(_join_differences, earlier, summands))
    for pair in totals.values():
        yield from (OutputDifference(one.found, one.expected, one.bound + _STEPS * least) for one in pair)


def _join_differences(first: OutputDifference, second: OutputDifference) -> OutputDifference:
    """Return the difference of gradients of the same keys, to which two query heads contribute."""
    return OutputDifference(first.found, first.expected + second.expected, first.bound + second.bound)


def _slopes(sample: RowSample, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the scores [rows, keys], and what each probability is multiplied with at most."""
    kept = 1.0 if sample.kept is None else sample.kept
    delta = (out * dout).sum(-1, keepdim=True)
    slopes = sample.weights * (kept * sample.value.products(dout) - delta) * sample.derivative
    terms = kept * sample.value.products(dout.abs(), _magnitude) + (out * dout).abs().sum(-1, keepdim=True)
    return slopes, terms
