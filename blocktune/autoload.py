"""What PyTorch calls at the end of `import torch`, as an entry point of the group `torch.backends`.

It does nothing unless BLOCKTUNE_AUTOTUNE is 1. Then every `@triton.autotune` of the process is tuned by blocktune, as
after `blocktune.install()`, and no program has to be changed for it. A value that is no switch fails the import.
"""

from blocktune.kernels.files.switch import is_switched_on

VARIABLE = "BLOCKTUNE_AUTOTUNE"


def install_by_environment() -> None:
    """Install the tuner where the environment says so.

    Raises:
        UsageError: the environment says neither yes nor no.
    """
    if is_switched_on(VARIABLE, "Set it to 1 to tune every `@triton.autotune`, or unset it."):
        from blocktune.kernels.tuned.settings import Settings
        from blocktune.tuner.tuned.install import install_without_compiler

        # every process inherits the variable, and most launch no kernel
        install_without_compiler(only=(), without=(), settings=Settings(), frozen=None)
