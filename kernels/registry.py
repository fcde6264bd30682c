"""The kernels that compete. A new one is its own file and one line here; the first that fits gives the default."""

import difflib

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.historical.padded import FlashForwardPadded
from blocktune.kernels.historical.transposed import FlashForwardTransposed
from blocktune.kernels.historical.v1 import FlashV1
from blocktune.kernels.historical.v2 import FlashV2
from blocktune.kernels.hopper.backward.kernel import FlashBackwardHopper
from blocktune.kernels.hopper.decode.kernel import FlashDecodeHopper
from blocktune.kernels.hopper.forward.kernel import FlashForwardHopper
from blocktune.kernels.hopper.forward.short_kernel import FlashForwardHopperShort
from blocktune.kernels.hopper.fp8.kernel import FlashForwardFp8
from blocktune.kernels.portable.backward.fused import FlashBackwardFused
from blocktune.kernels.portable.backward.sparse import FlashBackwardSparse
from blocktune.kernels.portable.backward.split import FlashBackwardSplit
from blocktune.kernels.portable.decode.kernel import FlashDecode
from blocktune.kernels.portable.forward.general import FlashForwardGeneral
from blocktune.kernels.portable.forward.pointers import FlashForward
from blocktune.kernels.portable.forward.sparse import FlashForwardSparse
from blocktune.kernels.portable.forward.tma import FlashForwardTma
from blocktune.kernels.values.errors import UnknownKernelError
from blocktune.kernels.values.shape import AttentionShape

KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel
    for kernel in (
        FlashBackwardHopper(),
        FlashBackwardSplit(),
        FlashBackwardFused(),
        FlashDecodeHopper(),
        FlashDecode(),
        FlashForwardHopperShort(),
        FlashForwardHopper(),
        FlashForwardFp8(),
        FlashForwardTma(),
        FlashForward(),
        FlashForwardSparse(),
        FlashBackwardSparse(),
        FlashForwardPadded(),
        FlashForwardTransposed(),
        FlashV1(),
        FlashV2(),
        FlashForwardGeneral(),
    )
}


def get_kernel(name: str) -> AttentionKernel:
    """The kernel with this name.

    Raises:
        UnknownKernelError: no kernel has it.
    """
    try:
        return KERNELS[name]
    except KeyError:
        near = difflib.get_close_matches(name, KERNELS, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"The kernels are {', '.join(KERNELS)}."
        raise UnknownKernelError(f"There is no kernel {name!r}. {hint}") from None


def competing() -> tuple[AttentionKernel, ...]:
    """The kernels that are searched unless others are named, in registry order."""
    return tuple(kernel for kernel in KERNELS.values() if not kernel.historical)


def kernels_for(shape: AttentionShape, limits: ComputeLimits) -> tuple[AttentionKernel, ...]:
    """The kernels that compete for this shape on this compute capability, in registry order."""
    return tuple(kernel for kernel in competing() if kernel.unsupported(shape, limits) is None)
