"""Compiling a Triton kernel for a GPU that need not be here."""

from collections.abc import Mapping
from typing import Any

from blocktune.kernels.hardware.device import DeviceSpec, device_of
from blocktune.runtime.autotuned.config import Plain
from blocktune.tuner.offline.code import OfflineCode, compiled_offline
from blocktune.tuner.offline.signature import positional_signature


def compile_offline(
    kernel: Any, signature: str, parameters: Mapping[str, Plain], *, device: DeviceSpec | str
) -> OfflineCode:
    """Return a Triton kernel compiled for a device, with its registers, shared memory, spills and occupancy.

    Args:
        kernel: a function of `triton.jit`, with or without `autotune`.
        signature: the types of its arguments in their order, as Triton spells them: `*bf16, *bf16, i32:16`, where
            `:16` means divisible by 16.
        parameters: its constants and launch options, such as `{"BLOCK": 512, "num_warps": 4}`.
        device: a DeviceSpec or a name, as `tune devices` lists them; it need not be here.

    Raises:
        UnknownDeviceError: no device has this name.
        UsageError: a type or a constant is missing or names nothing.
        NoFeasibleConfigError: it does not compile.
    """
    return compiled_offline(kernel, positional_signature(kernel, signature), parameters, device_of(device).limits)
