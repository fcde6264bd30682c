"""The launcher of an autotuned kernel: it finds the choice of a call, or has it made."""

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.boundary import tolerance, warn_of_failure
from blocktune.runtime.autotuned.call import (
    AutotunedCall,
    by_stored_form,
    jitted_function,
    pruned_configs,
    require_no_conflict,
    require_storable,
)
from blocktune.runtime.autotuned.call_key import CallKey, Parameter, require_names, unstored_problem
from blocktune.runtime.autotuned.config import LaunchProblem
from blocktune.runtime.autotuned.fallback import KernelExplanation
from blocktune.runtime.autotuned.launches import Kind, Launches
from blocktune.runtime.autotuned.settings import Settings
from blocktune.runtime.autotuned.stock_tuner import StockKey, Timings, stock_choice, stock_key, tell_choice, timings_of
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.ladder import Rung

if TYPE_CHECKING:
    import triton
    from triton.runtime.autotuner import Autotuner

Decide = Callable[[AutotunedCall], KernelExplanation]
Place = tuple[torch.device | None, LaunchProblem]
"""The device of a call's tensors, and its problem."""

MAX_CHOICES = 4096
"""Kinds of calls that a kernel keeps. Lengths that change with every step must not pile up."""

MAX_KINDS = 4 * MAX_CHOICES
"""Kinds of calls whose launches a kernel counts."""

_WRITTEN = "_blocktune_written"
"""The attribute of a tuner with what was written here into its own cache; a library wrote the rest."""

kernels: "weakref.WeakSet[TunedKernel]" = weakref.WeakSet()
"""Those that this process has launched."""


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


def forget_choices() -> None:
    """Let every kernel of this process ask again what serves its calls."""
    for kernel in list(kernels):
        kernel.forget()


class TunedKernel:
    """The choices of one autotuned kernel. Threads may share it.

    Args:
        tuner: Triton's object, whose configs, hooks and pruning are used as they are.
        settings: how it is tuned.
        decide: makes the choice of a call that none is known for.

    Raises:
        UsageError: the kernel is no jitted function, or a name in the settings is not one of its arguments.
    """

    def __init__(self, tuner: "Autotuner", settings: Settings, decide: Decide) -> None:
        self.tuner, self.settings = tuner, settings
        self.function = jitted_function(tuner.fn)
        self.name = f"{self.function.fn.__module__}:{self.function.fn.__qualname__}"
        require_names("buckets", settings.buckets, tuner.arg_names, self.name)
        self.misses = 0
        self.seconds = 0.0
        self.served: dict[Place, BoundLaunch] = {}
        self._decide = decide
        self._fast: dict[tuple[object, ...], BoundLaunch] = {}
        self._calls_before = 0
        self._launches_before: dict[Kind, Launches] = {}
        self._written: dict[StockKey, triton.Config] = tuner.__dict__.setdefault(_WRITTEN, {})
        self._lock = threading.RLock()
        self._take_list()
        kernels.add(self)

    def options(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        """Return what a launch with these arguments gets in addition, after the hook of the config that serves it."""
        tuner = self.tuner
        if self._is_steered:
            self._follow_tuner()
        served = self._fast.get(self._quick(args, kwargs)) or self._serve(args, kwargs)
        served.calls += 1
        tuner.best_config = served.config
        if served.hook is not None:
            served.hook({**dict(zip(tuner.arg_names, args, strict=False)), **kwargs, **served.options})
        return served.options

    def explain(self, *args: object, **kwargs: object) -> KernelExplanation:
        """Return what serves a call with these arguments, and why; a new kind of call is decided as at its launch.

        Raises:
            UsageError: the call is new, and has no `grid` to be measured with.
        """
        if self._is_steered:
            self._follow_tuner()
        known = self._fast.get(self._quick(args, kwargs))
        if known is None and "grid" not in kwargs:
            raise UsageError(
                f"This kind of call of {self.name} is new, and cannot be measured without a grid. Add `grid=(...)`, or "
                "launch the kernel before."
            )
        return (known or self._serve(args, {"warmup": False, **kwargs})).explanation

    @property
    def calls(self) -> int:
        """How many launches this process has made."""
        return self._calls_before + sum(served.calls for served in self.served.values())

    @property
    def launches(self) -> dict[Kind, Launches]:
        """The launches of each kind of call that there were several configs for, by this process."""
        counted = dict(self._launches_before)
        for place, served in self.served.items():
            self._count(counted, place, served)
        return counted

    @property
    def choices(self) -> dict[LaunchProblem, KernelExplanation]:
        """What serves each kind of call, and why; on the last device that had it."""
        return {problem: served.explanation for (_, problem), served in self.served.items()}

    def call_of(self, args: Sequence[object], kwargs: Mapping[str, object]) -> AutotunedCall:
        """Return a launch with these arguments, its grid included, and the configs that it may have.

        Raises:
            UsageError: it gives a parameter that is tuned.
        """
        configs = pruned_configs(self.tuner, args, kwargs)
        require_no_conflict(self.name, configs, kwargs)
        return self._call(self._key.problem(args, kwargs), configs, args, kwargs)

    def forget(self) -> None:
        """Drop all choices, so that the next calls ask the store again."""
        with self._lock:
            self._drop(list(self.served))

    @cached_property
    def source_hash(self) -> str:
        """16 hexadecimal digits that change with the device code."""
        return hash_of_sources(self.function)

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton interprets the kernel, which says nothing about its time."""
        return not hasattr(self.function, "params")

    @property
    def _params(self) -> list[Parameter]:
        if self.is_interpreted:
            return [Parameter(name, is_constexpr=False, do_not_specialize=True) for name in self.tuner.arg_names]
        return [Parameter(param.name, param.is_constexpr, param.do_not_specialize) for param in self.function.params]

    @property
    def _is_steered(self) -> bool:
        """Whether a program has replaced the tuner's configs, or taken choices out of its cache."""
        return self.tuner.configs is not self._configs or len(self.tuner.cache) < self._cached

    def _take_list(self) -> None:
        """Choose among the configs that the tuner has now."""
        tuner = self.tuner
        self._configs, self._cached = tuner.configs, len(tuner.cache)
        if isinstance(tuner.configs_top_k, float) and len(tuner.configs) * tuner.configs_top_k < 1:
            tuner.configs_top_k = 1  # as in Triton 3.9: a share that rounds to nothing keeps one config
        has_hooks = any(config.pre_hook is not None for config in tuner.configs)
        self._key = CallKey(self._params, tuner.keys, self.settings.buckets, sets_blocks=has_hooks)
        self._quick = self._key.quick

    def _follow_tuner(self) -> None:
        """Choose anew, as the program that steers the tuner wants it."""
        with self._lock:
            self.forget()
            self._take_list()

    def _serve(self, args: Sequence[object], kwargs: Mapping[str, object]) -> BoundLaunch:
        """Return what serves a call that is new to this process in some way; it is kept."""
        with self._lock:
            quick = self._quick(args, kwargs)
            problem = unstored_problem(quick)
            with tolerance(self.name, "its key"):
                problem = self._key.problem(args, kwargs)
            place = (_device_of(args, kwargs), problem)
            known = self.served.get(place)
            served = known or self._bound(problem, args, kwargs)
            self._keep(quick, place, served)
        if known is None and served.timings:  # after the lock, since a listener may wait for other launches
            with tolerance(self.name, "the listener of Triton's knobs"):
                tell_choice(self.tuner, served.stock_key, problem.label, served.explanation, served.timings)
        return served

    def _bound(self, problem: LaunchProblem, args: Sequence[object], kwargs: Mapping[str, object]) -> BoundLaunch:
        """Return what serves a call, with the choice made now."""
        key, started = stock_key(self.tuner, args, kwargs), time.monotonic()
        preset = self.tuner.cache.get(key)
        if preset is not None and preset is not self._written.get(key):
            return BoundLaunch(_unmeasured(problem, preset, "chosen by a library"), key)
        configs = pruned_configs(self.tuner, args, kwargs)
        require_no_conflict(self.name, configs, kwargs)
        if self.is_interpreted or (len(set(configs)) == 1 and not self.settings.expand):
            which = "only" if len(set(configs)) == 1 else "first"
            return BoundLaunch(_unmeasured(problem, configs[0], f"the {which} config of the list"), key)
        self._require_no_capture(problem)
        self.misses += 1
        found, timings = self._decided(problem, configs, args, kwargs)
        seconds = time.monotonic() - started
        self.seconds += seconds
        self.tuner.cache[key] = self._written[key] = found.launched  # where programs look for it, as for the following
        self.tuner.configs_timings, self.tuner.bench_time = timings, seconds
        return BoundLaunch(found, key, timings)

    def _decided(
        self,
        problem: LaunchProblem,
        configs: "list[triton.Config]",
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> tuple[KernelExplanation, Timings]:
        """Return the choice of a call with the times of its configs. Where the call cannot be described for a store,
        Triton's own tuner measures it."""
        try:
            call = self._call(problem, configs, args, kwargs)
            require_storable(call)
        except Exception as error:  # whatever a source, a value or its text brings
            if self.settings.of_environment().strict:
                raise
            warn_of_failure(self.name, "the store", error)
            return stock_choice(self.tuner, configs, args, kwargs)
        found = self._decide(call)
        return found, timings_of(call, found)

    def _call(
        self,
        problem: LaunchProblem,
        configs: "list[triton.Config]",
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> AutotunedCall:
        """Return a call with the configs that it may be launched with."""
        return AutotunedCall(
            tuner=self.tuner,
            function=self.function,
            name=self.name,
            source_hash=self.source_hash,
            problem=problem,
            configs=by_stored_form(self.name, configs),
            args=args,
            kwargs=kwargs,
            settings=self.settings.of_environment(),
        )

    def _require_no_capture(self, problem: LaunchProblem) -> None:
        """Require that no CUDA graph captures a call that has to be measured.

        Raises:
            UsageError: one does.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"{problem.label} is new to {self.name}, so that a CUDA graph cannot capture it yet. Call it once "
                "before the capture."
            )

    def _keep(self, quick: tuple[object, ...], place: Place, served: BoundLaunch) -> None:
        """Keep what serves a kind of call. Where there are too many, the older half is forgotten."""
        if len(self.served) >= MAX_CHOICES and place not in self.served:
            self._drop(list(self.served)[: MAX_CHOICES // 2])
        if len(self._fast) >= MAX_CHOICES:
            self._fast = {}
        self._fast[quick] = self.served[place] = served
        self._cached = len(self.tuner.cache)

    def _drop(self, places: Sequence[Place]) -> None:
        """Forget what serves some kinds of calls, and keep the counts of their launches."""
        for place in places:
            served = self.served.pop(place)
            self._calls_before += served.calls
            self._count(self._launches_before, place, served)
            written = self._written.pop(served.stock_key, None)
            if written is not None and self.tuner.cache.get(served.stock_key) is written:
                del self.tuner.cache[served.stock_key]
        self._fast = {}
        self._cached = len(self.tuner.cache)

    def _count(self, counted: dict[Kind, Launches], place: Place, served: BoundLaunch) -> None:
        """Add the launches of a kind of call to counts, of which the oldest make room."""
        if served.explanation.device is not None:
            kind = Kind(served.explanation.device, self.name, place[1])
            while len(counted) >= MAX_KINDS and kind not in counted:
                del counted[next(iter(counted))]
            counted[kind] = counted.get(kind, Launches()) + served.launches


def _device_of(args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device | None:
    """Return the device of the first tensor of a call."""
    return next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def _unmeasured(problem: LaunchProblem, launched: "triton.Config", reason: str) -> KernelExplanation:
    """Return the choice of a call where there is nothing to choose."""
    return Explanation(rung=Rung.DEFAULT, reason=reason, shape=problem, launched=launched)
