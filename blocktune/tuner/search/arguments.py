"""How a search goes, and what the arguments of `blocktune.tune` must be before anything is opened or started."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blocktune.db.records.records import Objective, Regime
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import require_type
from blocktune.kernels.values.shape import AttentionShape, require_shape
from blocktune.tuner.correctness.memory import require_memory
from blocktune.tuner.cost.roofline import require_rates, require_units
from blocktune.tuner.measure.device_choice import is_present, require_no_regime
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.protocol import DEFAULT_REGIME
from blocktune.tuner.measure.telemetry import require_energy
from blocktune.tuner.search.report import Budget
from blocktune.tuner.search.strategies import DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How a search goes; see the arguments of `tune`."""

    budget: Budget = field(default_factory=Budget)
    exhaustive: bool = False
    regime: Regime | None = None
    objective: Objective = Objective.TIME
    sampler: str = DEFAULT
    study: str | None = None
    seed: int = 0

    @property
    def terms(self) -> Terms:
        """On which terms configs are measured."""
        return Terms(seed=self.seed, regime=self.regime or DEFAULT_REGIME, race=not self.exhaustive)


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


def require_possible(shape: AttentionShape, device: DeviceSpec, regime: Regime | None, objective: Objective) -> None:
    """Check that a device can hold the shape, has units for its type, and can tell times in a regime, or energies.

    Raises:
        UsageError: it cannot.
    """
    require_units(shape.dtype, device)
    require_memory(shape, device)
    if not is_present(device):
        require_rates(device)
        require_no_regime(regime, device)
    if objective is Objective.ENERGY:
        require_energy(device)
