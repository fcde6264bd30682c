"""The configs that a search of a shape is expected to try first, so that they can be compiled before it begins."""

from collections.abc import Sequence

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.search.assignment import Assignment
from blocktune.tuner.search.loop import Compiler
from blocktune.tuner.search.starting_configs import find_contenders


def favourites(
    shape: AttentionShape, device: DeviceSpec, kernels: Sequence[AttentionKernel], most: int, seed: int = 0
) -> list[KernelConfig]:
    """Return up to `most` configs, the first of all first; none where no config can run."""
    try:
        contenders = find_contenders(shape, device, kernels, ())
    except NoFeasibleConfigError:
        return []
    order = Assignment(
        space=contenders.space,
        first=contenders.first,
        usefulness=lambda config: usefulness(get_kernel(config.kernel), config, shape, device),
        trials=most,
        seed=seed,
    )
    return order.by_usefulness[:most]


def compile_favourites(
    shape: AttentionShape, device: DeviceSpec, kernels: Sequence[AttentionKernel], compiler: Compiler, most: int
) -> None:
    """Have the favourites of a shape compiled in the background; a search that begins later finds them done."""
    for config in favourites(shape, device, kernels, most):
        compiler.submit(config.kernel, config, shape, device.limits.cc)
