"""What the kernels of the ladder have in common: they compute any plain forward and compete only when named."""

from typing import Any, ClassVar

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.layouts.forward_tiles import KNOWN_ALIGNMENT
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape


class HistoricalKernel(AttentionKernel):
    """Base of kernels that are kept to be compared with."""

    historical = True
    preferences: ClassVar[tuple[tuple[int, ...], ...]]
    """Default configs as values of `parameters`, best first."""

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        names = tuple(self.parameters)
        candidates = [KernelConfig.of(self.name, dict(zip(names, values, strict=True))) for values in self.preferences]
        return self.first_fitting(candidates, shape, limits)


def strides_of(*tensors: Any) -> tuple[int, ...]:
    """Return the strides of (batch, head, row) of each tensor, in elements."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def is_aligned(row_elements: int) -> bool:
    """Return whether Triton knows how contiguous rows of a number of elements are aligned."""
    return row_elements % KNOWN_ALIGNMENT == 0
