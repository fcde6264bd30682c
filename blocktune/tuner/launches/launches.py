"""Timed launches of a call's configs in this process, on its own arguments."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call import Call
from blocktune.runtime.autotuned.config import UserConfig
from blocktune.runtime.autotuned.triton_config import triton_config
from blocktune.tuner.launches.race import Samples
from blocktune.tuner.measure.clock import Clock, HookedLaunch
from blocktune.tuner.measure.protocol import HEAT_SECONDS, IDLE_SECONDS, Rounds

_OF_THE_CONFIG = (
    "OutOfResources",
    "CompilationError",
    "CompileTimeAssertionFailure",
    "UnsupportedLanguageConstruct",
    "PTXASError",
)
"""Errors that a config alone is to blame for, by name as in tuner/measure/worker.py. Others are the caller's."""


@dataclass(frozen=True, slots=True)
class ConfigLaunch(HookedLaunch):
    """The launches of one config, with the hooks of the kernel and of the config."""

    call: Call
    config: UserConfig

    def before(self) -> None:
        """Run the hooks that prepare the arguments: the config's, then the kernel's."""
        config = self.call.configs[self.config]
        if config.pre_hook is not None:
            config.pre_hook(self._named)
        self.call.tuner.pre_hook(self._named)

    def __call__(self) -> None:
        self.call.tuner.fn.run(*self.call.args, **self._keywords)

    def after(self, exception: Exception | None = None) -> None:
        """Run the hook that restores the arguments."""
        self.call.tuner.post_hook(self._named, exception=exception)

    @property
    def _keywords(self) -> dict[str, Any]:
        return {**self.call.kwargs, **self.call.configs[self.config].all_kwargs()}

    @property
    def _named(self) -> dict[str, Any]:
        return {**self.call.named, **self.call.configs[self.config].all_kwargs()}


class OwnLaunches:
    """Times configs on the arguments of the call.

    failures: why a config does not run.

    Args:
        call: the call.
        make_clock: of the current device.
    """

    def __init__(self, call: Call, make_clock: Callable[[], Clock]) -> None:
        require_restorable(call)
        self.call, self._clock = call, make_clock()
        self._ran: set[UserConfig] = set()
        self.failures: dict[UserConfig, str] = {}
        self._last_worked = 0.0

    def rounds(self, configs: Sequence[UserConfig], count: int) -> Mapping[UserConfig, Samples]:
        """Return the times of configs that took turns; those that do not run are left out and among `failures`.

        Raises:
            Exception: what a launch raised that is not to blame on its config.
        """
        running = [config for config in configs if config in self._ran or self._runs(config)]
        rows = self._timed([ConfigLaunch(self.call, config) for config in running], count) if running else ()
        return {config: tuple(row[place] for row in rows) for place, config in enumerate(running)}

    def _timed(self, launches: Sequence[ConfigLaunch], count: int) -> Rounds:
        """Return rounds on a loaded GPU: one that was idle, as while configs were compiled, runs at another clock."""
        if time.monotonic() - self._last_worked > IDLE_SECONDS:
            self._clock.heat(launches[0], HEAT_SECONDS)
        rows = self._clock.rounds(launches, count)
        self._last_worked = time.monotonic()
        return rows

    def close(self, winner: UserConfig) -> None:
        """Leave the arguments as the launch of the winner expects them, as `triton.autotune` does when it is done."""
        options = self.call.configs[winner].all_kwargs()
        self.call.tuner.pre_hook({**self.call.named, **options}, reset_only=True)

    def _runs(self, config: UserConfig) -> bool:
        """Launch a config for the first time, which loads its code."""
        launch = ConfigLaunch(self.call, config)
        launch.before()
        try:
            launch()
            self._clock.synchronize()
            self._last_worked = time.monotonic()
        except Exception as error:
            launch.after(exception=error)
            if type(error).__name__ not in _OF_THE_CONFIG:
                raise
            self.failures[config] = f"{type(error).__name__}: {error}"
            return False
        launch.after()
        self._ran.add(config)
        return True


class BenchedLaunches(OwnLaunches):
    """Times configs by the `do_bench` that the kernel brings along, each for itself, and once."""

    def __init__(self, call: Call, make_clock: Callable[[], Clock]) -> None:
        super().__init__(call, make_clock)
        self._times_us: dict[UserConfig, Samples] = {}

    def rounds(self, configs: Sequence[UserConfig], count: int) -> Mapping[UserConfig, Samples]:
        """Return the times of configs; those that do not run are left out and among `failures`."""
        del count
        for config in configs:
            if config not in self._times_us and config not in self.failures and self._runs(config):
                times_ms = self.call.tuner.do_bench(self._whole(config), quantiles=(0.5, 0.2, 0.8))
                self._times_us[config] = (1e3 * (times_ms[0] if isinstance(times_ms, Sequence) else times_ms),)
        return {config: self._times_us[config] for config in configs if config in self._times_us}

    def _whole(self, config: UserConfig) -> Callable[[], None]:
        """Return a launch with its hooks, as `triton.autotune` times it."""
        launch = ConfigLaunch(self.call, config)

        def run() -> None:
            launch.before()
            launch()
            launch.after()

        return run


def with_configs(call: Call, configs: Iterable[UserConfig]) -> Call:
    """Return a call that can also launch configs of no list, with the hook of the list's first one."""
    hook = call.configs[call.default].pre_hook
    made = {config: triton_config(config) for config in configs if config not in call.configs}
    for config in made.values():
        config.pre_hook = hook
    return replace(call, configs={**call.configs, **made})


def brings_its_own_bench(call: Call) -> bool:
    """Return whether the kernel was decorated with `do_bench`; Triton makes one of its own of the older `warmup` and
    `rep`."""
    tuner = call.tuner
    older = tuner.num_warmups is not None or tuner.num_reps is not None or tuner.use_cuda_graph
    return tuner._do_bench is not None and not older


def require_restorable(call: Call) -> None:
    """Require that what measuring resets or restores are tensors.

    Raises:
        UsageError: an argument that measuring has to reset or restore is no tensor.
    """
    if call.tuner.user_defined_pre_hook:
        return
    named = call.named
    for what, names, need in (
        ("reset_to_zero", call.tuner.reset_to_zero, "zero_"),
        ("restore_value", call.tuner.restore_value, "copy_"),
    ):
        for name in names:
            value = named.get(name)
            if value is not None and not hasattr(value, need):
                raise UsageError(
                    f"`{what}` names tensors, but `{name}` of {call.name} is a {type(value).__name__}, which cannot be "
                    "restored between measurements. Leave it out, or give a `pre_hook` and a `post_hook`."
                )
