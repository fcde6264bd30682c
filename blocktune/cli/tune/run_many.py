"""`tune run` for many shapes or calls: one after the other, or shared by several GPUs, with a line for each."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.progress import show_progress
from blocktune.cli.output.progress_jobs import JobsProgress, show_jobs
from blocktune.cli.output.render import counts, microseconds, note, print_json, say
from blocktune.cli.output.winners import speedup_text
from blocktune.kernels.values.errors import BlocktuneError, NoFeasibleConfigError, StoreError, UsageError
from blocktune.kernels.values.text import counted
from blocktune.tuner.cost.bands import stored_band_text
from blocktune.tuner.measure.device_choice import is_present

if TYPE_CHECKING:
    from blocktune.cli.tune.target import Target
    from blocktune.kernels.hardware.device import ComputeLimits, DeviceSpec
    from blocktune.tuner.compile_server.farm import CompileFarm
    from blocktune.tuner.fleet.executor import Executor
    from blocktune.tuner.fleet.job import Job
    from blocktune.tuner.measure.runner import GpuRunner
    from blocktune.tuner.search.report import OnProgress, Progress

COMPILED_AHEAD = 32
"""Configs of the next shape that are compiled while the finals of one are held: as many as processes of a large machine
manage meanwhile."""


def run_many(
    shapes: "Sequence[Target]",
    db: str | None,
    as_json: bool,
    search: dict[str, Any],
    devices: "Sequence[DeviceSpec]",
) -> bool:
    """Tune shapes on these GPUs; returns whether the user cut it short. search: further arguments of `tune`.

    Raises:
        NoFeasibleConfigError: some shapes have no result; the others were tuned all the same.
        StoreError: the store takes no results.
    """
    if len(devices) > 1:
        return _share(shapes, db, as_json, search, devices)
    return _run_in_turn(shapes, db, as_json, search)


def _run_in_turn(shapes: "Sequence[Target]", db: str | None, as_json: bool, search: dict[str, Any]) -> bool:
    """Tune one shape after the other, in this process and by one worker on the GPU."""
    from blocktune.cli.tune.target import tune_target
    from blocktune.db.store import ResultStore
    from blocktune.tuner.search.run import farm_for

    reports: list[dict[str, Any]] = []
    failed: list[BlocktuneError] = []
    device = search["device"]
    with ResultStore.open(db) as store, farm_for(device) as compiler, _runner_for(device, shapes) as runner:
        for number, shape in enumerate(shapes, start=1):
            note(f"{number}/{len(shapes)} {shape.label}")
            try:
                with show_progress() as show:
                    if runner is not None:
                        show = _compiling_ahead(show, shapes[number : number + 1], search, compiler)
                    report = tune_target(shape, search, store, show, compiler, runner)
            except (
                NoFeasibleConfigError,
                UsageError,
            ) as error:  # a shape that cannot be tuned does not stop the others
                note(f"error: {error}")
                failed.append(error)
                continue
            reports.append(report.to_json())
            if not as_json:
                say(line(reports[-1]))
            if report.interrupted:
                break
    _conclude(reports, len(failed), as_json)
    return bool(reports) and bool(reports[-1]["interrupted"])


def _compiling_ahead(
    show: "OnProgress", following: "Sequence[Target]", search: dict[str, Any], farm: "CompileFarm"
) -> "OnProgress":
    """Return a function that shows progress and, as soon as nothing is left to compile, has favourites of the shape
    that follows compiled."""
    from blocktune.kernels.registry import competing
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.tuner.candidates.starting_configs import compile_favourites

    waiting = [shape for shape in following if isinstance(shape, AttentionShape)]

    def shown(progress: "Progress") -> None:
        show(progress)
        if waiting and (progress.phase == "finals" or (progress.done and not progress.compiling)):
            kernels = search["kernels"] or competing()
            compile_favourites(waiting.pop(), search["device"], kernels, farm, COMPILED_AHEAD)

    return shown


def _runner_for(device: "DeviceSpec", shapes: "Sequence[Target]") -> "AbstractContextManager[GpuRunner | None]":
    """Return the runner whose worker measures one shape after the other; None for a device that is not here, and for
    calls, each of which has its own."""
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.tuner.measure.locked_runner import gpu_runner
    from blocktune.tuner.measure.measurement import Terms
    from blocktune.tuner.measure.telemetry import GpuMonitor

    first = next(iter(shapes), None)
    if not isinstance(first, AttentionShape) or not is_present(device):
        return nullcontext()
    return gpu_runner(first, device, GpuMonitor(device.uuid, own_processes=1), note, Terms())


def _share(
    shapes: "Sequence[Target]",
    db: str | None,
    as_json: bool,
    search: dict[str, Any],
    devices: "Sequence[DeviceSpec]",
) -> bool:
    """Tune all shapes by one worker process per GPU."""
    from blocktune.tuner.fleet.local_executor import LocalExecutor

    note(f"{counted(len(shapes), 'shape')} on {counted(len(devices), 'GPU')}")
    device = search["device"]
    return share(LocalExecutor(devices), jobs_of(shapes, db, search, device.key, device.limits), db, as_json)


def share(executor: "Executor", jobs: "Sequence[Job]", db: str | None, as_json: bool) -> bool:
    """Have all jobs made and show how it goes; returns whether the user cut it short.

    Raises:
        NoFeasibleConfigError: some shapes have no result; the others were tuned all the same.
        StoreError: the store takes no results.
    """
    from blocktune.db.store import ResultStore

    with ResultStore.open(db):
        pass  # created or upgraded once, before many open it
    with show_jobs(len(jobs)) as progress, _interrupting(executor) as signals:
        reports, failures = _watch(executor, jobs, progress, as_json)
    broken = [failure for failure in failures if failure[1] == StoreError.exit_code]
    if broken:
        raise StoreError(broken[0][0])
    _conclude(reports, 0 if signals else len(failures), as_json)
    return bool(signals)


def jobs_of(
    shapes: "Sequence[Target]", db: str | None, search: dict[str, Any], kind: str, limits: "ComputeLimits"
) -> "list[Job]":
    """Return a job for each shape on a kind of GPU, which is `DeviceSpec.key`."""
    from blocktune.kernels.registry import competing
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.tuner.candidates.space import SearchSpace
    from blocktune.tuner.fleet.job import Job

    kernels, exhaustive = search["kernels"], search["exhaustive"]

    def configs(shape: "Target") -> int:
        if not isinstance(shape, AttentionShape):
            return 0
        return len(SearchSpace.build(shape, limits, kernels or competing(), exhaustive=True).feasible)

    return [
        Job(
            shape=shape,
            device=kind,
            database=db,
            budget=search["budget"],
            kernels=None if kernels is None else tuple(kernel.name for kernel in kernels),
            exhaustive=exhaustive,
            configs=configs(shape) if exhaustive else 0,
            regime=search["regime"],
            objective=search["objective"],
            sampler=search["sampler"],
            study=search["study"],
            seed=search["seed"],
        )
        for shape in shapes
    ]


def _watch(
    executor: "Executor", jobs: "Sequence[Job]", progress: JobsProgress, as_json: bool
) -> tuple[list[Mapping[str, Any]], list[tuple[str, int]]]:
    """Return the reports in the order of the jobs, and error and exit code of each job that has none."""
    from blocktune.tuner.fleet.job import Failed, Finished

    kinds = len({job.device for job in jobs})
    reports: dict[Job, Mapping[str, Any]] = {}
    failures = []
    for event in executor.run(jobs):
        progress.show(event)
        if isinstance(event, Finished):
            reports[event.job] = event.report
            if not as_json:
                progress.print(line(event.report, with_device=kinds > 1))
        elif isinstance(event, Failed):
            failures.append((event.error, event.exit_code))
    return [reports[job] for job in jobs if job in reports], failures


@contextmanager
def _interrupting(executor: "Executor") -> Iterator[list[int]]:
    """Let the first Ctrl-C end the workers' searches early, with what they found; the second one ends them at once.
    Yields a list of the signals that came."""
    came: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)
        executor.interrupt()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _conclude(reports: Sequence[Mapping[str, Any]], failed: int, as_json: bool) -> None:
    if as_json:
        print_json({"runs": list(reports)})
    if failed:
        raise NoFeasibleConfigError(f"{failed} of the shapes got no result; see above.")


def line(report: Mapping[str, Any], *, with_device: bool = False) -> str:
    """Return a `TuningReport` as JSON in one line for people."""
    from blocktune.tuner.fleet.job import config_from

    best, gain = report["best"], report["speedup_over_default"]
    config, default = config_from(best["config"]), report.get("default")
    against = "" if gain is None else f", {speedup_text(**gain)} over the default"
    if default is not None and default["config"] == best["config"]:
        against = ", the default"
    where = f" on {report['device']['name']}" if with_device else ""
    return (
        f"{report['shape']['label']}{where}: {best['origin']} {_time(best)} {config.label}{against}; "
        f"{counts(report['outcomes'])} in {report['seconds']:.1f} s"
    )


def _time(best: Mapping[str, Any]) -> str:
    """Return the measured time, or the predicted one with its band."""
    if best["time_us"] is not None:
        return microseconds(best["time_us"])
    return f"{microseconds(best['predicted_us'])}, {stored_band_text(best['predicted_band'])},"
