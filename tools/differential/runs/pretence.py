"""The CPU as a GPU of the catalogue, for kernels in Triton's interpreter (TRITON_INTERPRET=1)."""

from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.dispatch import obstacles, resolver


def pretend(name: str) -> None:
    """From now on the dispatcher of this process takes tensors on the CPU for tensors on this device."""
    device = device_named(name)
    obstacles.KERNEL_DEVICE = "cpu"
    vars(resolver)["current_device"] = lambda index: device
