"""A `triton.Config` as a value that can be stored and compared, and back."""

from typing import TYPE_CHECKING

from blocktune.runtime.autotuned.config import LaunchConfig, plain

if TYPE_CHECKING:
    import triton

LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
"""What `triton.Config` takes in addition to what is compiled in."""

_USUAL = {"num_ctas": 1, "maxnreg": None, "ir_override": None}


def launch_config(kernel: str, config: "triton.Config") -> LaunchConfig:
    """Return the stored form of a config. Its hook is no part of it; a value that is not plain is known by its text."""
    options = {name: getattr(config, name, _USUAL.get(name)) for name in LAUNCH_OPTIONS}
    told = {name: value for name, value in options.items() if name not in _USUAL or value != _USUAL[name]}
    return LaunchConfig(kernel, tuple((name, plain(value)) for name, value in {**config.kwargs, **told}.items()))


def triton_config(config: LaunchConfig) -> "triton.Config":
    """Return the config to launch with that a stored one stands for."""
    import triton

    parameters = config.parameters
    options = {name: parameters.pop(name) for name in LAUNCH_OPTIONS if name in parameters}
    return triton.Config(parameters, **options)
