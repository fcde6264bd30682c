"""Launches of a program on a GPU that is not here: each Triton kernel with its real specialisation.

Triton itself says it: what it would compile next is noted in place of the compile. So a size of 1 is a constant, what
heuristics compute is computed, and defaults, tuples, functions and descriptors are what they are at the launch.
"""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triton.runtime.autotuner import Autotuner, Config
from triton.runtime.jit import JITFunction

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import BlocktuneError, UsageError
from blocktune.kernels.values.text import counted
from blocktune.runtime.autotuned.call import (
    AutotunedCall,
    by_stored_form,
    grid_arguments,
    jitted_function,
    pruned_configs,
)
from blocktune.runtime.autotuned.call_key import CallKey, Parameter
from blocktune.runtime.autotuned.config import LaunchConfig, LaunchProblem, launch_config
from blocktune.runtime.autotuned.kernel import TunedKernel
from blocktune.runtime.autotuned.settings import Settings
from blocktune.tuner.offline.specialization import Specialization, specialization_from
from blocktune.tuner.offline.stand_in import stand_in
from blocktune.tuner.offline.stand_in_driver import INDEX


@dataclass(frozen=True, slots=True)
class DryConfig:
    """One config of a recorded launch. specialization: None where Triton refuses it, with the reason. programs: of its
    grid; None where the launch has none."""

    specialization: Specialization | None
    programs: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryLaunch:
    """A kind of launch of one kernel. listed: how many configs its list has before it is pruned; 0 without a list."""

    kernel: str
    label: str
    listed: int
    configs: Mapping[LaunchConfig, DryConfig]


@dataclass(slots=True)
class _CurrentLaunch:
    """The launch under way. spec: what Triton would compile for it, None until it says so."""

    is_listed: bool
    spec: CompileSpec | None = None
    programs: int | None = None


class _CodeOfNothing:
    """Stands for the compiled kernel that a launch returns, which some libraries keep and launch themselves."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


def dry_launches(step: Callable[[], object], device: DeviceSpec) -> tuple[DryLaunch, ...]:
    """Return the kinds of launches that a function makes on a device, in their order. It runs on a GPU that launches
    nothing: what kernels would have computed is zeros, or what was there before.

    Raises:
        UsageError: the function raises an error, or ends the program with an exit code or before its first launch.
    """
    recorder = LaunchRecorder(device.limits.cc)
    with stand_in(device), recorder.recording():
        try:
            step()
        except BlocktuneError:
            raise
        except SystemExit as error:  # scripts may end so, which must not end a check as passed
            if error.code not in (None, 0) or not recorder.launches:
                raise UsageError(_exit_message(error.code, len(recorder.launches))) from error
        except Exception as error:  # whatever a program raises
            raise UsageError(_failure(error, len(recorder.launches))) from error
    return tuple(recorder.launches)


class LaunchRecorder:
    """Records what Triton would compile.

    launches: what was noted.

    Args:
        cc: compute capability of the GPU.
    """

    def __init__(self, cc: tuple[int, int]) -> None:
        self.launches: list[DryLaunch] = []
        self._cc = cc
        self._kinds, self._seen = set[tuple[str, LaunchProblem]](), set[tuple[int, object]]()
        self._now = _CurrentLaunch(is_listed=False)
        self._functions: dict[int, Any] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note what is launched meanwhile."""
        ours = (
            (JITFunction, "run", self._run(JITFunction.run)),
            (JITFunction, "_do_compile", self._do_compile(JITFunction._do_compile)),
            (Autotuner, "run", self._run_tuner()),
            (Autotuner, "_bench", self._bench()),  # by subclasses with a `run` of their own
            (TunedKernel, "options", lambda kernel, args, kwargs: self._options(kernel.tuner, args, kwargs)),
        )
        with contextlib.ExitStack() as stack:
            for owner, name, method in ours:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, method)
            stack.callback(self._unbind)
            yield

    def _unbind(self) -> None:
        """Let functions forget what they have bound for the GPU, which goes."""
        for function in self._functions.values():
            function.device_caches.pop(INDEX, None)

    def _run(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands for a launch of a jitted function."""

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if id(function) not in self._functions:
                self._functions[id(function)] = function
                function.device_caches.pop(INDEX, None)  # what is compiled already would not be noted
            found = stock(function, *args, grid=grid, warmup=warmup, **kwargs)
            now = self._now
            if now.spec is None:
                return _CodeOfNothing() if found is None else found
            if grid is not None:
                now.programs = _programs(
                    function, grid, {**dict(zip(function.arg_names, args, strict=False)), **kwargs}
                )
            if not now.is_listed:
                self._note_function(function, now.spec, now.programs, args, kwargs)
                self._now = _CurrentLaunch(is_listed=False)
            return _CodeOfNothing() if found is None else found

        return run

    def _do_compile(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands for a compile: it is noted, and only done where a program wants the code itself."""

        def compile_nothing(
            function: Any,
            key: Any,
            signature: Any,
            device: Any,
            constexprs: Any,
            options: Any,
            attrs: Any,
            warmup: bool,
        ) -> Any:
            now, place = self._now, (id(function), key)
            if now.is_listed or place not in self._seen:
                self._seen.add(place)
                now.spec = CompileSpec(function, signature, constexprs, attrs, dict(vars(options)))
            if now.is_listed or not warmup:
                return None
            made = stock(function, key, signature, device, constexprs, options, attrs, warmup)
            function.device_caches[device][0].pop(key, None)  # so that the next launch is noted as well
            return made

        return compile_nothing

    def _run_tuner(self) -> Callable[..., Any]:
        """Return what stands for a launch of an autotuned kernel, which takes the first config."""

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            return tuner.fn.run(*args, **kwargs, **self._options(tuner, args, kwargs))

        return run

    def _bench(self) -> Callable[..., Any]:
        """Return what stands for the measurement of a config, which takes no time."""

        def bench(tuner: Any, *args: Any, config: Config, **meta: Any) -> list[float]:
            self._options(tuner, args, meta)
            return [1.0, 1.0, 1.0]

        return bench

    def _options(self, tuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a launch gets of a tuner, whose list is noted where the kind of call is new."""
        call = _call_of(tuner, args, kwargs)
        kind = (call.name, call.problem)
        if kind not in self._kinds:
            self._kinds.add(kind)
            configs = {config: self._listed(call, config) for config in call.configs}
            self.launches.append(
                DryLaunch(kernel=call.name, label=call.problem.label, listed=len(tuner.configs), configs=configs)
            )
        chosen = tuner.best_config = call.launched(call.default)
        if chosen.pre_hook is not None:
            chosen.pre_hook(call.named_with(call.default))
        options: dict[str, Any] = chosen.all_kwargs()
        return options

    def _listed(self, call: AutotunedCall, config: LaunchConfig) -> DryConfig:
        """Return what one config of a call compiles."""
        chosen = call.launched(config)
        earlier, self._now = self._now, _CurrentLaunch(is_listed=True)
        try:
            if chosen.pre_hook is not None:  # it gives descriptors their blocks, which are part of their type
                chosen.pre_hook(call.named_with(config))
            call.tuner.fn.run(*call.args, **{**call.kwargs, **chosen.all_kwargs()})
            spec, programs = self._now.spec, self._now.programs
        except Exception as error:  # what Triton refuses, and hooks and heuristics raise
            return DryConfig(None, problem=f"{type(error).__name__}: {error}")
        finally:
            self._now = earlier
        assert spec is not None  # nothing is compiled, so Triton asks each time
        return DryConfig(specialization_from(call.name, config, spec, self._cc), programs)

    def _note_function(
        self, function: Any, spec: CompileSpec, programs: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Note a launch of a kernel without a list, as it is."""
        name = f"{function.fn.__module__}:{function.fn.__qualname__}"
        config = launch_config(name, _config_of(function, spec))
        recorded = DryConfig(specialization_from(name, config, spec, self._cc), programs)
        label = CallKey(_parameters(function), (), {}).problem(args, kwargs).label
        self.launches.append(DryLaunch(kernel=name, label=label, listed=0, configs={config: recorded}))


def _call_of(tuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AutotunedCall:
    """Return a call of a tuner, whatever class of Triton's it is, with the configs that its pruning leaves."""
    function, named = jitted_function(tuner.fn), tuner.nargs if hasattr(tuner, "nargs") else None
    name = f"{function.fn.__module__}:{function.fn.__qualname__}"
    configs = pruned_configs(tuner, args, kwargs)
    tuner.nargs = named  # which a `run` of its own may still read
    has_hooks = any(config.pre_hook is not None for config in tuner.configs)
    key = CallKey(_parameters(function), tuner.keys, {}, sets_blocks=has_hooks)
    return AutotunedCall(
        tuner=tuner,
        function=function,
        name=name,
        source_hash="",
        problem=key.problem(args, kwargs),
        configs=by_stored_form(name, configs),
        args=args,
        kwargs=kwargs,
        settings=Settings(),
    )


def _parameters(function: Any) -> list[Parameter]:
    return [Parameter(param.name, param.is_constexpr, param.do_not_specialize) for param in function.params]


def _config_of(function: Any, spec: CompileSpec) -> Config:
    """Return the constants and options of a launch as a config."""
    constants = {function.params[path[0]].name: value for path, value in spec.constexprs.items() if len(path) == 1}
    named = {param.name for param in function.params if param.is_constexpr}
    options = {name: spec.options[name] for name in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
    return Config({name: value for name, value in constants.items() if name in named}, **options)


def _programs(function: Any, grid: Any, named: Mapping[str, Any]) -> int:
    """Return how many programs a grid has."""
    sizes = grid(grid_arguments(function, function, dict(named))) if callable(grid) else grid
    return math.prod(int(size) for size in sizes)


def _exit_message(code: object, launches: int) -> str:
    """Return the message about a program that ended by `sys.exit`."""
    return (
        f"The function must launch its kernels and return, but called sys.exit({'' if code is None else repr(code)}) "
        f"after {counted(launches, 'kind')} of launches."
    )


def _failure(error: Exception, launches: int) -> str:
    """Return the message about a program that failed."""
    place, words = traceback.extract_tb(error.__traceback__)[-1], " ".join(str(error).split())
    return (
        f"The function must end without an error, but raised {type(error).__name__}: {words:.300} at "
        f"{place.filename}:{place.lineno}, after {counted(launches, 'kind')} of launches. Kernels compute nothing "
        "here: their results are zeros."
    )
