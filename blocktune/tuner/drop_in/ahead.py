"""The process that compiles, started while the program still imports the library whose kernels it will launch.

Imports take seconds, and the process that compiles needs its own: first PyTorch and Triton, then the library. It begins
with `install()` where the store knows no kernel at all, and with the first autotuned kernel of a package of which the
store knows none. Elsewhere nothing is likely to be compiled, and it begins at the first miss.
"""

import logging
import multiprocessing
import threading

from triton.runtime.cache import triton_key

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import BlocktuneError
from blocktune.runtime.autotuned.boundary import tolerance
from blocktune.runtime.autotuned.frozen import is_given_winners
from blocktune.runtime.autotuned.settings import Settings
from blocktune.runtime.store_reader.sources import autotuned_rows
from blocktune.tuner.compile_server.compile_ahead import compile_ahead
from blocktune.tuner.measure.telemetry import nvml_devices

logger = logging.getLogger("blocktune")

_packages: set[str] = set()
"""Those of which a kernel was seen."""


def begin(settings: Settings) -> None:
    """Start the process that compiles, in the background, where the store knows no kernel of the GPUs here."""
    if _may_tune(settings):
        _in_background("torch._dynamo", "")  # the larger part of what most libraries import


def prepare(kernel: str, settings: Settings) -> None:
    """Let that process import the package of a kernel, `module:function`, in the background, where the store knows no
    kernel of it; once for each package."""
    package = _package_of(kernel)
    if package != "__main__" and package not in _packages and _may_tune(settings):
        _packages.add(package)
        _in_background(kernel, package)


def _may_tune(settings: Settings) -> bool:
    """Return whether this process may come to tune something: not a strict one, one with a frozen file, or a child of
    `multiprocessing`, of which there may be many."""
    alone = multiprocessing.parent_process() is None
    return alone and not settings.of_environment().strict and not is_given_winners()


def _in_background(kernel: str, package: str) -> None:
    threading.Thread(target=_start, args=(kernel, package), name="blocktune-ahead", daemon=True).start()


def _start(kernel: str, package: str) -> None:
    with tolerance(kernel or "The first kernel", "a process that compiles"):
        devices = nvml_devices()
        if devices and not any(_knows(package, device) for device in devices):
            compile_ahead.start(kernel)
            triton_key()  # Triton's hash of itself takes as long as a compile, and a launch would wait for it


def _knows(package: str, device: DeviceSpec) -> bool:
    """Return whether the store has winners of a package's kernels, or of any kernel where none is named, on a GPU."""
    try:
        rows = autotuned_rows(device)
    except BlocktuneError as error:  # which a miss says as well, where it matters
        logger.debug("No stored configs of %s: %s", package or "any package", error)
        return False
    return any(not package or _package_of(str(row["kernel"])) == package for row in rows)


def _package_of(kernel: str) -> str:
    return kernel.partition(":")[0].partition(".")[0]
