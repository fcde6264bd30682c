"""Known configs of an autotuned kernel, and the one that serves a call: the offers of the ladder's sources.

What was measured with another source of the kernel is left out: its parameters may mean something else now.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.runtime.autotuned.config import LaunchConfig, LaunchProblem
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.ladder import Candidate, Offer, Rung, WinnerTable
from blocktune.runtime.store_reader.provenance import Reuse
from blocktune.runtime.store_reader.sources import autotuned_rows
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from blocktune.runtime.store_reader.usable_rows import origin_of, parsed_rows, reuse_here, time_us_of

logger = logging.getLogger("blocktune")

KernelWinner = TunedConfig[LaunchProblem, LaunchConfig]
"""A stored winner of an autotuned kernel; its `shape` is the problem of a call."""

KernelExplanation = Explanation[LaunchProblem, LaunchConfig]
"""What serves a kind of call of an autotuned kernel."""

_ABSENCES = {
    Reuse.EXACT: "nothing was measured for this call on this device with this triton, ptxas and driver",
    Reuse.OTHER_DRIVER: "nor with another driver or power limit",
    Reuse.OTHER_COMPILER: "nor with another triton or ptxas",
    Reuse.SAME_CAPABILITY: "nor elsewhere, on a device of this compute capability",
}

ACCEPTED = (*map(Rung, _ABSENCES), Rung.NEAREST)
"""The sources down to which a call may be served without measuring."""


def stored_winners(
    kernel: str, source_hash: str, device: DeviceSpec, path: str | Path | None = None
) -> list[KernelWinner]:
    """Return what a store or results file (by default the user's) knows of a kernel with this very source, on devices
    of this compute capability. One that cannot be read costs a line in the log, never a call; so does a row that breaks
    a rule."""
    try:
        rows = autotuned_rows(device, path, kernel=kernel, source_hash=source_hash)
    except Exception as error:  # whatever is wrong with a place or a file: a call goes on without
        logger.info("No stored configs of %s: %s", kernel, error)
        return []
    return parsed_rows(rows, device, _winner, where=kernel)


def kernel_offers(
    given: Sequence[KernelWinner], stored: Callable[[], Sequence[KernelWinner]], problem: LaunchProblem
) -> Iterator[Offer[LaunchProblem, LaunchConfig]]:
    """Yield what may serve a call, best first.

    Args:
        given: winners of frozen files and of rank 0.
        stored: returns those of the store, which is read where the given ones do not have this very problem.
        problem: of the call, with the list of configs.
    """
    frozen = [Candidate.of(Rung.FROZEN, winner) for winner in given if winner.shape == problem]
    if given:
        yield Offer(Rung.FROZEN, frozen, "no frozen file, nor rank 0, has a winner of this call")
    table = WinnerTable([*given, *stored()], _names, LaunchProblem.distance)
    yield from table.measured(problem, _ABSENCES)
    yield table.nearest(problem, "nothing near was measured on a device of this compute capability")


def winner_of(row: Mapping[str, Any], reuse: Reuse) -> KernelWinner:
    """Return the winner that a row of a store, a frozen file or another rank holds.

    Raises:
        UsageError: a value breaks a rule.
    """
    return TunedConfig(
        shape=LaunchProblem.from_document(row["problem"]),
        config=LaunchConfig.from_document(row["kernel"], row["config"]),
        origin=origin_of(reuse),
        time_us=time_us_of(row["time_us"]),
        reuse=reuse,
    )


def _winner(row: Mapping[str, Any], device: DeviceSpec) -> KernelWinner | None:
    """Return a stored row as a winner for this device, or None when it is worth nothing there."""
    reuse = reuse_here(row, row["source_hash"], device, row["source_hash"])
    return None if reuse is None else winner_of(row, reuse)


def _names(problem: LaunchProblem) -> tuple[str, ...]:
    return tuple(name for name, _ in problem.arguments)
