"""Who takes part in the search for a shape: the space, and the configs that are tried before all others."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blocktune.db.records.records import Best
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.base.paper_rule import paper_config
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.search.space import SearchSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders:
    """The space, with the named configs in it.

    default: what the dispatcher takes without any tuning, whichever kernels are searched, so that tuning never makes a
    call slower. paper: the paper's rule; None where it cannot run. neighbours: winners of near shapes.
    """

    space: SearchSpace
    default: KernelConfig
    paper: KernelConfig | None
    neighbours: tuple[KernelConfig, ...]

    @property
    def first(self) -> tuple[KernelConfig, ...]:
        """What is tried first, in this order. The default leads, because it is the anchor."""
        paper = () if self.paper is None else (self.paper,)
        return tuple(dict.fromkeys((self.default, *paper, *self.neighbours)))


def find_contenders(
    shape: AttentionShape, device: DeviceSpec, kernels: Sequence[AttentionKernel], nearest: Iterable[Best]
) -> Contenders:
    """The contenders of a shape on a device.

    Args:
        shape: what is computed.
        device: on what.
        kernels: those that are searched.
        nearest: stored winners of shapes like this one.

    Raises:
        NoFeasibleConfigError: no kernel computes the shape on this device, or every config breaks a rule.
    """
    limits = device.limits
    space = SearchSpace.build(shape, limits, kernels)
    able = kernels_for(shape, limits)
    if not able or not space.feasible:
        raise _nothing_feasible(space, device)
    names = {kernel.name: kernel for kernel in kernels}
    neighbours = [
        best.config
        for best in nearest
        if best.config.kernel in names and not names[best.config.kernel].violations(best.config, shape, limits)
    ]
    default = able[0].default_config(shape, limits)
    paper = paper_config(able[0], shape, limits)
    named = (default, *(() if paper is None else (paper,)), *neighbours)
    return Contenders(
        space=space.with_configs(named), default=default, paper=paper, neighbours=tuple(dict.fromkeys(neighbours))
    )


def _nothing_feasible(space: SearchSpace, device: DeviceSpec) -> NoFeasibleConfigError:
    reasons = [f"{kernel}: {reason}" for kernel, reason in space.unsupported.items()]
    reasons += [f"{count} configs: {rule}" for rule, count in space.dropped_counts.items()]
    return NoFeasibleConfigError(
        f"At least one config must be able to run {space.shape.label} on {device.name}, but none is. "
        + "; ".join(reasons)
        + ". Search other kernels, or take a smaller head dimension."
    )
