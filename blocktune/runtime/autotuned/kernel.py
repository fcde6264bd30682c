"""The launcher of an autotuned kernel: it finds the choice of a call, or has it made."""

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call import AutotunedCall, jitted_function, pruned_configs, require_no_conflict
from blocktune.runtime.autotuned.call_key import CallKey, Parameter, require_names
from blocktune.runtime.autotuned.config import LaunchProblem
from blocktune.runtime.autotuned.fallback import KernelExplanation
from blocktune.runtime.autotuned.launches import Kind, Launches
from blocktune.runtime.autotuned.settings import Settings
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.ladder import Rung

if TYPE_CHECKING:
    import triton
    from triton.runtime.autotuner import Autotuner

Decide = Callable[[AutotunedCall], KernelExplanation]

MAX_CHOICES = 4096
"""Kinds of calls that a kernel keeps. Lengths that change with every step must not pile up."""

_WRITTEN = "_blocktune_written"
"""The attribute of a tuner with what was written here into its own cache; a library wrote the rest."""

kernels: "weakref.WeakSet[TunedKernel]" = weakref.WeakSet()
"""Those that this process has launched."""


class BoundLaunch:
    """The config of a kind of call, the reason for it, and the number of launches."""

    __slots__ = ("calls", "config", "explanation", "hook", "options")

    def __init__(self, explanation: KernelExplanation, config: "triton.Config") -> None:
        self.explanation, self.calls = explanation, 0
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
        self.served: dict[LaunchProblem, BoundLaunch] = {}
        self._decide = decide
        self._fast: dict[tuple[object, ...], BoundLaunch] = {}
        self._calls_before = 0
        self._launches_before: dict[Kind, Launches] = {}
        self._written: dict[tuple[object, ...], triton.Config] = tuner.__dict__.setdefault(_WRITTEN, {})
        has_hooks = any(config.pre_hook is not None for config in tuner.configs)
        self._key = CallKey(self._params, tuner.keys, settings.buckets, sets_blocks=has_hooks)
        self._quick = self._key.quick
        self._lock = threading.RLock()
        kernels.add(self)

    def options(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        """Return what a launch with these arguments gets in addition, after the hook of the config that serves it."""
        served = self._fast.get(self._quick(args, kwargs)) or self._serve(args, kwargs)
        served.calls += 1
        tuner = self.tuner
        tuner.best_config = served.config
        if served.hook is not None:
            served.hook({**dict(zip(tuner.arg_names, args, strict=False)), **kwargs, **served.options})
        return served.options

    def explain(self, *args: object, **kwargs: object) -> KernelExplanation:
        """Return what serves a call with these arguments, and why; a new kind of call is decided as at its launch.

        Raises:
            UsageError: the call is new, and has no `grid` to be measured with.
        """
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
        for problem, served in self.served.items():
            if served.explanation.device is not None:
                kind = Kind(served.explanation.device, self.name, problem)
                counted[kind] = counted.get(kind, Launches()) + served.launches
        return counted

    @property
    def choices(self) -> dict[LaunchProblem, KernelExplanation]:
        """What serves each kind of call, and why."""
        return {problem: served.explanation for problem, served in self.served.items()}

    def call_of(self, args: Sequence[object], kwargs: Mapping[str, object]) -> AutotunedCall:
        """Return a launch with these arguments, its grid included, and the configs that it may have.

        Raises:
            UsageError: it gives a parameter that is tuned.
        """
        return self._call(self._key.problem(args, kwargs), args, kwargs)

    def forget(self) -> None:
        """Drop all choices, so that the next calls ask the store again."""
        with self._lock:
            self._calls_before, self._launches_before = self.calls, self.launches
            self.served, self._fast = {}, {}
            for key, config in self._written.items():
                if self.tuner.cache.get(key) is config:
                    del self.tuner.cache[key]
            self._written.clear()

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

    def _serve(self, args: Sequence[object], kwargs: Mapping[str, object]) -> BoundLaunch:
        """Return what serves a call that is new to this process in some way; it is kept."""
        with self._lock:
            problem = self._key.problem(args, kwargs)
            served = self.served.get(problem) or self._bound(problem, args, kwargs)
            if len(self._fast) >= MAX_CHOICES:
                self._fast = {}
            self._fast[self._quick(args, kwargs)] = self.served[problem] = served
        return served

    def _bound(self, problem: LaunchProblem, args: Sequence[object], kwargs: Mapping[str, object]) -> BoundLaunch:
        stock_key, started = self._stock_key(args, kwargs), time.monotonic()
        preset = self.tuner.cache.get(stock_key)
        if preset is not None and preset is not self._written.get(stock_key):
            why: KernelExplanation = Explanation(
                rung=Rung.DEFAULT, reason="chosen by a library", shape=problem, launched=preset
            )
            return BoundLaunch(why, preset)
        call = self._call(problem, args, kwargs)
        if self.is_interpreted or (len(call.configs) == 1 and not self.settings.expand):
            return _unmeasured(call)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"{problem.label} is new to {self.name}, so that a CUDA graph cannot capture it yet. Call it once "
                "before the capture."
            )
        self.misses += 1
        found = self._decide(call)
        self.seconds += time.monotonic() - started
        self.tuner.cache[stock_key] = self._written[stock_key] = found.launched  # where programs look for it
        return BoundLaunch(found, found.launched)

    def _call(self, problem: LaunchProblem, args: Sequence[object], kwargs: Mapping[str, object]) -> AutotunedCall:
        """Return a call with the configs that it may be launched with."""
        configs = pruned_configs(self.tuner, self.name, args, kwargs)
        require_no_conflict(self.name, configs, kwargs)
        return AutotunedCall(
            tuner=self.tuner,
            function=self.function,
            name=self.name,
            source_hash=self.source_hash,
            problem=problem,
            configs=configs,
            args=args,
            kwargs=kwargs,
            settings=self.settings.of_environment(),
        )

    def _stock_key(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
        """Return the key that Triton's own autotuner keeps the winner under."""
        names = self.tuner.arg_names
        given = {**dict(zip(names, args, strict=False)), **{name: kwargs[name] for name in kwargs if name in names}}
        types = [str(value.dtype) for value in given.values() if hasattr(value, "dtype")]
        return (*(given[name] for name in self.tuner.keys if name in given), *types)


def _unmeasured(call: AutotunedCall) -> BoundLaunch:
    """Return the launch of a call where there is nothing to choose."""
    launched = call.configs[call.default]
    reason = "the only config of the list" if len(call.configs) == 1 else "the first config of the list"
    why: KernelExplanation = Explanation(
        rung=Rung.DEFAULT, reason=reason, shape=call.problem, config=call.default, launched=launched
    )
    return BoundLaunch(why, launched)
