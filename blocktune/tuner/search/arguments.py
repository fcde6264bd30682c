"""What the arguments of `blocktune.tune` must be, before anything is opened or started for them."""

from collections.abc import Sequence
from typing import Any

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.values.errors import require_type
from blocktune.kernels.values.shape import require_shape
from blocktune.tuner.search.report import Budget


def require_arguments(shape: Any, budget: Any, kernels: Sequence[Any] | None) -> None:
    """Check the types of a shape, a budget or None, and kernels or None.

    Raises:
        WrongTypeError: one is something else.
    """
    require_shape(shape)
    if budget is not None:
        require_type("budget", budget, Budget, "Such as Budget(trials=40, seconds=60).")
    for kernel in kernels or ():
        require_type("kernels", kernel, AttentionKernel, "blocktune.kernels.registry.get_kernel(name) returns one.")
