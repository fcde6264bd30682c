"""What a search is about, and how long it may take."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from blocktune.db.records.records import Environment, Outcome, Trial
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is tuned, where, and with which software."""

    device: DeviceSpec
    environment: Environment
    shape: AttentionShape
    kernels: Mapping[str, AttentionKernel]

    def trial(self, config: KernelConfig, outcome: Outcome, **fields: object) -> Trial:
        """Return a trial of this subject; `fields` are those of `Trial`."""
        trial = Trial(
            device=self.device,
            environment=self.environment,
            shape=self.shape,
            config=config,
            kernel_hash=self.kernels[config.kernel].source_hash,
            outcome=outcome,
        )
        return dataclasses.replace(trial, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """When the search stops.

    trials: after this many, those of earlier runs included.
    seconds: after this many from now.
    """

    trials: int
    seconds: float
