"""`--gpus`: how many GPUs of this machine share the shapes."""

from typing import TYPE_CHECKING

from blocktune.cli.output.render import note
from blocktune.kernels.values.errors import NoDeviceError, UsageError
from blocktune.tuner.measure.device_choice import alike_devices, is_present

if TYPE_CHECKING:
    from blocktune.kernels.hardware.device import DeviceSpec

ALL = "all"


def wanted_gpus(text: str | None) -> int | None:
    """Return the number that --gpus names; None is all.

    Raises:
        UsageError: it is neither a positive number nor `all`.
    """
    if text is None or text == ALL:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"`--gpus` must be a number from 1 on or `{ALL}`, but got {text!r:.80}.")
    return int(text)


def gpus_for(device: "DeviceSpec", wanted: int | None, shapes: int) -> tuple["DeviceSpec", ...]:
    """Return the GPUs that share the shapes, at most one for each shape.

    All are of the device's kind; GPUs of another kind are left out with a note. There are none where the device is not
    here.

    Raises:
        NoDeviceError: more are wanted than are here.
    """
    if not is_present(device):
        if wanted is not None:
            raise NoDeviceError(f"`--gpus` needs a GPU, but {device.name} is not in this machine. Leave it out.")
        return ()
    alike, unlike = alike_devices(device)
    if wanted is not None and wanted > len(alike):
        raise NoDeviceError(
            f"`--gpus {wanted}` needs {wanted} {device.name}, but this machine has {len(alike)}. Ask for fewer."
        )
    if shapes > 1 and wanted != 1:
        for other in unlike:
            note(f"{other.name} is left out: unlike {device.name}, and kinds are not mixed")
    return alike[: min(wanted or len(alike), shapes)]
