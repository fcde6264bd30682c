"""The first use of a config that was not measured for exactly this shape and software, checked on the caller's tensors.

A config that is borrowed, predicted or a default was never seen to compute this shape right here. So its first output
is compared with the definition of attention in float64, in some rows of the first and the last head. A config that
differs is not used again, is logged, and is stored as a finding that `tune verify` shows. A measured config was checked
when it was measured, and later calls pay nothing.
"""

import logging
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from blocktune.kernels.base.precision import allows_tf32
from blocktune.kernels.files.variables import CANARY
from blocktune.kernels.selection.findings import Finding, store_finding
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal

logger = logging.getLogger("blocktune")

ROWS = 64
"""Queries of a head that are compared, spread over its length."""

_ROUNDINGS = 8
"""Of probabilities and outputs in the tensors' type, twice what the kernels do."""

_SCORE_ERROR = 2.0**-20
"""Of a score in float32, relative to the greatest of its row: as an exponent it is the error of a probability."""

counts: Counter[str] = Counter()
"""How many first uses were compared (`compared`), and how many configs were found wrong (`wrong`)."""


def problem_of(
    config: KernelConfig, shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor, out: Tensor, scale: float
) -> str | None:
    """Return how a config's output differs from attention; None if it does not, or cannot be compared.

    Args:
        config: it was not measured for exactly this shape here.
        shape: the call's, a forward without features.
        query, key, value: the caller's tensors.
        out: the config's output.
        scale: of the scores.
    """
    if not CANARY.is_on():
        return None
    if query.dtype is torch.float32 and allows_tf32():
        return None  # what TF32 rounds away has no bound without the scores of all rows
    try:
        worst = max(_differences(shape, query, key, value, out, scale))
    except torch.OutOfMemoryError:
        return None  # not the config's fault; the call itself may fit
    counts["compared"] += 1
    if worst <= 1.0:
        return None
    counts["wrong"] += 1
    reason = f"{config.label} differs from attention by {worst:.3g} times the bound of its rounding"
    logger.warning("%s: %s. It is not used any more; `tune verify` shows it.", shape.label, reason)
    store_finding(Finding(shape=shape, config=config, times_the_bound=worst))
    return reason


def _differences(
    shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor, out: Tensor, scale: float
) -> Iterator[float]:
    """Yield the greatest difference of a head as a multiple of its bound; infinite where a number is missing."""
    kind = torch.finfo(query.dtype)
    unit = kind.eps / 2 if query.dtype is not torch.float32 else 2.0**-18
    least = kind.smallest_normal * kind.eps
    rows = torch.linspace(0, shape.seqlen_q - 1, min(ROWS, shape.seqlen_q), device=query.device).long().unique()
    for batch, head in {(0, 0), (shape.batch - 1, shape.num_heads - 1)}:
        kv = head // shape.group_size
        scaled = query[batch, head, rows].double() * scale
        expected, bound = _attention(scaled, key[batch, kv], value[batch, kv], rows, shape, unit, least)
        difference = (out[batch, head, rows].double() - expected).abs() / bound
        comparable = expected.isfinite() & bound.isfinite()
        yield float(torch.where(comparable, difference, 0.0).nan_to_num(nan=float("inf")).max())


def _attention(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, shape: AttentionShape, unit: float, least: float
) -> tuple[Tensor, Tensor]:
    """Return rows of attention in float64, and by how much each number may differ from them.

    Args:
        query, key, value: of one head; the queries are those of rows, in float64 and with the scale.
        rows: their numbers.
        shape: of the call.
        unit: the relative rounding error of the type.
        least: its smallest number above 0, in steps of which a probability is rounded that is far below the greatest
            one of its row. In float16 a key of no value that takes nearly all probability makes that count.
    """
    key, value = key.double(), value.double()
    scores = query @ key.T
    if shape.causal is not Causal.NONE:
        hidden = torch.arange(shape.seqlen_k, device=rows.device) > rows[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    probabilities = scores.softmax(-1)
    greatest = scores.masked_fill(scores == float("-inf"), 0.0).abs().amax(-1, keepdim=True)
    weight = probabilities @ value.abs()
    visible = scores.isfinite().double() @ value.abs()
    steps = least * (1 + probabilities.amax(-1, keepdim=True) * visible)
    return probabilities @ value, (_ROUNDINGS * unit + _SCORE_ERROR * (1 + greatest)) * weight + steps + 1e-30
