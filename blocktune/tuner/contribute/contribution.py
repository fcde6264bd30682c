"""The use case: what one GPU can contribute within ten minutes, in four parts, each with its time.

    instruments = Instruments(compiler=farm, checker=runner, own_configs=…, study=…, compare=…)
    document = contribute(device, environment, instruments, save=write, on_progress=print)

Everything is compiled first, so that nothing compiles while the GPU is timed. What did not compile in time is left out,
and named.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from blocktune.db.exchange.contribution import contribution_document
from blocktune.db.exchange.document import export_document
from blocktune.db.records.records import Environment
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compare.compare import bench_document
from blocktune.tuner.compare.report import Comparison
from blocktune.tuner.contribute.anonymous import machine_hash, without_names
from blocktune.tuner.contribute.compiled_table import Job, StoppableCompiler, compiled_jobs, compiled_table
from blocktune.tuner.contribute.conformance import Checker, check_cases, conformance_cases
from blocktune.tuner.contribute.fixed_shapes import SHAPES_VERSION, fixed_shapes, sixteen_bit_type
from blocktune.tuner.contribute.timed_rows import all_rows
from blocktune.tuner.measure.environment import source_commit

COMMAND = "tune contribute"
"""What the rows say was typed: arguments are files of the machine."""

NOT_COMPILED = "its configs did not compile in time"

COMPARISON_SECONDS = 10.0
"""Taken for the first comparison, before any has shown how long one takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDeadlines:
    """When the parts end, in seconds since the start. All of them end within ten minutes."""

    compiled: float = 240.0
    checked: float = 330.0
    noise_seconds: float = 45.0
    timed: float = 585.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """Hold the tools that compile, check and time on the GPU.

    own_configs: our configs that take part in a comparison, by name. study: the document of a study of the noise, of a
    shape and configs for some seconds. compare: times a shape.
    """

    compiler: StoppableCompiler
    checker: Checker
    own_configs: Callable[[AttentionShape], Mapping[str, KernelConfig | None]]
    study: Callable[[AttentionShape, tuple[KernelConfig, ...], float], dict[str, Any]]
    compare: Callable[[AttentionShape], Comparison]
    now: Callable[[], float] = time.monotonic
    deadlines: PartDeadlines = field(default_factory=PartDeadlines)


def contribute(
    device: DeviceSpec,
    environment: Environment,
    instruments: Instruments,
    *,
    save: Callable[[dict[str, Any]], None],
    on_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Return the sealed document of a GPU that is here.

    Args:
        device: the GPU.
        environment: its software, under the regime of the comparisons.
        instruments: what works on it.
        save: is given the document after every part, so that a part that fails costs no other.
        on_progress: called with what comes next.
    """
    run = _PartialContribution(device, environment, instruments, on_progress)
    comparisons = [partial(run.compare, shape) for shape in run.shapes]
    parts: list[Callable[[], None]] = [run.compile, run.check, run.study, *comparisons]
    for part in parts:
        part()
        document = run.document()
        save(document)
    return document


class _PartialContribution:
    """The parts that are there so far."""

    def __init__(
        self,
        device: DeviceSpec,
        environment: Environment,
        instruments: Instruments,
        on_progress: Callable[[str], None],
    ) -> None:
        self._device, self._environment = device, environment
        self._instruments, self._say = instruments, on_progress
        self._begun = instruments.now()
        self._commit = source_commit()
        self._longest = COMPARISON_SECONDS
        self._comparisons: list[Comparison] = []
        self._ready: Collection[Job] = ()
        self.shapes = fixed_shapes(device.limits)
        self._configs = {shape: _own_configs(instruments, shape) for shape in self.shapes}
        self._cases = conformance_cases(device.limits, sixteen_bit_type(device.limits))
        self._bench = bench_document(device, environment, environment.regime)
        self._parts: dict[str, Any] = {"compiled": [], "conformance": [], "noise": None, "left_out": {}}

    def document(self) -> dict[str, Any]:
        """Return the sealed document of what is there."""
        bests, trials = all_rows(self._comparisons, self._device, self._environment)
        parts = self._parts | {
            "shapes": SHAPES_VERSION,
            "machine": machine_hash(self._device),
            "created_at": _today(),
            "seconds": round(self._seconds(), 1),
            "bench": self._bench,
        }
        return contribution_document(parts, export_document(self._device, bests, trials))

    def compile(self) -> None:
        """Compile all that will be timed, then what will be checked."""
        limits, deadlines = self._device.limits, self._instruments.deadlines
        timed = [(shape, config) for shape, configs in self._configs.items() for config in configs]
        self._say(f"1/4 compiling {len(dict.fromkeys(timed + self._cases))} configs")
        left_seconds = deadlines.compiled - self._seconds()
        compiled = compiled_jobs(timed, self._cases, self._instruments.compiler, limits.cc, left_seconds)
        self._ready = set(compiled)
        self._parts["compiled"] = [_nameless(row) for row in compiled_table(compiled, limits)]

    def check(self) -> None:
        """Check the kernels next to the reference."""
        cases = [case for case in self._cases if case in self._ready]
        self._say(f"2/4 checking {len(cases)} small shapes")
        until = self._begun + self._instruments.deadlines.checked
        rows = list(check_cases(cases, self._instruments.checker, until=until, now=self._instruments.now))
        self._parts["conformance"] = [_nameless(row) for row in rows]
        if missing := len(self._cases) - len(rows):
            self._parts["left_out"]["conformance"] = f"{missing} of {len(self._cases)} cases, for lack of time"

    def study(self) -> None:
        """Measure the noise of the first shape's default, or say why not."""
        shape, instruments = self.shapes[0], self._instruments
        seconds = instruments.deadlines.noise_seconds
        self._say(f"3/4 studying the noise of {shape.label} for {seconds:.0f} s")
        if not self._is_ready(shape):
            self._parts["left_out"]["noise"] = NOT_COMPILED
            return
        try:
            self._parts["noise"] = instruments.study(shape, tuple(self._configs[shape]), seconds)
        except NoFeasibleConfigError as error:
            self._parts["left_out"]["noise"] = without_names(str(error))

    def compare(self, shape: AttentionShape) -> None:
        """Time a shape, or say why not."""
        number = self.shapes.index(shape) + 1
        self._say(f"4/4 timing shape {number} of {len(self.shapes)}: {shape.label}")
        begun = self._seconds()
        if not self._is_ready(shape):
            self._parts["left_out"][shape.label] = NOT_COMPILED
            return
        if begun + self._longest > self._instruments.deadlines.timed:
            self._parts["left_out"][shape.label] = "the ten minutes were over"
            return
        try:
            comparison = self._instruments.compare(shape)
        except UsageError as error:  # its tensors do not fit this GPU
            self._parts["left_out"][shape.label] = without_names(str(error))
            return
        self._longest = max(self._longest, self._seconds() - begun)
        self._keep(comparison)

    def _keep(self, comparison: Comparison) -> None:
        self._comparisons.append(comparison)
        row = comparison.to_json() | {"commit": self._commit, "taken_at": _today()}
        row["contenders"] = [_nameless(entry) for entry in row["contenders"]]
        self._bench["rows"].append(row)
        self._bench |= {"created_at": row["taken_at"], "commands": [COMMAND]}

    def _is_ready(self, shape: AttentionShape) -> bool:
        return all((shape, config) in self._ready for config in self._configs[shape])

    def _seconds(self) -> float:
        return self._instruments.now() - self._begun


def _own_configs(instruments: Instruments, shape: AttentionShape) -> list[KernelConfig]:
    """Return our configs that take part in a comparison, each once."""
    return list(dict.fromkeys(config for config in instruments.own_configs(shape).values() if config is not None))


def _nameless(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose texts about errors name neither the machine nor its user."""
    return {name: without_names(value) if name in ("error", "problem") else value for name, value in row.items()}


def _today() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
