"""Whether the kernels compute attention on the GPU that is here: each with small shapes of every edge and feature."""

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, Protocol

from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.registry import competing
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.contribute.compiled_table import Job
from blocktune.tuner.correctness.small_shapes import small_shapes
from blocktune.tuner.measure.measurement import Measurement

CASE_SECONDS = 5.0
"""Taken for the first case, before any has shown how long one takes."""


class Checker(Protocol):
    """Checks configs next to the reference, in a process that may be lost. `GpuRunner` is one."""

    def turn_to(self, shape: AttentionShape) -> None:
        """Turn to another shape."""

    def confirm(self, config: KernelConfig) -> Measurement:
        """Check all that the config computes, log-sum-exp included."""


def conformance_cases(limits: ComputeLimits, dtype: str) -> list[Job]:
    """Return the default configs of all kernels for their small shapes, the kernels in turns, so that checks that end
    early have met each kernel."""
    columns = [
        [(shape, kernel.default_config(shape, limits)) for shape in small_shapes(kernel, limits, dtype)]
        for kernel in competing()
    ]
    return [case for row in zip_longest(*columns) for case in row if case is not None]


def check_cases(
    cases: list[Job], checker: Checker, *, until: float, now: Callable[[], float]
) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each case, as long as one more is likely to end in time.

    Args:
        cases: what is checked.
        checker: checks it.
        until: when the last one has to end, by `now`.
        now: the time in seconds.
    """
    longest = CASE_SECONDS
    for shape, config in cases:
        begun = now()
        if begun + longest > until:
            return
        checker.turn_to(shape)
        found = checker.confirm(config)
        longest = max(longest, now() - begun)
        row = {"kernel": config.kernel, "config": config.to_json(), "shape": shape.label, "outcome": str(found.outcome)}
        yield row if found.outcome is Outcome.OK else row | {"error": found.error}
