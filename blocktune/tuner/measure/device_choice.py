"""Which device a run is for."""

from blocktune.db.records.records import Regime
from blocktune.kernels.hardware import device as devices
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import UsageError

DEFAULT_DEVICE = "h200"
"""For which device a machine without a GPU predicts unless one is named."""


def choose_device(name: str | None = None) -> DeviceSpec:
    """Return the named device, as it is here if it is here; without a name the first GPU here, else `DEFAULT_DEVICE`.

    Raises:
        UnknownDeviceError: the catalogue does not hold the name.
    """
    present = devices.present_devices()
    if name is None:
        return present[0] if present else devices.device_named(DEFAULT_DEVICE)
    named = devices.device_named(name)
    return next((device for device in present if device.key == named.key), named)


def is_present(device: DeviceSpec) -> bool:
    """Return whether CUDA can use the device here; one that the catalogue or NVML names can only be predicted."""
    return device.source in ("driver", "torch")


def alike_devices(device: DeviceSpec) -> tuple[tuple[DeviceSpec, ...], tuple[DeviceSpec, ...]]:
    """Return the GPUs here that are of a device's kind, and those that are not, in the order of CUDA.

    Kinds are never mixed in one search. A GPU that tells no UUID cannot be given to a process of its own, so it is
    alike only where it is the device itself.
    """
    present = devices.present_devices()
    alike = tuple(one for one in present if one == device or (one.key == device.key and one.uuid is not None))
    return alike, tuple(one for one in present if one not in alike)


def visible(device: DeviceSpec) -> dict[str, str]:
    """Return the environment variables by which a process sees this GPU alone.

    Where there is one GPU none are needed, and the only spelling of a MIG slice is the one it was made visible with.
    """
    return {"CUDA_VISIBLE_DEVICES": device.uuid} if device.uuid and len(devices.present_devices()) > 1 else {}


def require_no_regime(regime: Regime | None, device: DeviceSpec) -> None:
    """Check that no regime was given where nothing will be measured.

    Raises:
        UsageError: one was.
    """
    if regime is not None:
        raise UsageError(
            f"The regime {regime} can only be measured, but {device.name} is not in this machine: predictions have no "
            "regime. Leave it out."
        )
