"""`--time-budget` of a whole run: how much of it a job gets that begins now."""

import time
from collections.abc import Callable

FINALS_SECONDS = 10.0
"""What a job takes besides its search: the start of the GPU worker and the finals."""


class TimeShares:
    """Shares the time of a run among its jobs; None is no bound."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = None if seconds is None else clock() + seconds

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self._ends_at is not None and self._clock() >= self._ends_at

    def next(self, gpus: int, waiting: int) -> float | None:
        """Return the seconds of search of a job that begins now; None where there is no bound.

        Args:
            gpus: how many can make the jobs.
            waiting: jobs that have not begun, this one included.
        """
        if self._ends_at is None:
            return None
        left = max(0.0, self._ends_at - self._clock())
        share = left * min(1.0, max(1, gpus) / waiting)
        return max(0.1, share / 2, share - FINALS_SECONDS)
