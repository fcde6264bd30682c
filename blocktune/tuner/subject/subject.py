"""All that a search knows of what it tunes: `Subject`."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic

from blocktune.db.records.records import Best, ConfigT, Environment, Outcome, ProblemT, Trial
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import Origin
from blocktune.tuner.candidates.assignment import Assignment
from blocktune.tuner.candidates.contenders import Contenders
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.occupancy.calculator import Occupancy, occupancy


class Subject(ABC, Generic[ProblemT, ConfigT]):
    """One problem on one device, with the configs that may solve it.

    device: where. environment: the software that results depend on. contenders: the space, and the configs in it that
    have a name.
    """

    device: DeviceSpec
    environment: Environment
    contenders: Contenders[ConfigT]

    @property
    @abstractmethod
    def problem(self) -> ProblemT:
        """What is computed, as the store knows it."""

    @property
    def winner_problem(self) -> ProblemT:
        """What the store knows the winner by: the problem, with what it was chosen from where that matters."""
        return self.problem

    @property
    def kernel_hash(self) -> str | None:
        """The source whose trials count, where all configs are of one; None where each config has its kernel's."""
        return None

    @property
    def label(self) -> str:
        """A short name of the problem for people."""
        return self.problem.label

    @property
    def meanwhile(self) -> str:
        """What calls do as long as there is no winner, as the end of a sentence."""
        return "attention falls back to PyTorch meanwhile"

    @property
    def keeps_partial_winner(self) -> bool:
        """Whether the winner of a search that did not come to its end is stored, until the next one goes on from it."""
        return True

    @abstractmethod
    def source_hash(self, config: ConfigT) -> str | None:
        """Return the digest of the source that a config is compiled from; None where the kernel is not searched."""

    @abstractmethod
    def usefulness(self, config: ConfigT) -> float:
        """Return how a config ranks before it is compiled, the most promising lowest."""

    @abstractmethod
    def predict(self, compiled: CompileResult[ConfigT]) -> float | None:
        """Return the time in microseconds that a model expects of a compiled config; None where there is no model."""

    @abstractmethod
    def expected(self, predicted_us: Mapping[ConfigT, float]) -> ConfigT | None:
        """Return which of some compiled configs what was measured of like problems speaks for; None where nothing
        was."""

    def comparable(self, trials: Sequence[Trial[ProblemT, ConfigT]]) -> tuple[Trial[ProblemT, ConfigT], ...]:
        """Return stored trials with scores that this search can compare with its own."""
        return tuple(trials)

    def occupancy(self, resources: KernelResources) -> Occupancy:
        """Return how much of the device's multiprocessors compiled code fills."""
        return occupancy(resources, self.device.limits)

    def obstacle(self, config: ConfigT, found: Occupancy) -> str | None:
        """Return why a compiled config is not measured, if there is a reason."""
        del config
        return self.misfit(found)

    def misfit(self, found: Occupancy) -> str | None:
        """Return what keeps compiled code from running at all, if anything does."""
        if found.blocks_per_sm:
            return None
        return f"not one block fits an SM: {', '.join(found.limiters)}"

    @abstractmethod
    def launches_alike(self, config: ConfigT, other: ConfigT) -> bool:
        """Return whether two configs launch equal code in the same way, so that one stands for both."""

    def are_twins(
        self, config: ConfigT, own: KernelResources | None, other: ConfigT, theirs: KernelResources | None
    ) -> bool:
        """Return whether two configs compile to equal machine code, with these resources, and launch it in the same
        way."""
        is_equal_code = own is not None and bool(own.code_sha256) and own == theirs
        return is_equal_code and self.launches_alike(other, config)

    def trial(self, config: ConfigT, outcome: Outcome, **fields: object) -> Trial[ProblemT, ConfigT]:
        """Return a trial of this subject; `fields` are those of `Trial`."""
        source = self.kernel_hash or self.source_hash(config)
        assert source is not None  # a config that is tried is one of the space
        trial = Trial(
            device=self.device,
            environment=self.environment,
            shape=self.problem,
            config=config,
            kernel_hash=source,
            outcome=outcome,
        )
        return dataclasses.replace(trial, **fields)  # type: ignore[arg-type]

    def best(
        self, trial: Trial[ProblemT, ConfigT], origin: Origin, trials: int, **fields: object
    ) -> Best[ProblemT, ConfigT]:
        """Return the winner of this many trials, by its own; `fields` are those of `Best`."""
        best = Best(
            device=self.device,
            environment=self.environment,
            shape=self.winner_problem,
            config=trial.config,
            kernel_hash=trial.kernel_hash,
            origin=origin,
            predicted_us=trial.predicted_us,
            default=self.contenders.default,
            paper=self.contenders.paper,
            trials=trials,
        )
        return dataclasses.replace(best, **fields)  # type: ignore[arg-type]

    def assignment(self, trials: int, seed: int) -> Assignment[ConfigT]:
        """Return what a strategy gets of this subject for a number of trials."""
        contenders = self.contenders
        return Assignment(
            space=contenders.space, first=contenders.first, usefulness=self.usefulness, trials=trials, seed=seed
        )
