"""The kernels that compete. A new one is its own file and one line here; the first that fits gives the default."""

from blocktune.kernels.device import ComputeLimits
from blocktune.kernels.errors import UnknownKernelError
from blocktune.kernels.flash_bwd_fused import FlashBackwardFused
from blocktune.kernels.flash_bwd_hopper import FlashBackwardHopper
from blocktune.kernels.flash_bwd_sparse import FlashBackwardSparse
from blocktune.kernels.flash_bwd_split import FlashBackwardSplit
from blocktune.kernels.flash_decode import FlashDecode
from blocktune.kernels.flash_decode_hopper import FlashDecodeHopper
from blocktune.kernels.flash_fwd import FlashForward
from blocktune.kernels.flash_fwd_fp8 import FlashForwardFp8
from blocktune.kernels.flash_fwd_general import FlashForwardGeneral
from blocktune.kernels.flash_fwd_hopper import FlashForwardHopper
from blocktune.kernels.flash_fwd_hopper_short import FlashForwardHopperShort
from blocktune.kernels.flash_fwd_sparse import FlashForwardSparse
from blocktune.kernels.flash_fwd_tma import FlashForwardTma
from blocktune.kernels.flash_padded import FlashForwardPadded
from blocktune.kernels.flash_transposed import FlashForwardTransposed
from blocktune.kernels.flash_v1 import FlashV1
from blocktune.kernels.kernel import AttentionKernel
from blocktune.kernels.shape import AttentionShape

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
        raise UnknownKernelError(f"`kernel` must be one of {', '.join(KERNELS)}, but got {name!r}.") from None


def competing() -> tuple[AttentionKernel, ...]:
    """The kernels that are searched unless others are named, in registry order."""
    return tuple(kernel for kernel in KERNELS.values() if not kernel.historical)


def kernels_for(shape: AttentionShape, limits: ComputeLimits) -> tuple[AttentionKernel, ...]:
    """The kernels that compete for this shape on this compute capability, in registry order."""
    return tuple(kernel for kernel in competing() if kernel.unsupported(shape, limits) is None)
