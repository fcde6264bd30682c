"""The compiled code of a single config."""

from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.occupancy.compiled_code import CompiledCode

TIMEOUT_S = 300.0
"""More than a search gives one of many: whoever asks for a config waits for it, also on a busy machine."""


def compile_config(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> CompiledCode:
    """Return the code of a config, compiled in a process of its own since a compile may abort its process.

    Raises:
        NoFeasibleConfigError: the config does not compile.
    """
    with CompileFarm(workers=1, timeout_s=TIMEOUT_S) as farm:
        result = farm.submit(config.kernel, config, shape, limits.cc).result()
    if result.resources is None:
        raise NoFeasibleConfigError(
            f"{config.label} does not compile for compute capability {limits.name} ({result.outcome}): {result.error}"
        )
    return CompiledCode(result.resources, result.shared)
