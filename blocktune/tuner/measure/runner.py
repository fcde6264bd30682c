"""Runners, which measure: the protocol that the search speaks, and the runners that drive a worker."""

import logging
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol

from blocktune.db.records.records import ConfigT, Outcome, Telemetry
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import BlocktuneError, UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.child_process import ChildDiedError, ChildTimeoutError
from blocktune.tuner.measure.energy import Burst
from blocktune.tuner.measure.load import Monitor
from blocktune.tuner.measure.measurement import OUT_OF_MEMORY, REPEATED, Energies, Finals, Measurement, Terms
from blocktune.tuner.measure.telemetry import disturbance
from blocktune.tuner.measure.worker_process import WORKER_COMMAND, Deadlines, Worker, WorkerFailedError, WorkerProcess

_log = logging.getLogger(__name__)

_FINALS_ATTEMPTS = 2

MAX_VAIN_REPEATS = 3
"""Repeated measurements in a row that were disturbed again, after which none is repeated any more.

The disturbance is permanent then, and timing every candidate twice would only be slower."""


class Runner(Protocol[ConfigT]):
    """Measures configs of one problem on one device. A config that fails affects no other."""

    def prepare(self) -> None:
        """Start what takes long to start, without waiting for it."""

    def measure(self, config: ConfigT) -> Measurement:
        """Check and time one config; every failure of the config is an outcome, not an exception."""

    def finals(self, configs: Sequence[ConfigT]) -> Finals[ConfigT]:
        """Time configs, each measured before, in turns."""

    def energies(self, configs: Sequence[ConfigT], rounds: int) -> Energies[ConfigT]:
        """Measure the energy of configs, each measured before, in turns."""

    def confirm(self, config: ConfigT) -> Measurement:
        """Check everything that the config can compute, log-sum-exp included, without timing it."""

    def close(self) -> None:
        """End all processes; harmless when repeated."""


@dataclass(kw_only=True)
class WorkerRunner(ABC, Generic[ConfigT]):
    """Drives one worker at a time and replaces it when it is lost.

    The first config that passes is the anchor of later ones (`anchor` names one that is to be tried first, such as one
    that passed in an earlier session). A new worker takes the anchor up again; if the anchor fails then, it is given up
    and the next config that passes takes its place.

    What is timed while another process is on the GPU, or while the GPU slows itself down by more than its power cap, is
    timed once more, and says so: a measurement in its `error`, finals in their `disturbance`.

    monitor: is read while a config is being timed. terms: on which configs are measured.
    """

    anchor: ConfigT | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    monitor: Monitor | None = None
    terms: Terms = field(default_factory=Terms)

    def __post_init__(self) -> None:
        self._worker = self._new_worker()
        self._is_set_up = False
        self._generation = 0
        self._anchor_us = 0.0
        self._vain_repeats = 0

    @property
    @abstractmethod
    def label(self) -> str:
        """A short name of what is measured, for people."""

    @abstractmethod
    def _new_worker(self) -> Worker:
        """Return a worker that is not started yet."""

    @abstractmethod
    def _problem(self) -> dict[str, Any]:
        """Return the description of what is measured, for the worker."""

    def prepare(self) -> None:
        if self._worker.start():
            self._is_set_up = False
            self._send_setup()

    def _send_setup(self) -> None:
        """Have the worker make or take the tensors; `_finish_setup` waits for them."""
        terms = replace(self.terms, seed=self.terms.seed + self._generation)  # every worker asks another question
        self._generation += 1
        self._worker.send({"command": "setup", "shape": self._problem(), "terms": terms.to_json()})

    def measure(self, config: ConfigT) -> Measurement:
        started = time.monotonic()
        self._ensure_ready()
        measurement = self._measure_again_if_disturbed(config)
        if measurement.outcome is Outcome.OK and self.anchor is None:
            self._set_anchor(config, measurement)
        return replace(measurement, seconds=time.monotonic() - started)

    def finals(self, configs: Sequence[ConfigT]) -> Finals[ConfigT]:
        """Time configs in turns. If the worker is lost, each is measured again to find which are to blame."""
        first = self._finals(configs)
        if not first.disturbance:
            return first
        second = self._finals(list(first.samples_us))
        told = f"{REPEATED}{first.disturbance}" + (f"; again {second.disturbance}" if second.disturbance else "")
        return replace(second, failures={**first.failures, **second.failures}, disturbance=told)

    def duel(self, config: ConfigT) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the rounds, in microseconds, of finals in which a config that runs meets itself.

        Raises:
            BlocktuneError: it did not run.
        """
        self._ensure_ready()
        try:
            one, other = self._ask_finals([config, config])
        except WorkerFailedError as failed:
            raise BlocktuneError(
                f"{config.label} does not run, so it cannot be compared with itself: {failed}."
            ) from failed
        return one, other

    def _ask_finals(self, configs: Sequence[ConfigT]) -> list[tuple[float, ...]]:
        command = {"command": "finals", "configs": [config.to_json() for config in configs]}
        result = self._ask(command, self.deadlines.finals + self._launches_seconds())
        return [tuple(rounds) for rounds in result["samples_us"]]

    def energies(self, configs: Sequence[ConfigT], rounds: int) -> Energies[ConfigT]:
        """Measure the energy of configs in turns. If the worker is lost there are no energies, and the log says why."""
        self._ensure_ready()
        command = {"command": "energies", "configs": [config.to_json() for config in configs], "rounds": rounds}
        try:
            result = self._ask(command, self._running_seconds() + len(configs) * rounds * self.deadlines.burst)
        except WorkerFailedError as failed:
            _log.warning("No energies of launches: %s.", failed)
            return Energies()
        bursts = [tuple(Burst(**burst) for burst in each) for each in result["bursts"]]
        return Energies(
            bursts=dict(zip(configs, bursts, strict=True)) if bursts else {},
            disturbance=disturbance(self._worker.telemetry),
        )

    def _finals(self, configs: Sequence[ConfigT]) -> Finals[ConfigT]:
        """Return one run of the finals, with what disturbed it."""
        failures: dict[ConfigT, Measurement] = {}
        remaining = list(configs)
        for _ in range(_FINALS_ATTEMPTS):
            self._ensure_ready()
            try:
                samples = self._ask_finals(remaining)
            except WorkerFailedError:
                again = {config: self.measure(config) for config in remaining}
                failures |= {config: found for config, found in again.items() if found.outcome is not Outcome.OK}
                remaining = [config for config in remaining if config not in failures]
                continue
            after = self.monitor.sample() if self.monitor is not None else Telemetry()
            return Finals(
                samples_us=dict(zip(remaining, samples, strict=True)),
                failures=failures,
                disturbance=disturbance(self._worker.telemetry) or disturbance(after),
                telemetry=self._worker.telemetry,
            )
        return Finals(samples_us={}, failures=failures)

    def confirm(self, config: ConfigT) -> Measurement:
        self._ensure_ready()
        try:
            self._ask({"command": "confirm", "config": config.to_json()}, self._running_seconds())
        except WorkerFailedError as failed:
            return _failure(failed)
        return Measurement(outcome=Outcome.OK)

    def close(self) -> None:
        self._worker.close()

    def _measure_again_if_disturbed(self, config: ConfigT) -> Measurement:
        """Return a measurement that is made once more if it was disturbed; the second one counts, whatever it is."""
        first = self._measure(config)
        why = disturbance(first.telemetry) if first.outcome is Outcome.OK else ""
        if not why:
            self._vain_repeats = 0
            return first
        if self._vain_repeats == MAX_VAIN_REPEATS:
            return _with_remark(first, f"disturbed, since {why}")
        second = self._measure(config)
        still = disturbance(second.telemetry)
        self._vain_repeats = self._vain_repeats + 1 if still else 0
        if second.outcome is not Outcome.OK:
            return second
        return _with_remark(second, f"{REPEATED}{why}" + (f"; again {still}" if still else ""))

    def _measure(self, config: ConfigT) -> Measurement:
        try:
            answer = self._ask({"command": "measure", "config": config.to_json()}, self._running_seconds())
            measurement = Measurement.from_json(answer)
        except WorkerFailedError as failed:
            measurement = _failure(failed)
        telemetry = self._worker.telemetry
        # launches of another process make a config late through no fault of its own
        late = measurement.outcome is Outcome.RUN_TIMEOUT and bool(telemetry.other_processes)
        return replace(measurement, telemetry=telemetry, transient=measurement.transient or late)

    def _ensure_ready(self) -> None:
        """Make sure of a worker that has the tensors and the anchor; replaces a lost one, and gives up an anchor that
        fails."""
        if not self._set_up():
            return
        anchor, self.anchor = self.anchor, None
        if anchor is None:
            return
        measurement = self._measure(anchor)
        if measurement.outcome is Outcome.OK:
            self._set_anchor(anchor, measurement)
        elif self._worker.pid is None:  # it took the worker with it
            self._set_up()

    def _set_up(self) -> bool:
        """Make sure of a worker that has the tensors, and return whether that was needed."""
        self.prepare()
        if self._is_set_up:
            return False
        self._finish_setup()
        return True

    def _finish_setup(self) -> None:
        try:
            self._worker.receive(self.deadlines.setup)
        except (WorkerFailedError, ChildDiedError, ChildTimeoutError) as failed:
            self.close()
            raise _setup_error(self.label, failed) from failed
        self._is_set_up = True

    def _set_anchor(self, config: ConfigT, measurement: Measurement) -> None:
        self.anchor = config
        self._anchor_us = statistics.median(measurement.samples_us)

    def _running_seconds(self) -> float:
        return self.deadlines.running + self._launches_seconds()

    def _launches_seconds(self) -> float:
        return self.deadlines.running_launches * self._anchor_us / 1e6

    def _ask(self, command: dict[str, Any], running_seconds: float) -> dict[str, Any]:
        return self._worker.ask(
            command,
            compiling_seconds=self.deadlines.compiling,
            running_seconds=running_seconds,
            monitor=self.monitor,
        )


@dataclass
class GpuRunner(WorkerRunner):
    """Measures the configs of a shape in a worker process. command and environment start it."""

    shape: AttentionShape
    environment: dict[str, str] = field(default_factory=dict)
    command: Sequence[str] = WORKER_COMMAND

    @property
    def label(self) -> str:
        return self.shape.label

    def _new_worker(self) -> Worker:
        return WorkerProcess(self.command, self.environment)

    def _problem(self) -> dict[str, Any]:
        return self.shape.to_json()

    def turn_to(self, shape: AttentionShape, anchor: KernelConfig | None = None, terms: Terms | None = None) -> None:
        """Turn to another shape in the worker that is there.

        Args:
            shape: what is measured from now on.
            anchor: a config that passed in an earlier session; None where the first that passes is to be it.
            terms: on which; None leaves them.
        """
        if not self._is_set_up:
            self.close()
        self.shape, self.anchor, self._anchor_us = shape, anchor, 0.0
        self.terms = terms or self.terms
        self._is_set_up = False
        if self._worker.pid is not None:
            self._send_setup()


def _with_remark(measurement: Measurement, remark: str) -> Measurement:
    return replace(measurement, error=f"{remark}; {measurement.error}" if measurement.error else remark)


def _failure(failed: WorkerFailedError) -> Measurement:
    outcome = Outcome.RUN_ERROR if failed.outcome == OUT_OF_MEMORY else Outcome(failed.outcome)
    return Measurement(outcome=outcome, error=str(failed), transient=failed.transient)


def _setup_error(label: str, failed: Exception) -> BlocktuneError:
    if isinstance(failed, WorkerFailedError) and failed.outcome == OUT_OF_MEMORY:
        return UsageError(
            f"The tensors of a shape must fit the GPU's free memory, but those of {label} do not: {failed}. "
            "Take a smaller batch, fewer heads or a shorter sequence, or end what else runs on the GPU."
        )
    return BlocktuneError(f"The GPU worker cannot start: {failed}. `tune doctor` checks the GPU and its software.")
