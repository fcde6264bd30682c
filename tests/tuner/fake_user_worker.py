"""A worker as `blocktune.tuner.user_worker`, with the clock on the wall in place of a GPU's."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake_worker import WallClock

from blocktune.tuner.bench import Rounds, Thunk
from blocktune.tuner.user_worker import serve_calls


class LongClock(WallClock):
    """Takes enough rounds for a verdict."""

    def rounds(self, launches: Sequence[Thunk], count: int) -> Rounds:
        return tuple(self._round(launches, number) for number in range(min(count, 9)))


if __name__ == "__main__":
    serve_calls(LongClock)
