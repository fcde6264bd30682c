"""Which config to try next: what a search asks of a strategy, and the simplest answer, every config in turn."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Generic, Protocol

from blocktune.db.records.records import AnyTrial, ConfigT


class Proposals(Protocol[ConfigT]):
    """Proposes configs and learns from their scores."""

    @property
    def size(self) -> int:
        """How many configs there are to propose and recall, together."""

    def recall(self, config: ConfigT, score: float | None, trial: AnyTrial | None = None) -> None:
        """Remember that an earlier run tried this config, with this score; do not propose it again. trial: all that is
        known."""

    def propose(self) -> ConfigT | None:
        """Return a config that was not proposed before, to be compiled, or None when no config is left."""

    def pick(self, ready: Mapping[ConfigT, float | None]) -> ConfigT:
        """Return which of the proposed configs is measured next, among those that are compiled: by config, in the order
        in which they were proposed, the time that the model predicts from the compiled code, if it can."""

    def tell(self, config: ConfigT, score: float | None, trial: AnyTrial | None = None) -> None:
        """Take how a proposed config did: lower is better, None means that it cannot run. trial: all that is known."""

    def close(self) -> None:
        """End the search; what was proposed without a result gets none."""


class Enumeration(Generic[ConfigT]):
    """Every config once, in a given order."""

    def __init__(self, order: Iterable[ConfigT]):
        self._order = deque(order)
        self.size = len(self._order)

    def recall(self, config: ConfigT, score: float | None, trial: AnyTrial | None = None) -> None:
        if config in self._order:
            self._order.remove(config)

    def propose(self) -> ConfigT | None:
        return self._order.popleft() if self._order else None

    def pick(self, ready: Mapping[ConfigT, float | None]) -> ConfigT:
        return next(iter(ready))

    def tell(self, config: ConfigT, score: float | None, trial: AnyTrial | None = None) -> None:
        """Do nothing: the order is fixed."""

    def close(self) -> None:
        """Do nothing: there is nothing to keep."""


def by_prediction(ready: Mapping[ConfigT, float | None]) -> ConfigT:
    """Return the config with the shortest predicted time, the first of equals."""
    return min(ready, key=lambda config: ready[config] or 0.0)
