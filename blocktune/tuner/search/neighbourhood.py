"""Configs beyond a list: what `expand` tries around the best one, once the list is measured."""

from collections import deque
from collections.abc import Iterator, Mapping

from blocktune.db.records.records import AnyTrial
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.measure.protocol import TIE_BAND
from blocktune.tuner.search.proposals import Proposals
from blocktune.tuner.subject.launch import LaunchSubject
from blocktune.tuner.subject.neighbours import further_neighbours, neighbours, with_capped_registers


class Neighbourhood:
    """Proposes what others propose, then steps around the best config until none is clearly faster; see `Proposals`.

    A step changes one parameter, or two that make up for each other where no single one is faster. The steps from one
    config are all measured before those from the next one.

    Args:
        listed: proposes the configs of the list.
        subject: what is tuned.
        most: how many configs beyond the list are proposed.
    """

    def __init__(self, listed: Proposals[LaunchConfig], subject: LaunchSubject, most: int) -> None:
        self._listed, self._subject, self._left = listed, subject, most
        self.size = listed.size + most
        self._waiting: deque[LaunchConfig] = deque()
        self._beyond: set[LaunchConfig] = set()
        self._seen: set[LaunchConfig] = set()
        self._unmeasured = 0
        self._best: LaunchConfig | None = None
        self._best_score = float("inf")
        self._best_trial: AnyTrial | None = None

    def recall(self, config: LaunchConfig, score: float | None, trial: AnyTrial | None = None) -> None:
        self._learn(config, score, trial)
        if config in self._subject.contenders.space.feasible:
            self._listed.recall(config, score, trial)

    def propose(self) -> LaunchConfig | None:
        config = self._listed.propose()
        if config is None and not self._waiting and not self._unmeasured:
            self._waiting.extend(self._around())
        if config is None and self._waiting:
            config = self._waiting.popleft()
            self._beyond.add(config)
        if config is not None:
            self._seen.add(config)
            self._unmeasured += 1
        return config

    def pick(self, ready: Mapping[LaunchConfig, float | None]) -> LaunchConfig:
        listed = {config: predicted_us for config, predicted_us in ready.items() if config not in self._beyond}
        return self._listed.pick(listed) if listed else next(iter(ready))

    def tell(self, config: LaunchConfig, score: float | None, trial: AnyTrial | None = None) -> None:
        self._unmeasured -= 1
        self._learn(config, score, trial)
        if config not in self._beyond:
            self._listed.tell(config, score, trial)

    def close(self) -> None:
        self._listed.close()

    def _learn(self, config: LaunchConfig, score: float | None, trial: AnyTrial | None) -> None:
        self._seen.add(config)
        if score is not None and score * (1 + TIE_BAND) < self._best_score:
            self._best, self._best_score, self._best_trial = config, score, trial

    def _around(self) -> list[LaunchConfig]:
        """Return the next steps from the best config; none where there are no more, or it is as fast as can be."""
        best, trial = self._best, self._best_trial
        if best is None or self._subject.is_at_the_limit(best, None if trial is None else trial.time_us):
            return []
        near = [config for config in self._near(best) if config not in self._seen]
        further = further_neighbours(best, self._subject.contenders.space.feasible)
        steps = (near or [config for config in further if config not in self._seen])[: self._left]
        self._left -= len(steps)
        return steps

    def _near(self, best: LaunchConfig) -> Iterator[LaunchConfig]:
        resources: KernelResources | None = None if self._best_trial is None else self._best_trial.resources
        yield from neighbours(best, self._subject.contenders.space.feasible)
        if resources is not None:
            yield from with_capped_registers(best, resources, self._subject.device.limits)
