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
    LaunchSize,
    by_stored_form,
    jitted_function,
    pruned_configs,
    require_no_conflict,
    require_storable,
    size_of,
)
from blocktune.runtime.autotuned.call_key import CallKey, Parameter, require_names, unstored_problem
from blocktune.runtime.autotuned.choices import BoundLaunch, CallPlace, ChoiceTable
from blocktune.runtime.autotuned.config import METHOD, LaunchProblem
from blocktune.runtime.autotuned.fallback import KernelExplanation
from blocktune.runtime.autotuned.settings import Settings, method_digest
from blocktune.runtime.autotuned.stock_tuner import Timings, stock_choice, stock_key, tell_choice, timings_of
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.ladder import Rung

if TYPE_CHECKING:
    import triton
    from triton.runtime.autotuner import Autotuner

Decide = Callable[[AutotunedCall], KernelExplanation]
kernels: "weakref.WeakSet[TunedKernel]" = weakref.WeakSet()
"""Those that this process has launched."""


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
        self.table = ChoiceTable(self.name, tuner)
        self._decide = decide
        self._lock = threading.RLock()
        self._take_list()
        kernels.add(self)

    def options(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        """Return what a launch with these arguments gets in addition, after the hook of the config that serves it."""
        tuner, table = self.tuner, self.table
        if tuner.configs is not self._configs or len(tuner.cache) < table.cached:
            self._follow_tuner()
        served = table.fast.get(self._quick(args, kwargs)) or self._serve(args, kwargs)
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
        if self.tuner.configs is not self._configs or len(self.tuner.cache) < self.table.cached:
            self._follow_tuner()
        known = self.table.fast.get(self._quick(args, kwargs))
        if known is None and "grid" not in kwargs:
            raise UsageError(
                f"This kind of call of {self.name} is new, and cannot be measured without a grid. Add `grid=(...)`, or "
                "launch the kernel before."
            )
        return (known or self._serve(args, {"warmup": False, **kwargs})).explanation

    @property
    def choices(self) -> dict[LaunchProblem, KernelExplanation]:
        """What serves each kind of call, and why; on the last device and of the last size."""
        return {place.problem: served.explanation for place, served in self.table.served.items()}

    def call_of(self, args: Sequence[object], kwargs: Mapping[str, object]) -> AutotunedCall:
        """Return a launch with these arguments, its grid included, and the configs that it may have.

        Raises:
            UsageError: it gives a parameter that is tuned.
        """
        configs = pruned_configs(self.tuner, args, kwargs)
        require_no_conflict(self.name, configs, kwargs)
        return self._call(self._problem(args, kwargs), self._size(args, kwargs), configs, args, kwargs)

    def forget(self) -> None:
        """Drop all choices, so that the next calls ask the store again."""
        with self._lock:
            self.table.drop(list(self.table.served))

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

    def _take_list(self) -> None:
        """Choose among the configs that the tuner has now."""
        tuner = self.tuner
        self._configs = tuner.configs
        if isinstance(tuner.configs_top_k, float) and len(tuner.configs) * tuner.configs_top_k < 1:
            tuner.configs_top_k = 1  # as in Triton 3.9: a share that rounds to nothing keeps one config
        self._method = ""
        with tolerance(self.name, "the method of its measurement"):
            self._method = method_digest(self.settings, tuner)
        has_hooks = any(config.pre_hook is not None for config in tuner.configs)
        self._key = CallKey(self._params, tuner.keys, self.settings.buckets, sets_blocks=has_hooks)
        self._quick = self._key.quick

    def _follow_tuner(self) -> None:
        """Choose again after a program has replaced the tuner's configs, or taken choices out of its cache."""
        with self._lock:
            self.forget()
            self._take_list()

    def _serve(self, args: Sequence[object], kwargs: Mapping[str, object]) -> BoundLaunch:
        """Return what serves a call that is new to this process in some way; it is kept."""
        with self._lock:
            quick = self._quick(args, kwargs)
            place = self._place(quick, args, kwargs)
            known = self.table.find(place)
            other = self.table.find(place._replace(size=None)) if known is None and _is_capturing() else None
            if other is not None:
                return other  # where nothing can be measured, another size serves; calls outside choose again
            served = known or self._bound(place, args, kwargs)
            if known is None:
                self.table.keep(place, served)
            if place.size is None or not place.size.is_trivial:  # a buffer's next launch may have work
                self.table.remember(quick, served)
        if known is None and served.timings:  # after the lock, since a listener may wait for other launches
            with tolerance(self.name, "the listener of Triton's knobs"):
                tell_choice(self.tuner, served.stock_key, place.problem.label, served.explanation, served.timings)
        return served

    def _place(self, quick: tuple[object, ...], args: Sequence[object], kwargs: Mapping[str, object]) -> CallPlace:
        """Return the kind of a call."""
        problem = unstored_problem(quick)
        with tolerance(self.name, "its key"):
            problem = self._problem(args, kwargs)
        return CallPlace(_device_of(args, kwargs), problem, self._size(args, kwargs))

    def _size(self, args: Sequence[object], kwargs: Mapping[str, object]) -> LaunchSize | None:
        """Return the size of a launch, as far as its grid tells."""
        with tolerance(self.name, "the size of its launch"):
            return size_of(self.tuner, self.function, args, kwargs)
        return None

    def _problem(self, args: Sequence[object], kwargs: Mapping[str, object]) -> LaunchProblem:
        """Return the problem of a call, with the method of its measurement."""
        problem = self._key.problem(args, kwargs)
        return problem.having({METHOD: self._method}) if self._method else problem

    def _bound(self, place: CallPlace, args: Sequence[object], kwargs: Mapping[str, object]) -> BoundLaunch:
        """Return what serves a call, with the choice made now."""
        problem = place.problem
        key, started = stock_key(self.tuner, args, kwargs), time.monotonic()
        preset = self.table.preset(key)
        if preset is not None:
            return BoundLaunch(_unmeasured(problem, preset, "chosen by a library"), key)
        configs = pruned_configs(self.tuner, args, kwargs)
        require_no_conflict(self.name, configs, kwargs)
        if self.is_interpreted or (len(set(configs)) == 1 and not self.settings.expand):
            which = "only" if len(set(configs)) == 1 else "first"
            return BoundLaunch(_unmeasured(problem, configs[0], f"the {which} config of the list"), key)
        self._require_no_capture(problem)
        self.misses += 1
        found, timings = self._decided(place, configs, args, kwargs)
        seconds = time.monotonic() - started
        self.seconds += seconds
        served = BoundLaunch(found, key, timings)
        self.table.write(key, served.config)
        self.tuner.configs_timings, self.tuner.bench_time = timings, seconds  # where programs look for them
        return served

    def _decided(
        self,
        place: CallPlace,
        configs: "list[triton.Config]",
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> tuple[KernelExplanation, Timings]:
        """Return the choice of a call with the times of its configs. Where the call cannot be described for a store,
        Triton's own tuner measures it."""
        try:
            call = self._call(place.problem, place.size, configs, args, kwargs)
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
        size: LaunchSize | None,
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
            size=size,
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
        if _is_capturing():
            raise UsageError(
                f"{problem.label} is new to {self.name}, so that a CUDA graph cannot capture it yet. Call it once "
                "before the capture."
            )


def _is_capturing() -> bool:
    """Return whether a CUDA graph captures what this thread launches."""
    return torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


def _device_of(args: Sequence[object], kwargs: Mapping[str, object]) -> int | None:
    """Return the index of the device of a call's first tensor."""
    return next((value.get_device() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def _unmeasured(problem: LaunchProblem, launched: "triton.Config", reason: str) -> KernelExplanation:
    """Return the choice of a call where there is nothing to choose."""
    return Explanation(rung=Rung.DEFAULT, reason=reason, shape=problem, launched=launched)
