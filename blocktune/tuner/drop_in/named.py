"""Kernels by their name, `module:function`, tuned without the program that launches them."""

from collections.abc import Sequence
from dataclasses import replace

from triton.runtime.autotuner import Config

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call import jitted_function, tuner_in
from blocktune.runtime.autotuned.kernel import TunedKernel
from blocktune.runtime.autotuned.settings import Settings
from blocktune.tuner.drop_in.autotune import TunedAutotuner, autotune
from blocktune.tuner.drop_in.decide import decide
from blocktune.tuner.offline.specialization import object_named


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
    function, tuner = jitted_function(found), tuner_in(found)
    if tuner is None and not space:
        raise UsageError(
            f"{name} has no list of configs to choose from. Name choices: `--param BLOCK=64,128 --param num_warps=4,8`."
        )
    if space:
        own = [key for key in keys if key in function.arg_names] if tuner is None else tuner.keys
        tuner = autotune(space, own)(found if tuner is None else tuner.fn)
    settings = tuner.kernel.settings if isinstance(tuner, TunedAutotuner) else Settings()
    return TunedKernel(tuner, replace(settings, expand=expand or settings.expand), decide)
