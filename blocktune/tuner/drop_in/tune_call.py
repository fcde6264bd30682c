"""The tuning of one call: what is known of its configs, what is measured now, and what is kept."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import partial

from blocktune.db.records.records import KernelTrial, Telemetry
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import MissingPackageError, NoFeasibleConfigError, needing
from blocktune.runtime.autotuned.boundary import tolerance, warn_of_failure
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.runtime.autotuned.fallback import KernelExplanation, stored_winners
from blocktune.runtime.autotuned.settings import brings_its_own_bench
from blocktune.runtime.autotuned.stock_tuner import median_ms, stock_choice
from blocktune.tuner.compile.answers import MAKE_ROOM, Compiled
from blocktune.tuner.compile_server.compile_ahead import CompileAhead
from blocktune.tuner.drop_in.list_race import ListRace
from blocktune.tuner.drop_in.results import CallResults, OpenStore, measured_choice, open_store
from blocktune.tuner.launches.launch_bench import LaunchTools
from blocktune.tuner.launches.launch_runner import LaunchMachine
from blocktune.tuner.measure.environment import measuring_environment
from blocktune.tuner.measure.lock_file import Patience
from blocktune.tuner.measure.telemetry import GpuMonitor, gpu_lock
from blocktune.tuner.offline.specialization import is_importable, specialization_of
from blocktune.tuner.subject.launch import LaunchSubject

logger = logging.getLogger("blocktune")


@dataclass(frozen=True, slots=True, kw_only=True)
class DropInMachine(LaunchMachine):
    """The parts of the machine that tuning a first call needs. open_store: where results are kept."""

    open_store: OpenStore = open_store


def machine() -> DropInMachine:
    """Return the tools of this process; no energies are measured in a first call."""
    return DropInMachine(launches=LaunchTools(make_meter=lambda: None))


def tuned_choice(call: AutotunedCall, device: DeviceSpec, patience: Patience) -> KernelExplanation | None:
    """Return the choice that is measured now; it is stored. None if another process measures on the GPU for longer than
    this one waits.

    Raises:
        UsageError: an argument cannot be restored.
        NoFeasibleConfigError: no config compiles and runs.
    """
    started, tools = time.monotonic(), machine()
    with tolerance(call.name, "a process that compiles"):
        if is_importable(call):
            tools.ahead.start(call.name)
    try:
        # the process that compiles imports the kernel's library, and many of those look at the GPU, as users of it
        monitor = GpuMonitor(device.uuid, own_processes=2)
        subject = LaunchSubject.of(call, device, measuring_environment(device, monitor))
    except Exception as error:  # such as packages without a version
        warn_of_failure(call.name, "the versions that a stored result needs", error)
        return choice_by_triton(call)
    results = CallResults(subject, tools.open_store, patience)
    found = _searched(results, tools) if call.settings.expand else None
    return found or _raced(results, tools, monitor, lambda: time.monotonic() - started)


def choice_by_triton(call: AutotunedCall) -> KernelExplanation:
    """Return the choice that Triton's own tuner measures, where what a stored result needs is not known."""
    choice, timings = stock_choice(call.tuner, list(call.configs.values()), call.args, call.kwargs)
    times_us = {config: 1e3 * median_ms(timings[launched]) for config, launched in call.configs.items()}
    return replace(choice, shape=call.problem, times_us=times_us)


def _raced(
    results: CallResults, tools: DropInMachine, monitor: GpuMonitor, spent_seconds: Callable[[], float]
) -> KernelExplanation | None:
    """Return the choice of a race among the list; None if another process measures on the GPU for too long.

    Raises:
        NoFeasibleConfigError: no config compiles and runs.
    """
    subject = results.subject
    known, compiled = _known_and_compiled(results, tools.ahead)
    race = ListRace(subject, known)
    missing = [config for config in race.new if config not in compiled]
    compiled |= compiles(subject, missing, tools.ahead)

    def sample() -> Telemetry:
        with tolerance(subject.call.name, "telemetry"):
            return monitor.sample()
        return Telemetry()

    with _locked_gpu(results) as is_free:
        if not is_free:
            return None
        standing = race.run(compiled, lambda: closing(tools.runner(subject.call)), sample)
    if standing is None:
        raise _nothing_runs(subject.call, race)
    best = race.best(standing)
    results.save(race.trials, best, race.failed_by_machine)
    times_us = {config: standing.time_us(config) for config in standing.samples_us}
    return measured_choice(subject, best, race.trial(best.config), race.reasons, spent_seconds(), times_us)


def _locked_gpu(results: CallResults) -> AbstractContextManager[bool]:
    """Return a context in which this process measures alone on the GPU, unless it is False."""
    subject = results.subject
    return gpu_lock(subject.device.uuid, partial(logger.warning, "%s: %s", subject.call.name), results.patience)


def _searched(results: CallResults, tools: DropInMachine) -> KernelExplanation | None:
    """Return the choice of a search beyond the list; None where the list alone is raced: SQLAlchemy or the memory for
    copies is missing, or the kernel brings a `do_bench`, which times launches in a way of its own."""
    call = results.subject.call
    try:
        with needing("tune", "A search beyond a list"):
            # with it comes SQLAlchemy, which takes longer to import than a list to race
            from blocktune.tuner.drop_in.beyond_list import has_room, searched_choice
    except MissingPackageError as error:
        logger.warning("%s: only listed configs are tried. %s", call.name, error)
        return None
    if brings_its_own_bench(call.tuner):
        logger.info("%s: only listed configs are tried, since its `do_bench` times them.", call.name)
        return None
    with _locked_gpu(results) as is_free:  # the search waits without an end
        is_searched = is_free and has_room(call)
    return searched_choice(results, tools) if is_searched else None


def _known_and_compiled(
    results: CallResults, compiler: CompileAhead
) -> tuple[dict[LaunchConfig, KernelTrial], dict[LaunchConfig, Compiled | None]]:
    """Return how configs of a call ended before. Where nothing is known of its kernel, the whole list is compiled while
    the store is made or read, and how that ended is returned as well."""
    subject = results.subject
    with tolerance(subject.call.name, "stored winners"):
        if stored_winners(subject.call.name, subject.kernel_hash, subject.device):
            return results.known(), {}
    with ThreadPoolExecutor(1, "blocktune-store") as other:
        known = other.submit(results.known)
        compiled = compiles(subject, subject.contenders.space.feasible, compiler)
        return known.result(), compiled


def compiles(
    subject: LaunchSubject, configs: Sequence[LaunchConfig], compiler: CompileAhead
) -> dict[LaunchConfig, Compiled | None]:
    """Return how the compiles of configs ended; None where this process has the code already, or Triton cannot say what
    it would compile."""
    call, cc = subject.call, subject.device.limits.cc
    ended: dict[LaunchConfig, Compiled] = {}
    with tolerance(call.name, "compiles ahead"):
        specialized = filter(None, (specialization_of(call, config, cc) for config in configs))
        ended = compiler.compile(call.name, specialized, cc, call.settings.max_spill_bytes)
    return {config: ended.get(config) for config in configs}


def _nothing_runs(call: AutotunedCall, race: ListRace) -> NoFeasibleConfigError:
    examples = "; ".join(f"{label}: {reason}" for label, reason in list(race.reasons.items())[:3])
    is_machine = race.failed_by_machine.issuperset(call.configs)
    return NoFeasibleConfigError(
        f"None of the {len(call.configs)} configs of {call.name} compiles and runs for {call.problem.label}: "
        f"{examples}. {MAKE_ROOM if is_machine else 'Correct the kernel, or add smaller configs'}."
    )
