"""What the kernels of the ladder have in common: they compute any plain forward and compete only when named."""

from typing import Any, ClassVar

from blocktune.kernels.config import KernelConfig
from blocktune.kernels.device import ComputeLimits
from blocktune.kernels.flash_kernel import MAX_HEAD_DIM, MIN_HEAD_DIM
from blocktune.kernels.kernel import AttentionKernel
from blocktune.kernels.shape import AttentionShape


class HistoricalKernel(AttentionKernel):
    """Base of kernels that are kept to be compared with."""

    historical = True
    largest_head_dim: ClassVar[int] = MAX_HEAD_DIM
    preferences: ClassVar[tuple[tuple[int, ...], ...]]
    """Default configs as values of `parameters`, best first."""

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        for name, dim in (("head_dim", shape.head_dim), ("head_dim_v", shape.head_dim_v)):
            if not MIN_HEAD_DIM <= dim <= self.largest_head_dim:
                return (
                    f"`{MIN_HEAD_DIM} <= {name} <= {self.largest_head_dim}` must hold for {self.name}, but got "
                    f"{name}={dim}"
                )
        smallest = KernelConfig.of(self.name, {name: choices[0] for name, choices in self.parameters.items()})
        needed, limit = self.shared_bytes(smallest, shape, limits), limits.shared_per_block_optin_bytes
        if needed > limit:
            return (
                f"`shared memory of the smallest blocks <= {limit} B` must hold for {self.name} on compute capability "
                f"{limits.name}, but head_dim {shape.head_dim} in {shape.dtype} needs {needed} B"
            )
        return None

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        names = tuple(self.parameters)
        candidates = [KernelConfig.of(self.name, dict(zip(names, values, strict=True))) for values in self.preferences]
        feasible = (config for config in candidates if not self.violations(config, shape, limits))
        return next(feasible, candidates[-1])


def strides_of(*tensors: Any) -> tuple[int, ...]:
    """The strides of (batch, head, row) of each tensor, in elements."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])
