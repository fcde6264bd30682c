"""The configs of a space that have a name: what is tried first, and what the winner is compared with."""

from dataclasses import dataclass
from typing import Generic

from blocktune.db.records.records import ConfigT
from blocktune.tuner.candidates.space import ConfigSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders(Generic[ConfigT]):
    """The space, with the named configs in it.

    expected: first what calls get while the problem is not tuned, even a shipped winner of a kernel that is not
    searched. It takes part to the end, so that tuning never makes a call slower. Then what is expected to be next.
    default: of the first kernel, or the first of a list. paper: FA's heuristic in the first kernel that can express
    it; None where none can. neighbours: winners of near problems.
    """

    space: ConfigSpace[ConfigT]
    expected: tuple[ConfigT, ...]
    default: ConfigT
    paper: ConfigT | None = None
    neighbours: tuple[ConfigT, ...] = ()

    @property
    def first(self) -> tuple[ConfigT, ...]:
        """What is tried first, in this order. What calls get leads, because it is the anchor."""
        paper = () if self.paper is None else (self.paper,)
        return tuple(dict.fromkeys((self.untuned, self.default, *paper, *self.neighbours, *self.expected)))

    @property
    def untuned(self) -> ConfigT:
        """What calls get while the problem is not tuned."""
        return self.expected[0]
