"""A worker as `blocktune.tuner.tuned.worker`, with the clock on the wall in place of a GPU's."""

from collections.abc import Sequence

from blocktune.kernels.base.kernel import Thunk
from blocktune.tuner.measure.protocol import Rounds
from blocktune.tuner.tuned.worker import serve_calls
from tests.support.programs.fake_worker import WallClock


class LongClock(WallClock):
    """Takes enough rounds for a verdict."""

    def rounds(self, launches: Sequence[Thunk], count: int) -> Rounds:
        return tuple(self._round(launches, number) for number in range(min(count, 9)))


if __name__ == "__main__":
    serve_calls(LongClock)
