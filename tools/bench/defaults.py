"""The configs that untuned calls get, for programs that launch many shapes."""

from collections.abc import Iterable

from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.registry import default_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile_server.farm import CompileFarm


def default_of(shape: AttentionShape) -> KernelConfig:
    """Return the config of an untuned call on the GPU that is here."""
    limits = current_device().limits
    kernel = default_kernel(shape, limits)
    assert kernel is not None, shape.label
    return kernel.default_config(shape, limits)


def compile_ahead(shapes: Iterable[AttentionShape], workers: int = 12) -> None:
    """Compile the defaults of shapes side by side, into Triton's cache."""
    cc = current_device().limits.cc
    with CompileFarm(workers=workers) as farm:
        configs = [(default_of(shape), shape) for shape in shapes]
        for submitted in [farm.submit(config.kernel, config, shape, cc) for config, shape in configs]:
            submitted.result()
