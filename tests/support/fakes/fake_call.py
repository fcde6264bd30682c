"""A call of an autotuned kernel whose launches are a Python function, and a clock that knows what they take."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from blocktune.kernels.base.kernel import Thunk
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LaunchConfig, LaunchProblem
from blocktune.runtime.autotuned.settings import Settings
from blocktune.tuner.launches.launches import ConfigLaunch
from blocktune.tuner.measure.clock import HookedLaunch
from blocktune.tuner.measure.protocol import Rounds, rotated_order

FIRST, OTHER, THIRD = (LaunchConfig("m:f", (("BLOCK", block),)) for block in (1, 2, 3))


def fake_call(effect: Callable[..., None], **arguments: Tensor) -> AutotunedCall:
    """Return a call that lists `FIRST` and `OTHER`, and whose launch does this to its arguments, by the block."""

    def no_hook(named: Any, **_: Any) -> None:
        """Do nothing."""

    def run(*args: Any, BLOCK: int, **_: Any) -> None:
        effect(*args, BLOCK=BLOCK)

    def config(block: int) -> Any:
        return SimpleNamespace(pre_hook=None, all_kwargs=lambda: {"BLOCK": block}, kwargs={"BLOCK": block})

    tuner: Any = SimpleNamespace(
        fn=SimpleNamespace(run=run),
        pre_hook=no_hook,
        post_hook=no_hook,
        arg_names=list(arguments),
        user_defined_pre_hook=True,
        num_warmups=None,
        num_reps=None,
        use_cuda_graph=False,
        _do_bench=None,
    )
    function: Any = None
    return AutotunedCall(
        tuner=tuner,
        function=function,
        name="m:f",
        source_hash="0",
        problem=LaunchProblem(()),
        configs={FIRST: config(1), OTHER: config(2)},
        args=tuple(arguments.values()),
        kwargs={},
        settings=Settings(),
    )


class KnownLaunchClock:
    """Runs launches with their hooks, and says that they took what is known of their configs, in microseconds."""

    def __init__(self, times_us: Mapping[LaunchConfig, float]) -> None:
        self._times_us = times_us

    def heat(self, launch: Thunk, seconds: float) -> None:
        """It is warm."""

    def rounds(self, launches: Sequence[Thunk], count: int) -> Rounds:
        return tuple(self._round(launches, rotated_order(len(launches), number)) for number in range(count))

    def loaded_rounds(self, launches: Sequence[Thunk], seconds: float) -> Rounds:
        return self.rounds(launches, 1)

    def synchronize(self) -> None:
        """Nothing is on its way."""

    def _round(self, launches: Sequence[Thunk], order: Sequence[int]) -> tuple[float, ...]:
        for index in order:
            launch = launches[index]
            assert isinstance(launch, HookedLaunch)
            launch.before()
            launch()
            launch.after()
        return tuple(self._times_us[launch.config] for launch in launches if isinstance(launch, ConfigLaunch))
