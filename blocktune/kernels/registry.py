"""The kernels that compete. A new one is a folder and one line here; the first that fits gives the default.

A kernel that lives elsewhere is registered by a program, or named to every command by an environment variable:

    register(MyForward())
    BLOCKTUNE_KERNELS=my_package.my_module:MyForward tune run --seq 8192 --dim 64 --kernel my_fwd
"""

import difflib
import importlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.files.variables import KERNEL_CLASSES
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.historical.padded import FlashForwardPadded
from blocktune.kernels.historical.transposed import FlashForwardTransposed
from blocktune.kernels.historical.v1 import FlashV1
from blocktune.kernels.historical.v2 import FlashV2
from blocktune.kernels.hopper.backward.kernel import FlashBackwardHopper
from blocktune.kernels.hopper.decode.kernel import FlashDecodeHopper
from blocktune.kernels.hopper.decode8.kernel import FlashDecode8Hopper
from blocktune.kernels.hopper.decode8.ring.kernel import FlashDecode8Ring
from blocktune.kernels.hopper.forward.kernel import FlashForwardHopper
from blocktune.kernels.hopper.forward.short.kernel import FlashForwardHopperShort
from blocktune.kernels.hopper.forward.split.kernel import FlashForwardHopperSplit
from blocktune.kernels.hopper.fp8.kernel import FlashForwardFp8
from blocktune.kernels.hopper.sparse.kernel import FlashBackwardHopperSparse
from blocktune.kernels.portable.backward.fused import FlashBackwardFused
from blocktune.kernels.portable.backward.sparse import FlashBackwardSparse
from blocktune.kernels.portable.backward.split import FlashBackwardSplit
from blocktune.kernels.portable.decode.kernel import FlashDecode
from blocktune.kernels.portable.decode8.kernel import FlashDecode8
from blocktune.kernels.portable.forward.general import FlashForwardGeneral
from blocktune.kernels.portable.forward.pointers import FlashForward
from blocktune.kernels.portable.forward.sparse import FlashForwardSparse
from blocktune.kernels.portable.forward.tma import FlashForwardTma
from blocktune.kernels.values.errors import UnknownKernelError, UsageError
from blocktune.kernels.values.shape import AttentionShape

logger = logging.getLogger("blocktune")

KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel
    for kernel in (
        FlashBackwardHopper(),
        FlashBackwardSplit(),
        FlashBackwardFused(),
        FlashForwardHopperSplit(),
        FlashDecodeHopper(),
        FlashDecode(),
        FlashDecode8Hopper(),
        FlashDecode8Ring(),
        FlashDecode8(),
        FlashForwardHopperShort(),
        FlashForwardHopper(),
        FlashForwardFp8(),
        FlashForwardTma(),
        FlashForward(),
        FlashForwardSparse(),
        FlashBackwardHopperSparse(),
        FlashBackwardSparse(),
        FlashForwardPadded(),
        FlashForwardTransposed(),
        FlashV1(),
        FlashV2(),
        FlashForwardGeneral(),
    )
}

problems: list[str] = []
"""Why classes that the environment names are not among the kernels."""


def get_kernel(name: str) -> AttentionKernel:
    """Return the kernel with this name.

    Raises:
        UnknownKernelError: no kernel has it.
    """
    try:
        return KERNELS[name]
    except KeyError:
        near = difflib.get_close_matches(name, KERNELS, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"The kernels are {', '.join(KERNELS)}."
        raise UnknownKernelError(" ".join([f"No such kernel: {name!r}. {hint}", *problems])) from None


def competing() -> tuple[AttentionKernel, ...]:
    """Return the kernels that are searched unless others are named, in registry order."""
    return tuple(kernel for kernel in KERNELS.values() if not kernel.historical)


def kernels_for(shape: AttentionShape, limits: ComputeLimits) -> tuple[AttentionKernel, ...]:
    """Return the kernels that compete for this shape on this compute capability, in registry order but for those that
    step back."""
    return tuple(sorted(_able(shape, limits), key=lambda kernel: kernel.steps_back(shape)))


def default_kernel(shape: AttentionShape, limits: ComputeLimits) -> AttentionKernel | None:
    """Return the first of `kernels_for`, whose default an untuned shape may get; None where no kernel computes it. The
    kernels after it are not tried, since a list of a large store does this for thousands of shapes."""
    stepped_back = None
    for kernel in _able(shape, limits):
        if not kernel.steps_back(shape):
            return kernel
        stepped_back = stepped_back or kernel
    return stepped_back


def _able(shape: AttentionShape, limits: ComputeLimits) -> Iterator[AttentionKernel]:
    """Yield the kernels that compute a shape, in registry order. Those of the other direction need not say why not."""
    of_its_direction = (kernel for kernel in competing() if kernel.direction is shape.direction)
    return (kernel for kernel in of_its_direction if kernel.unsupported(shape, limits) is None)


def register(kernel: AttentionKernel) -> ExitStack:
    """Add a kernel after those that compete, in this process and in those that it starts from now on.

        register(MyForward())           # for good
        with register(MyForward()):     # while the block runs
            ...

    Args:
        kernel: of a class that a module on the path of Python defines, and that is made without arguments: the
            processes that compile and measure make one of their own.

    Returns:
        A context that takes the kernel away again when it is left.

    Raises:
        UsageError: its name is taken, or no other process can import its class.
    """
    path = f"{type(kernel).__module__}:{type(kernel).__qualname__}"
    if kernel.name in KERNELS:
        raise UsageError(f"Names of kernels must be unique, but {kernel.name!r} is taken. Choose another one.")
    if path.startswith("__main__:") or "<locals>" in path:
        raise UsageError(
            f"A kernel's class must be importable by the processes that compile, but got {path}. Move it to a module."
        )
    KERNELS[kernel.name] = kernel
    _name_to_others([*(named for named in KERNEL_CLASSES.items() if named != path), path])
    context = ExitStack()
    context.callback(_withdraw, kernel.name, path)
    return context


def _withdraw(name: str, path: str) -> None:
    del KERNELS[name]
    _name_to_others([named for named in KERNEL_CLASSES.items() if named != path])


def _name_to_others(paths: list[str]) -> None:
    """Name these classes, and no other ones, to the processes that this one starts."""
    KERNEL_CLASSES.set_to(",".join(paths) or None)


def _load(path: str) -> None:
    """Add the kernel of a class that the environment names, unless its module has registered it.

    Raises:
        UsageError: there is no such class, or its name is taken.
    """
    module, _, name = path.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)()
    except Exception as error:  # the module of a stranger raises what it likes
        raise UsageError(
            f"{path!r} cannot be imported: {error}. `{KERNEL_CLASSES.name}` names classes of kernels as module:class, "
            "separated by commas. Correct it, or put the module on PYTHONPATH."
        ) from error
    if not isinstance(made, AttentionKernel):
        raise UsageError(f"`{KERNEL_CLASSES.name}` must name subclasses of AttentionKernel, but got {path}.")
    if type(KERNELS.setdefault(made.name, made)) is not type(made):
        raise UsageError(f"Names of kernels must be unique, but {made.name!r} of {path} is taken.")


def _load_named() -> None:
    """Add the kernels that the environment names. One that cannot be added costs a warning: a program that imports
    attention inherits the variable, and `get_kernel` says why a kernel is missing."""
    for path in KERNEL_CLASSES.items():
        try:
            _load(path)
        except UsageError as error:
            problems.append(str(error))
            logger.warning("%s", error)


_load_named()
