"""What a strategy is made for: `Assignment`."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.candidates.space import SearchSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a strategy is made for.

    space: what may be proposed. first: proposed before all else, in this order; infeasible ones are left out.
    usefulness: the model before anything is compiled, the smallest first. trials: how many configs will be tried at
    most. seed: of what is random.
    """

    space: SearchSpace
    first: Sequence[KernelConfig]
    usefulness: Callable[[KernelConfig], float] = field(repr=False)
    trials: int
    seed: int = 0

    @property
    def named(self) -> list[KernelConfig]:
        """Those of `first` that are feasible."""
        feasible = set(self.space.feasible)
        return [config for config in dict.fromkeys(self.first) if config in feasible]

    @property
    def by_usefulness(self) -> list[KernelConfig]:
        """Every config: `first`, then by the model."""
        return list(dict.fromkeys((*self.named, *sorted(self.space.feasible, key=self.usefulness))))

    @property
    def shuffled(self) -> list[KernelConfig]:
        """Every config: `first`, then at random."""
        rest = list(self.space.feasible)
        random.Random(self.seed).shuffle(rest)
        return list(dict.fromkeys((*self.named, *rest)))
