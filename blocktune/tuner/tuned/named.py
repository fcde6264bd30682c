"""Kernels by their name, `module:function`, tuned without the program that launches them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from triton.runtime.autotuner import Autotuner, Config

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.tuned.call import jitted_function
from blocktune.kernels.tuned.config import UserConfig
from blocktune.kernels.tuned.fallback import KernelExplanation
from blocktune.kernels.tuned.kernel import TunedKernel
from blocktune.kernels.tuned.settings import Settings
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.jitted.specialization import object_named
from blocktune.tuner.tuned.autotune import TunedAutotuner, autotune
from blocktune.tuner.tuned.decide import decide


@dataclass(frozen=True, slots=True)
class Remeasured:
    """A call measured again. problem: what is wrong with the results of the winner, if anything is."""

    choice: KernelExplanation
    winner: UserConfig
    problem: str | None

    def loss_of(self, config: UserConfig) -> float | None:
        """Return how much longer another config takes now, as a part of the winner's time; None if it was not timed."""
        times = self.choice.times_us or {}
        return times[config] / times[self.winner] - 1 if config in times else None


def kernel_named(name: str, space: Sequence[Config] = (), keys: Sequence[str] = (), expand: int = 0) -> TunedKernel:
    """Return the kernel with this name, to be tuned.

    Args:
        name: `module:function`, decorated by `triton.jit`, with or without a list of configs.
        space: configs that replace the kernel's own list.
        keys: names of the arguments whose values need a config of their own, where the kernel names none.
        expand: how many configs around the list may be tried in addition.

    Raises:
        UsageError: there is no such kernel, or neither it nor `space` has configs.
    """
    found = object_named(name)
    function, tuner = jitted_function(found), _tuner_in(found)
    if tuner is None and not space:
        raise UsageError(
            f"{name} has no list of configs to choose from. Name choices: `--param BLOCK=64,128 --param num_warps=4,8`."
        )
    if space:
        own = [key for key in keys if key in function.arg_names] if tuner is None else tuner.keys
        tuner = autotune(space, own)(found if tuner is None else tuner.fn)
    settings = tuner.kernel.settings if isinstance(tuner, TunedAutotuner) else Settings()
    return TunedKernel(tuner, replace(settings, expand=expand or settings.expand), decide)


def _tuner_in(found: Any) -> Any:
    """Return Triton's tuner in a decorated function; None if there is none."""
    while found is not None and not isinstance(found, Autotuner):
        found = getattr(found, "fn", None)
    return found


def positional(kernel: TunedKernel, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return named arguments as a program would give them: by place as far as they go, the rest by name. Functions that
    prune a list get both apart."""
    names, args = iter(kernel.tuner.arg_names), []
    left = dict(arguments)
    for name in names:
        if name not in left:
            break
        args.append(left.pop(name))
    return args, left


def remeasured(kernel: TunedKernel, arguments: Mapping[str, Any], device: DeviceSpec) -> Remeasured:
    """Measure all configs of a call again, whatever is known, and compare the winner's results with those of the
    list's first config."""
    from blocktune.tuner.tuned.tune_call import tuned_choice
    from blocktune.tuner.turns.outputs import OutputCheck

    args, kwargs = positional(kernel, arguments)
    call = kernel.call_of(args, {"warmup": False, **kwargs})
    choice = tuned_choice(call, device, afresh=True)
    assert choice.config is not None  # it was measured
    assert choice.launched is not None
    winner = choice.config
    launched = replace(call, configs={**call.configs, winner: choice.launched})
    problem = None if winner == call.default else OutputCheck(call).problem(launched, winner)
    return Remeasured(choice, winner, problem)
