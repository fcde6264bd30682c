"""Records sweeps of many shapes with one GPU worker, while the configs of the next shape are compiled.

    for sweep in SweepRecorder(device, environment, runner, farm, most=200).record(shapes, seconds=600):
        save_sweep(sweep, "results/sweeps")

Where a space is too large to be measured in that time, a dense part of it is: `dense_part` says which.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

from blocktune.db.records.records import Environment, Outcome, Trial
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.contenders import Contenders
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.compile_server.background import Compiler
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.measure.runner import GpuRunner
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.subject.attention import AttentionSubject


@dataclass(frozen=True, slots=True)
class _Begun:
    """A shape whose configs are compiling, in the order in which they are measured."""

    subject: AttentionSubject
    compiles: Sequence[tuple[KernelConfig, "Future[CompileResult]"]]


def dense_part(
    contenders: Contenders, shape: AttentionShape, device: DeviceSpec, most: int
) -> tuple[KernelConfig, ...]:
    """Return all feasible configs of a shape, or the `most` of them that a search would most likely choose from.

    The default and FA's heuristic come first. Of what is left, every kernel in the order in which calls take them has
    half of the room, or all its configs. Within a kernel every combination of the parameters that are its own, such as
    splits, has an equal share, the most promising tiles by the model first: the model hardly tells schedules apart.
    """
    space = contenders.space
    if len(space.feasible) <= most:
        return tuple(dict.fromkeys((*contenders.first, *space.feasible)))
    chosen = dict.fromkeys(contenders.first)
    waiting: dict[str, list[KernelConfig]] = {}
    for config in space.feasible:
        if config not in chosen:
            waiting.setdefault(config.kernel, []).append(config)
    orders = [_interleave(configs, shape, device) for configs in waiting.values()]
    for order in orders:
        chosen |= dict.fromkeys(order[: (most - len(chosen) + 1) // 2])
    for order in orders:  # what small kernels have left free
        chosen |= dict.fromkeys(
            itertools.islice((config for config in order if config not in chosen), most - len(chosen))
        )
    return tuple(chosen)


def _interleave(configs: Sequence[KernelConfig], shape: AttentionShape, device: DeviceSpec) -> list[KernelConfig]:
    """Return a kernel's configs: in turns the most promising with each combination of its own parameters."""
    useful = {config: usefulness(get_kernel(config.kernel), config, shape, device) for config in configs}
    alike: dict[tuple[tuple[str, int], ...], list[KernelConfig]] = {}
    for config in sorted(configs, key=lambda config: useful[config]):
        alike.setdefault(config.extra, []).append(config)
    place = {config: (rank, useful[config]) for group in alike.values() for rank, config in enumerate(group)}
    return sorted(configs, key=lambda config: place[config])


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecorder:
    """The recorder of sweeps: the device, its software, the worker that measures and the farm that compiles.

    most: configs of a shape. kernels: those that take part.
    """

    device: DeviceSpec
    environment: Environment
    runner: GpuRunner
    compiler: Compiler
    kernels: Sequence[AttentionKernel]
    most: int

    def record(
        self, shapes: Sequence[AttentionShape], seconds: float, tell: Callable[[str], None] = lambda _: None
    ) -> Iterator[Sweep]:
        """Yield a sweep of every shape whose turn comes within these seconds; the last one holds what was measured
        when the time ended.

        Raises:
            NoFeasibleConfigError: no kernel computes a shape on this device.
            BlocktuneError: the GPU worker cannot be started.
        """
        end = time.monotonic() + seconds
        ahead = [self._begin(shape) for shape in shapes[:1]]
        for number, shape in enumerate(shapes, start=1):
            begun, ahead = ahead[0], [self._begin(shape) for shape in shapes[number : number + 1]]
            self.runner.turn_to(shape)
            trials = tuple(self._trials(begun, end))
            tell(f"{number}/{len(shapes)} {shape.label}: {len(trials)} of {len(begun.compiles)} configs")
            if trials:
                yield Sweep(device=self.device, environment=self.environment, shape=shape, trials=trials)
            if time.monotonic() > end:
                return

    def _begin(self, shape: AttentionShape) -> "_Begun":
        """Return a shape whose configs compile from now on.

        Raises:
            NoFeasibleConfigError: no kernel computes it on this device.
        """
        subject = AttentionSubject.of(shape, self.device, self.environment, self.kernels)
        cc = self.device.limits.cc
        configs = dense_part(subject.contenders, shape, self.device, self.most)
        return _Begun(subject, [(config, self.compiler.submit(config.kernel, config, shape, cc)) for config in configs])

    def _trials(self, begun: "_Begun", end: float) -> Iterator[Trial]:
        """Yield the trials of a shape's configs, in order, until the time ends."""
        for config, future in begun.compiles:
            left = end - time.monotonic()
            try:
                result = future.result(timeout=left) if left > 0 else None
            except FutureTimeoutError:
                result = None
            if result is None:
                return
            yield self._trial(begun.subject, config, result)

    def _trial(self, subject: AttentionSubject, config: KernelConfig, result: CompileResult) -> Trial:
        seconds = 0.0 if result.cached else result.seconds
        if result.resources is None:
            return subject.trial(config, result.outcome, error=result.error, compile_seconds=seconds)
        compiled = {"resources": result.resources, "compile_seconds": seconds}
        if occupancy(result.resources, self.device.limits).blocks_per_sm == 0:
            return subject.trial(config, Outcome.INFEASIBLE, error="not one block fits an SM", **compiled)
        found = self.runner.measure(config)
        return subject.trial(
            config,
            found.outcome,
            time_us=found.time_us,
            relative_to_anchor=found.relative_to_anchor,
            samples_us=found.samples_us,
            error=found.error,
            bench_seconds=found.seconds,
            telemetry=found.telemetry,
            **compiled,
        )
