"""`blocktune.occupancy`: the occupancy of a block whose resources are known, on a device by name."""

from blocktune.kernels.hardware.device import DeviceSpec, device_of, limits_for, parse_cc
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.errors import UsageError, require_type
from blocktune.tuner.occupancy import calculator
from blocktune.tuner.occupancy.calculator import Occupancy


def occupancy(
    *,
    num_warps: int,
    registers: int,
    shared_bytes: int,
    static_shared_bytes: int = 0,
    barriers: int = 1,
    carveout_percent: int | None = None,
    device: DeviceSpec | str | None = None,
    cc: str | None = None,
) -> Occupancy:
    """Return how many blocks fit a multiprocessor, and what limits them; `print` says it in words.

    What `explain` returns has the occupancy of a kernel that is compiled for it.

    Args:
        num_warps: warps of a block.
        registers: registers of a thread.
        shared_bytes: dynamic shared memory of a block, without the system's reserve.
        static_shared_bytes: shared memory of a block that is fixed at compile time.
        barriers: named barriers of a block.
        carveout_percent: shared memory's part of the L1, 0 to 100; None leaves the multiprocessor its maximum.
        device: a DeviceSpec or a name; by default the current GPU.
        cc: a compute capability such as `9.0`, instead of a device.

    Raises:
        UsageError: a resource or the percentage is out of range, or both a device and a compute capability are given.
        UnknownDeviceError: no device has this name, or the table has no such compute capability.
        NoDeviceError: neither is given and there is no GPU.
    """
    resources = KernelResources(
        registers=registers,
        shared_bytes=shared_bytes,
        static_shared_bytes=static_shared_bytes,
        num_warps=num_warps,
        barriers=barriers,
        tensor_cores="none",
    )
    return calculator.occupancy(resources, _limits(device, cc), carveout_percent=carveout_percent)


def _limits(device: DeviceSpec | str | None, cc: str | None) -> ComputeLimits:
    if cc is None:
        return device_of(device).limits
    if device is not None:
        name = device if isinstance(device, str) else device.name
        raise UsageError(
            "`device` and `cc` exclude each other, since a device has its own compute capability, but got "
            f"device={name!r} and cc={cc!r}. Leave one of them out."
        )
    require_type("cc", cc, str, 'Write it as text, such as "9.0".')
    return limits_for(parse_cc(cc))
