"""A user's own sampler, named on the command line by its path."""

from importlib import import_module
from typing import TYPE_CHECKING

from blocktune.kernels.values.errors import UsageError

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


def sampler_class(path: str) -> "type[BaseSampler]":
    """Return a user's own sampler by its path, package.module:Class.

    Raises:
        UsageError: there is no such class, or it is not derived from Optuna's `BaseSampler`.
    """
    from optuna.samplers import BaseSampler

    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"The sampler {path!r} cannot be imported: {error}. Name it as package.module:Class, and put its folder on "
            "PYTHONPATH."
        ) from None
    if not (isinstance(found, type) and issubclass(found, BaseSampler)):
        raise UsageError(f"{path!r} is not a sampler. Name a class that is derived from optuna.samplers.BaseSampler.")
    return found
