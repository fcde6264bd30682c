"""Launches of a call's configs in this process, on its own arguments."""

from dataclasses import dataclass

from blocktune.kernels.base.kernel import Thunk
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.measure.clock import HookedLaunch


@dataclass(frozen=True, slots=True)
class ConfigLaunch(HookedLaunch):
    """One config's launches, with the hooks of kernel and config."""

    call: AutotunedCall
    config: LaunchConfig

    def before(self) -> None:
        """Run the hooks that prepare the arguments: the config's, then the kernel's."""
        named, hook = self.call.named_with(self.config), self.call.launched(self.config).pre_hook
        if hook is not None:
            hook(named)
        self.call.tuner.pre_hook(named)

    def __call__(self) -> None:
        self.call.tuner.fn.run(*self.call.args, **{**self.call.kwargs, **self.call.launched(self.config).all_kwargs()})

    def after(self, exception: Exception | None = None) -> None:
        """Run the hook that restores the arguments."""
        self.call.tuner.post_hook(self.call.named_with(self.config), exception=exception)


def whole_launch(call: AutotunedCall, config: LaunchConfig) -> Thunk:
    """Return a launch of a config with its hooks, as `triton.autotune` times it."""
    launch = ConfigLaunch(call, config)

    def run() -> None:
        launch.before()
        launch()
        launch.after()

    return run


def prepare_arguments(call: AutotunedCall, config: LaunchConfig) -> None:
    """Leave the arguments as the launch of a winner expects them, as `triton.autotune` does when it is done."""
    call.tuner.pre_hook(call.named_with(config), reset_only=True)


def require_restorable(call: AutotunedCall) -> None:
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
