"""The choices of a kernel in this process: the config of each kind of call, and how often it was launched."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from blocktune.runtime.autotuned.call import LaunchSize
from blocktune.runtime.autotuned.config import LaunchProblem
from blocktune.runtime.autotuned.fallback import KernelExplanation
from blocktune.runtime.autotuned.launches import Kind, Launches
from blocktune.runtime.autotuned.stock_tuner import StockKey, Timings
from blocktune.runtime.selection.ladder import Rung

if TYPE_CHECKING:
    import triton
    from triton.runtime.autotuner import Autotuner

MAX_CHOICES = 4096
"""Kinds of calls that a kernel keeps. Lengths that change with every step must not pile up."""

MAX_KINDS = 4 * MAX_CHOICES
"""Kinds of calls whose launches a kernel counts."""

_WRITTEN = "_blocktune_written"
"""The attribute of a tuner with what was written here into its own cache; a library wrote the rest."""


class CallPlace(NamedTuple):
    """A kind of call: the device of its tensors, its problem, and the size of the launch that was decided."""

    device: int | None
    problem: LaunchProblem
    size: LaunchSize | None

    def covers(self, other: "CallPlace") -> bool:
        """Return whether a choice for this kind of call serves another one."""
        if (self.device, self.problem) != (other.device, other.problem):
            return False
        return self.size is None or other.size is None or self.size.is_near(other.size)


class BoundLaunch:
    """The config of a kind of call, the reason for it, and the number of launches.

    stock_key: of Triton's tuner. timings: of the configs, as Triton's tuner has them.
    """

    __slots__ = ("calls", "config", "explanation", "hook", "options", "stock_key", "timings")

    def __init__(self, explanation: KernelExplanation, key: StockKey, timings: Timings | None = None) -> None:
        config = explanation.launched
        assert config is not None
        self.explanation, self.calls = explanation, 0
        self.stock_key, self.timings = key, timings or {}
        self.config, self.hook = config, config.pre_hook  # for each launch, as the following
        self.options: Mapping[str, object] = config.all_kwargs()

    @property
    def launches(self) -> Launches:
        """What was launched, of which the first may have had to wait for a choice."""
        why = self.explanation
        misses = int(why.tuned or why.rung is Rung.DEFAULT)
        return Launches(max(0, self.calls - misses), misses, why.seconds if why.tuned else 0.0)

    @property
    def saved_us(self) -> float:
        """GPU time that the launches took less than the list's first config would, where both were timed."""
        why = self.explanation
        if why.time_us is None or why.default_time_us is None:
            return 0.0
        return self.calls * (why.default_time_us - why.time_us)


class ChoiceTable:
    """The choices for the kinds of calls of one kernel. It is bounded, and follows the tuner's own cache: programs look
    for winners there, and take some out to have them chosen again.

    served: by kind of call. fast: by the quick key of a call. cached: the entries of the tuner's cache; where there are
    fewer, a program has taken some out.

    Args:
        kernel: the kernel's name.
        tuner: Triton's object.
    """

    def __init__(self, kernel: str, tuner: "Autotuner") -> None:
        self._kernel, self._tuner = kernel, tuner
        self.served: dict[CallPlace, BoundLaunch] = {}
        self.fast: dict[tuple[object, ...], BoundLaunch] = {}
        self._calls_before = 0
        self._launches_before: dict[Kind, Launches] = {}
        self._written: dict[StockKey, triton.Config] = tuner.__dict__.setdefault(_WRITTEN, {})
        self.cached = len(tuner.cache)

    @property
    def calls(self) -> int:
        """How many launches this process has made."""
        return self._calls_before + sum(served.calls for served in self.served.values())

    @property
    def launches(self) -> dict[Kind, Launches]:
        """The launches of each kind of call that there were several configs for."""
        counted = dict(self._launches_before)
        for place, served in self.served.items():
            self._count(counted, place, served)
        return counted

    def preset(self, key: StockKey) -> "triton.Config | None":
        """Return what a library has put into the tuner's cache for a call."""
        found = self._tuner.cache.get(key)
        return None if found is self._written.get(key) else found

    def write(self, key: StockKey, config: "triton.Config") -> None:
        """Put a choice where programs look for it."""
        self._tuner.cache[key] = self._written[key] = config

    def find(self, place: CallPlace) -> BoundLaunch | None:
        """Return what serves a kind of call, or another one of nearly its size."""
        exact = self.served.get(place)
        return exact or next((served for kept, served in self.served.items() if kept.covers(place)), None)

    def remember(self, quick: tuple[object, ...], served: BoundLaunch) -> None:
        """Let a choice be found by the quick key of a call."""
        if len(self.fast) >= MAX_CHOICES:
            self.fast = {}
        self.fast[quick] = served
        self.cached = len(self._tuner.cache)

    def keep(self, place: CallPlace, served: BoundLaunch) -> None:
        """Keep what serves a kind of call. Where there are too many, the older half is forgotten."""
        if len(self.served) >= MAX_CHOICES and place not in self.served:
            self.drop(list(self.served)[: MAX_CHOICES // 2])
        self.served[place] = served

    def drop(self, places: Iterable[CallPlace]) -> None:
        """Forget what serves some kinds of calls, and keep the counts of their launches."""
        for place in places:
            served = self.served.pop(place)
            self._calls_before += served.calls
            self._count(self._launches_before, place, served)
            written = self._written.pop(served.stock_key, None)
            if written is not None and self._tuner.cache.get(served.stock_key) is written:
                del self._tuner.cache[served.stock_key]
        self.fast = {}
        self.cached = len(self._tuner.cache)

    def _count(self, counted: dict[Kind, Launches], place: CallPlace, served: BoundLaunch) -> None:
        """Add the launches of a kind of call to counts, of which the oldest make room."""
        if served.explanation.device is not None:
            kind = Kind(served.explanation.device, self._kernel, place.problem)
            while len(counted) >= MAX_KINDS and kind not in counted:
                del counted[next(iter(counted))]
            counted[kind] = counted.get(kind, Launches()) + served.launches
