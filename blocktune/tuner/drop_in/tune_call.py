"""The tuning of one call: what is known of its configs, what is measured now, and what is kept."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.runtime.autotuned.call import Call
from blocktune.runtime.autotuned.config import UserConfig
from blocktune.runtime.autotuned.fallback import KernelExplanation, stored_winners
from blocktune.runtime.autotuned.settings import Cache
from blocktune.tuner.compile.answers import Compiled
from blocktune.tuner.drop_in.compiles import compiles
from blocktune.tuner.drop_in.measure import Measuring
from blocktune.tuner.drop_in.results import Ending, OpenStore, Results, open_store
from blocktune.tuner.jitted.compile_ahead import CompileAhead, compile_ahead
from blocktune.tuner.jitted.specialization import is_importable
from blocktune.tuner.launches.isolated import COMMAND as ISOLATED_COMMAND
from blocktune.tuner.launches.launch_bench import LaunchTools
from blocktune.tuner.launches.launches import brings_its_own_bench
from blocktune.tuner.measure.clock import Clock, CudaClock
from blocktune.tuner.measure.environment import measuring_environment
from blocktune.tuner.measure.telemetry import GpuMonitor, gpu_lock

logger = logging.getLogger("blocktune")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What tuning needs of the machine.

    compiler: compiles ahead. open_store: where results are kept. make_clock: of the current device, by the state of the
    L2 cache. isolated_command: starts the process that measures where `isolate` is set.
    """

    compiler: CompileAhead = compile_ahead
    open_store: OpenStore = open_store
    make_clock: Callable[[Cache], Clock] = CudaClock
    isolated_command: Sequence[str] = ISOLATED_COMMAND


def machine() -> Tools:
    """Return the tools of this process."""
    return Tools()


def tuned_choice(call: Call, device: DeviceSpec, *, afresh: bool = False) -> KernelExplanation:
    """Return the choice that is measured now; it is stored.

    Args:
        call: the call.
        device: the GPU.
        afresh: measure what was measured before, too.

    Raises:
        UsageError: an argument cannot be restored.
        NoFeasibleConfigError: no config compiles and runs.
    """
    started, tools = time.monotonic(), machine()
    if not afresh and is_importable(call):
        tools.compiler.start(call.name)
    # the process that compiles imports the kernel's library, and many of those look at the GPU, as users of it
    monitor = GpuMonitor(device.uuid, own_processes=2)
    results = Results(call, device, measuring_environment(device, monitor), tools.open_store)
    if call.settings.expand and not afresh:
        found = _searched(results, tools)
        if found is not None:
            return found
    known, compiled = ({}, {}) if afresh else _known_and_compiled(results, tools.compiler)
    measuring = Measuring(call, device, known, tools.compiler, tools.isolated_command, compiled, monitor)
    alone = gpu_lock(device.uuid, lambda message: logger.info("%s", message))
    standing = measuring.run(lambda: tools.make_clock(call.settings.l2), alone)
    if standing is None:
        raise _nothing_runs(call, measuring.reasons)
    results.save(measuring.endings, standing)
    return measuring.choice(standing, time.monotonic() - started)


def _searched(results: Results, tools: Tools) -> KernelExplanation | None:
    """Return the choice of a search beyond the list; None where the list alone is raced: there is no memory for copies,
    or the kernel brings a `do_bench`, which times launches in a way of its own."""
    # with it comes SQLAlchemy, which takes longer to import than a list to race
    from blocktune.tuner.drop_in.beyond_list import has_room, searched_choice
    from blocktune.tuner.search.tune_launch import LaunchMachine

    if brings_its_own_bench(results.call):
        logger.info("%s: only listed configs are tried, since its `do_bench` times them.", results.call.name)
        return None
    if not has_room(results):
        return None
    launches = LaunchTools(tools.make_clock, lambda: None)
    return searched_choice(results, LaunchMachine(ahead=tools.compiler, launches=launches))


def _known_and_compiled(
    results: Results, compiler: CompileAhead
) -> tuple[Mapping[UserConfig, Ending], Mapping[UserConfig, Compiled | None]]:
    """Return how configs of a call ended before. Where nothing is known of its kernel, the whole list is compiled while
    the store is made or read, and how that ended is returned as well."""
    call, device = results.call, results.device
    if stored_winners(call.name, call.source_hash, device):
        return results.known(), {}
    with ThreadPoolExecutor(1, "blocktune-store") as other:
        known = other.submit(results.known)
        compiled = compiles(call, tuple(call.configs), device.limits.cc, compiler)
        return known.result(), compiled


def _nothing_runs(call: Call, reasons: dict[str, str]) -> NoFeasibleConfigError:
    examples = "; ".join(f"{label}: {reason}" for label, reason in list(reasons.items())[:3])
    return NoFeasibleConfigError(
        f"None of the {len(call.configs)} configs of {call.name} compiles and runs for {call.problem.label}: "
        f"{examples}. Correct the kernel, or add smaller configs."
    )
