"""The first use of a config that was not measured for exactly this shape and software, checked on the caller's tensors.

A config that is borrowed, predicted or a default was never seen to compute this shape right here. So its first results
are compared with the definition of attention in float64, in some rows of the first and the last head: the output and
the log-sum-exp of a forward, the gradients of a backward. A config that differs is not used again, is logged, and is
stored as a finding that `tune verify` shows. A measured config was checked when it was measured, and later calls pay
nothing.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from blocktune.kernels.base.precision import allows_tf32
from blocktune.kernels.files.findings import CanaryFinding, store_finding
from blocktune.kernels.files.variables import CANARY
from blocktune.kernels.hardware.side_thread import run_on_side_thread
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.runtime.selection.differences import backward_differences, forward_differences, set_up_backward
from blocktune.runtime.selection.row_sample import RowSample, samples

logger = logging.getLogger("blocktune")

counts: Counter[str] = Counter()
"""How many first uses were compared (`compared`), and how many configs were found wrong (`wrong`)."""

Found = TypeVar("Found")
Rows = Sequence[RowSample]


def sampled(shape: AttentionShape, extras: Extras, scale: float, tensors: Sequence[Any]) -> Rows | None:
    """Return the rows of a first use that are compared, and set up a backward's tensors for them; None if it is not
    checked, or cannot be.

    Args:
        shape: of one direction.
        extras: the call's.
        scale: of the scores.
        tensors: of a launch: query, key, value, output and log-sum-exp, and of a backward the gradients of the output
            and the inputs.
    """
    query, key, value, out, lse, *gradients = tensors
    if not CANARY.is_on():
        return None
    is_backward = shape.direction is Direction.BACKWARD
    if query.dtype is torch.float32 and allows_tf32() and not is_backward:
        return None  # what TF32 rounds away has no bound without the scores of all rows
    if is_backward and query.dtype is torch.float32:
        extras = replace(extras, sinks=None)  # such a backward computes the statistics of its rows without them

    def sample() -> Rows:
        found = samples(shape, extras, query, key, value, scale)
        if is_backward:
            set_up_backward(found, out, lse, gradients[0])
        return found

    return _beside(query, sample)


def problem_of(
    config: KernelConfig,
    shape: AttentionShape,
    extras: Extras,
    scale: float,
    tensors: Sequence[Any],
    rows: Rows | None,
) -> str | None:
    """Return how a config's results differ from attention; None if they do not, or cannot be compared.

    Args:
        config: it was not measured for exactly this shape here.
        shape, extras, scale, tensors: as `sampled` takes them, after the launch.
        rows: what `sampled` has returned.
    """
    if rows is None:
        return None
    worst = _beside(tensors[0], lambda: _worst(shape, extras, scale, tensors, rows))
    if worst is None:
        return None
    counts["compared"] += 1
    if worst <= 1.0:
        return None
    counts["wrong"] += 1
    reason = f"{config.label} differs from attention by {worst:.3g} times the bound of its rounding"
    logger.warning("%s: %s. It is not used any more; `tune verify` shows it.", shape.label, reason)
    store_finding(CanaryFinding(shape=shape, config=config, times_the_bound=worst))
    return reason


def _worst(shape: AttentionShape, extras: Extras, scale: float, tensors: Sequence[Any], rows: Rows) -> float | None:
    """Return the greatest difference as a multiple of its bound; None where a number among the inputs that is not
    finite explains it."""
    query, key, value, out, lse, *gradients = tensors
    if shape.direction is Direction.BACKWARD:
        found, read = backward_differences(shape, rows, extras.softcap, scale, (out, *gradients)), [query, key, value]
    else:
        found = forward_differences(shape, rows, extras.softcap, out, lse)
        read = [part for row in rows for part in (row.query, row.key.stored, row.value.stored)]
    worst = max((difference.worst for difference in found), default=0.0)
    if worst > 1.0 and not (all(map(_is_finite, read)) and _is_finite(extras.mask, hides=True)):
        return None
    return worst


def _is_finite(tensor: Tensor | None, *, hides: bool = False) -> bool:
    """Return whether all numbers of a tensor are finite, but for the -inf of a mask, which `hides`; makes no copy."""
    if tensor is None or tensor.element_size() == 1 or not tensor.numel():
        return True
    least, greatest = tensor.aminmax()
    return bool(greatest.isfinite() & (least.isfinite() | (hides and not least.isnan())))


def _beside(query: Tensor, task: Callable[[], Found]) -> Found | None:
    """Return the result of a task that waits for the device, and allocates from no pool of a graph or of the user; None
    without the memory for it."""

    def run() -> Found:
        with torch.no_grad():
            return task()

    try:
        if not query.is_cuda:
            return run()
        torch.cuda.current_stream(query.device).synchronize()
        return run_on_side_thread(run, query.device)
    except torch.OutOfMemoryError:
        return None  # not the config's fault; the call itself may fit
    except RuntimeError as error:  # cuBLAS may lack its workspace, and a process its threads: nothing was compared
        logger.warning("A first use could not be compared: %s: %.300s", type(error).__name__, error)
        return None
