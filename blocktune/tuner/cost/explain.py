"""`blocktune.explain`: what the models say a config spends its time on."""

from blocktune.kernels.hardware.device import DeviceSpec, device_of
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError, require_type
from blocktune.kernels.values.shape import AttentionShape, require_shape
from blocktune.runtime.dispatch.dispatcher import best_config
from blocktune.runtime.selection.ladder import Rung
from blocktune.tuner.compile_server.one_config import compile_config
from blocktune.tuner.cost.analysis import Analysis, analyse
from blocktune.tuner.cost.roofline import require_units


def explain(
    shape: AttentionShape, config: KernelConfig | None = None, *, device: DeviceSpec | str | None = None
) -> Analysis:
    """Return where the time of a config goes, what binds it and what would lift that; `print` says it in words.

    The config is compiled here, which needs no GPU and takes some seconds.

    Args:
        shape: what it computes.
        config: the one to explain; None is the one that `attention` takes. Its measured time, where the store has it
            for this device and source, is returned with the prediction.
        device: a DeviceSpec or a name; by default the current GPU.

    Raises:
        UnknownDeviceError: no device has this name.
        UnknownKernelError: no kernel has the name in the config.
        UsageError: the config breaks a rule of its kernel, or the kernel does not compute the shape, or the
            device has no units for its data type.
        WrongTypeError: the shape, the config or the device is something else.
        NoDeviceError: no device is named and there is no GPU.
        NoFeasibleConfigError: no kernel computes the shape, or the config does not compile.
    """
    require_shape(shape)
    spec = device_of(device)
    require_units(shape.dtype, spec)
    if config is None:
        config, measured_us = _best(shape, spec)
    else:
        measured_us = None
        require_type("config", config, KernelConfig, 'Such as KernelConfig("flash_fwd", 128, 64, 4, 3).')
        _require_valid(config, shape, spec)
    code = compile_config(config, shape, spec.limits)
    return analyse(get_kernel(config.kernel), config, shape, spec, code, measured_us=measured_us)


def _best(shape: AttentionShape, device: DeviceSpec) -> tuple[KernelConfig, float | None]:
    """Return the config that `attention` takes, and its time where it is one of this very shape, device and code."""
    found = best_config(shape, device)
    if found.config is None:
        raise NoFeasibleConfigError(
            f"No kernel computes {shape.label} on {device.name}, so there is nothing to explain. PyTorch's "
            "scaled_dot_product_attention would."
        )
    return found.config, found.time_us if found.rung is Rung.EXACT else None


def _require_valid(config: KernelConfig, shape: AttentionShape, device: DeviceSpec) -> None:
    kernel = get_kernel(config.kernel)
    problem = kernel.unsupported(shape, device.limits)
    problems = (problem,) if problem else kernel.rule_violations(config, shape, device.limits)
    if problems:
        raise UsageError(" ".join(problems))
