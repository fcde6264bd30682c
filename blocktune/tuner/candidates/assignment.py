"""The assignment that a strategy is made for."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from blocktune.db.records.records import ConfigT
from blocktune.tuner.candidates.space import ConfigSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment(Generic[ConfigT]):
    """The assignment that a strategy is made for.

    space: what may be proposed. first: proposed before all else, in this order; infeasible ones are left out.
    usefulness: the model before anything is compiled, the smallest first. trials: how many configs will be tried at
    most. seed: of what is random.
    """

    space: ConfigSpace[ConfigT]
    first: Sequence[ConfigT]
    usefulness: Callable[[ConfigT], float] = field(repr=False)
    trials: int
    seed: int = 0

    @property
    def feasible_first(self) -> list[ConfigT]:
        """Those of `first` that are feasible."""
        feasible = set(self.space.feasible)
        return [config for config in dict.fromkeys(self.first) if config in feasible]

    @property
    def by_usefulness(self) -> list[ConfigT]:
        """Every config: `first`, then by the model."""
        return list(dict.fromkeys((*self.feasible_first, *sorted(self.space.feasible, key=self.usefulness))))

    @property
    def random_order(self) -> list[ConfigT]:
        """Every config: `first`, then at random."""
        rest = list(self.space.feasible)
        random.Random(self.seed).shuffle(rest)
        return list(dict.fromkeys((*self.feasible_first, *rest)))
