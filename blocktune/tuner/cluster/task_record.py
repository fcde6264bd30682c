"""The driver's record of one job on a cluster: where it runs, what was lost, and which configs are to blame."""

import dataclasses
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from blocktune.kernels.values.config import KernelConfig
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.fleet.job import Job
from blocktune.tuner.fleet.streamed_store import Packed

BLAME = 2
"""At this blame a config is lethal. A worker process that dies while it measures a config was killed by it. A node that
goes may have been taken for another reason, so it takes two."""


@dataclass
class TaskRecord:
    """A job and its attempts.

    number: of the job in the run. ref: Ray's, of the task. attempt: the running one; empty while it waits. refused: the
    nodes that may not make it. heard: when the attempt last said something, by the monotonic clock.
    """

    job: Job
    number: int
    ref: Any = None
    attempt: str = ""
    node: str = ""
    worker: str = ""
    heard: float = 0.0
    measuring: KernelConfig | LaunchConfig | None = None
    losses: int = 0
    reason: str = ""
    refused: set[str] = field(default_factory=set)
    blame: Counter[KernelConfig | LaunchConfig] = field(default_factory=Counter)

    def begin(self, attempt: str, node: str, worker: str) -> None:
        """Note that an attempt runs."""
        self.attempt, self.node, self.worker = attempt, node, worker
        self.heard, self.measuring = time.monotonic(), None

    def lose(self, reason: str, *, is_to_blame: bool) -> None:
        """Note that the attempt is gone. is_to_blame: whether the worker alone went, not its node."""
        self.losses += 1
        self.reason = reason
        if self.measuring is not None:
            self.blame[self.measuring] += BLAME if is_to_blame else 1
        self.attempt, self.measuring = "", None

    def refuse(self) -> None:
        """Note that the node where it was last may not make it."""
        self.refused.add(self.node)
        self.attempt = ""

    @property
    def lethal(self) -> tuple[KernelConfig | LaunchConfig, ...]:
        """The configs that kill workers."""
        return tuple(config for config, blame in self.blame.items() if blame >= BLAME)

    def as_of_now(self, known: tuple[Packed, ...] | None, excluded: tuple[str, ...], seconds: float | None) -> Job:
        """Return the job with what the next attempt needs. seconds: its part of the run's time; None leaves its own."""
        budget = self.job.budget
        if seconds is not None:
            budget = dataclasses.replace(budget, seconds=seconds)
        return dataclasses.replace(self.job, known=known, lethal=self.lethal, excluded=excluded, budget=budget)
