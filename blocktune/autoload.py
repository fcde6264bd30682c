"""What PyTorch calls at the end of `import torch`, as an entry point of the group `torch.backends`.

It does nothing unless BLOCKTUNE_AUTOTUNE is 1. Then every `@triton.autotune` of the process is tuned by blocktune, as
after `blocktune.install()`, and no program has to be changed for it.
"""

import logging

from blocktune.kernels.files.variables import AUTOTUNE

logger = logging.getLogger("blocktune")


def install_by_environment() -> None:
    """Install the tuner where the environment says so.

    Every process inherits the variable, and most launch no kernel: what goes wrong is a warning, and torch is imported.
    """
    if not AUTOTUNE.is_on():
        return
    try:
        _install()
    except Exception as error:
        logger.warning(
            "Autotuned kernels are not tuned by blocktune, although %s=1: %s: %s",
            AUTOTUNE.name,
            type(error).__name__,
            error,
        )


def _install() -> None:
    from blocktune.runtime.autotuned.settings import Settings
    from blocktune.tuner.drop_in.install import install_without_compiler

    install_without_compiler(only=(), without=(), settings=Settings(), frozen=None)
