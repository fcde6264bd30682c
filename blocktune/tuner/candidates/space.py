"""The search space: the configs of a kernel, apart from those that cannot run or are certainly slow."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Self

from blocktune.db.records.records import ConfigT
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.config import Plain


@dataclass(frozen=True, slots=True)
class Dropped(Generic[ConfigT]):
    """A config that is not tried, with the reasons: rules that it breaks, or that it is certainly slow."""

    config: ConfigT
    reasons: tuple[str, ...]

    @property
    def rule(self) -> str:
        """The first broken rule without the config's own values, to count by."""
        return self.reasons[0].split(", but ", 1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSpace(Generic[ConfigT]):
    """The configs that may be tried.

    feasible: in the fixed order that breaks ties. dropped: those that are not tried. unsupported: kernels that cannot
    solve the problem at all, with the reason.
    """

    feasible: tuple[ConfigT, ...]
    dropped: tuple[Dropped[ConfigT], ...] = ()
    unsupported: Mapping[str, str] = field(default_factory=dict)

    def with_configs(self, configs: Iterable[ConfigT]) -> Self:
        """Return the space with these feasible configs in front, whether or not the kernels' parameters list them."""
        return replace(self, feasible=tuple(dict.fromkeys((*configs, *self.feasible))))

    @property
    def dropped_counts(self) -> dict[str, int]:
        """How many configs each rule dropped, the most first."""
        return dict(Counter(entry.rule for entry in self.dropped).most_common())

    def choices(self, name: str) -> tuple[Plain, ...]:
        """Return the values of one parameter among the feasible configs, numbers first and ascending."""
        found = {config.parameters[name] for config in self.feasible if name in config.parameters}
        return tuple(sorted(found, key=_order))

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """All searched parameters of all kernels, in the order in which they first appear."""
        return tuple(dict.fromkeys(name for config in self.feasible for name in config.parameters))


def _order(value: Plain) -> tuple[bool, float, str]:
    return (False, value, "") if isinstance(value, int | float) else (True, 0.0, str(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace(ConfigSpace[KernelConfig]):
    """The configs of all kernels for one shape on one compute capability, in the order of the registry and of each
    kernel's parameters."""

    shape: AttentionShape
    limits: ComputeLimits

    @classmethod
    def build(
        cls,
        shape: AttentionShape,
        limits: ComputeLimits,
        kernels: Iterable[AttentionKernel],
        *,
        exhaustive: bool = False,
    ) -> "SearchSpace":
        """Cross every kernel's parameters and ask the kernel which configs it leaves out, by its own `omissions`; of an
        exhaustive search by `violations` alone, which keeps what is slow."""
        feasible: list[KernelConfig] = []
        dropped: list[Dropped] = []
        unsupported: dict[str, str] = {}
        for kernel in kernels:
            reason = kernel.unsupported(shape, limits)
            if reason is not None:
                unsupported[kernel.name] = reason
                continue
            for config in configs_of(kernel):
                reasons = (kernel.violations if exhaustive else kernel.omissions)(config, shape, limits)
                if reasons:
                    dropped.append(Dropped(config, reasons))
                else:
                    feasible.append(config)
        return cls(
            shape=shape, limits=limits, feasible=tuple(feasible), dropped=tuple(dropped), unsupported=unsupported
        )


def configs_of(kernel: AttentionKernel) -> Iterable[KernelConfig]:
    """Yield every combination of the kernel's parameters, feasible or not."""
    names = tuple(kernel.parameters)
    for values in itertools.product(*(kernel.parameters[name] for name in names)):
        yield KernelConfig.of(kernel.name, dict(zip(names, values, strict=True)))
