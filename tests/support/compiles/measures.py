"""What tests of several kernels ask of compiled code."""

from collections.abc import Sequence
from typing import Any

from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.compiler import compile_config, compiled_code, ptxas_logs, resources_of
from tests.support.compiles.remembered import remembered


def launched_specs(kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
    """Return the specs of all that a config launches, the one that takes longest at the end."""
    return (*kernel.further_specs(config, shape), kernel.compile_spec(config, shape))


def compile_resources(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
) -> KernelResources:
    """Return the resources of a config's main function, from memory where they are known."""
    return KernelResources(**_resources(launched_specs(kernel, config, shape), cc))


def fresh_resources(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
) -> KernelResources:
    """Return the resources that `compile_config` finds now."""
    with ptxas_logs() as logs:
        return compile_config(kernel, config, shape, cc, logs)[0]


@remembered
def _resources(specs: Sequence[CompileSpec], cc: tuple[int, int]) -> dict[str, Any]:
    with ptxas_logs() as logs:
        for spec in specs[:-1]:
            compiled_code(spec, cc)
        heard = len(logs)
        return resources_of(compiled_code(specs[-1], cc), "\n".join(logs[heard:])).to_json()
