"""The process that compiles, started while the program still imports the library whose kernels it will launch.

An import of a library takes seconds, and the process that compiles needs its own. It begins with the first autotuned
kernel of a package, unless nothing of the package is likely to be compiled: then it begins at the first miss.
"""

import logging
import multiprocessing
import threading

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.stored.store_file import SqliteRows, user_store_path
from blocktune.kernels.stored.store_views import USER_DISPATCH
from blocktune.kernels.tuned.frozen import is_given_winners
from blocktune.kernels.tuned.settings import Settings
from blocktune.kernels.values.errors import StoreError
from blocktune.tuner.jitted.compile_ahead import compile_ahead
from blocktune.tuner.measure.telemetry import nvml_devices

logger = logging.getLogger("blocktune")

_packages: set[str] = set()
"""Those of which a kernel was seen."""


def prepare(kernel: str, settings: Settings) -> None:
    """Let another process import the package of a kernel, `module:function`, once for each package.

    It does so in the background, and not where a miss is unlikely: no GPU, a strict process, a frozen file, or a store
    that knows kernels of the package; nor in a child of `multiprocessing`, of which there may be many.
    """
    package = _package_of(kernel)
    if package in _packages:
        return
    _packages.add(package)
    alone = multiprocessing.parent_process() is None
    if alone and package != "__main__" and not settings.of_environment().strict and not is_given_winners():
        threading.Thread(target=_start, args=(kernel,), name="blocktune-ahead", daemon=True).start()


def _start(kernel: str) -> None:
    devices = nvml_devices()
    if devices and not any(_knows(_package_of(kernel), device) for device in devices):
        compile_ahead.start(kernel)


def _knows(package: str, device: DeviceSpec) -> bool:
    """Return whether the store has winners of a package's kernels on such a device."""
    try:
        rows = SqliteRows(user_store_path(), USER_DISPATCH).read(device)
    except StoreError as error:  # which a miss says as well, where it matters
        logger.debug("No stored configs of %s: %s", package, error)
        return False
    return any(_package_of(str(row["kernel"])) == package for row in rows)


def _package_of(kernel: str) -> str:
    return kernel.partition(":")[0].partition(".")[0]
