"""The resources of a single config."""

from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.farm import CompileFarm


def compiled(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> KernelResources:
    """Return what a config takes, compiled in a process of its own since a compile may abort its process.

    Raises:
        NoFeasibleConfigError: the config does not compile.
    """
    with CompileFarm(workers=1) as farm:
        result = farm.submit(config.kernel, config, shape, limits.cc).result()
    if result.resources is None:
        raise NoFeasibleConfigError(
            f"{config.label} does not compile for compute capability {limits.name} ({result.outcome}): {result.error}"
        )
    return result.resources
