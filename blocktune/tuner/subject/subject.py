"""All that a search knows of what it tunes: `Subject`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from blocktune.db.records.records import Environment, Outcome, Trial
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.assignment import Assignment
from blocktune.tuner.candidates.starting_configs import Contenders


class Subject(ABC):
    """One problem on one device, with the configs that may solve it.

    device: where. environment: the software that results depend on. contenders: the space, and the configs in it that
    have a name.
    """

    device: DeviceSpec
    environment: Environment
    contenders: Contenders

    @property
    @abstractmethod
    def problem(self) -> AttentionShape:
        """What is computed, as the store knows it."""

    @property
    def label(self) -> str:
        """A short name of the problem for people."""
        return self.problem.label

    @abstractmethod
    def source_hash(self, config: KernelConfig) -> str | None:
        """Return the digest of the source that a config is compiled from; None where the kernel is not searched."""

    @abstractmethod
    def usefulness(self, config: KernelConfig) -> float:
        """Return how a config ranks before it is compiled, the most promising lowest."""

    @abstractmethod
    def predict(self, config: KernelConfig, resources: KernelResources) -> float | None:
        """Return the time in microseconds that a model expects of compiled code; None where there is no model."""

    @abstractmethod
    def expected(self, predicted_us: Mapping[KernelConfig, float]) -> KernelConfig | None:
        """Return which of some compiled configs what was measured of like problems speaks for; None where nothing
        was."""

    @abstractmethod
    def trial(self, config: KernelConfig, outcome: Outcome, **fields: object) -> Trial:
        """Return a trial of this subject; `fields` are those of `Trial`."""

    def assignment(self, trials: int, seed: int) -> Assignment:
        """Return what a strategy gets of this subject for a number of trials."""
        contenders = self.contenders
        return Assignment(
            space=contenders.space, first=contenders.first, usefulness=self.usefulness, trials=trials, seed=seed
        )
