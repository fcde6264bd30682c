"""Which stored config serves a call of a tuned kernel: from its own measurement down to the first of the list.

    frozen            from a frozen file, or from rank 0
    exact             measured for this call on this device, with this triton, ptxas and driver
    other_driver      the same with another driver or power limit
    other_compiler    the same with another triton or ptxas
    same_capability   measured for this call elsewhere, on a device of this compute capability
    nearest           measured for other key values, by any of the above
    default           the first config of the list

What was measured with another source of the kernel is left out: its parameters may mean something else now.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.stored.provenance import (
    DISTANCE_OF_REUSE,
    Identity,
    Reuse,
    nearest_rows,
    present_identity,
    reuse_of,
)
from blocktune.kernels.stored.sources import autotuned_rows
from blocktune.kernels.tuned.config import Problem, UserConfig
from blocktune.kernels.values.errors import UsageError

logger = logging.getLogger("blocktune")


class UserRung(StrEnum):
    """The steps of the ladder, best first."""

    FROZEN = "frozen"
    EXACT = "exact"
    OTHER_DRIVER = "other_driver"
    OTHER_COMPILER = "other_compiler"
    SAME_CAPABILITY = "same_capability"
    NEAREST = "nearest"
    DEFAULT = "default"

    @property
    def place(self) -> int:
        """0 for the best."""
        return list(UserRung).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserWinner:
    """A stored winner of a kernel. reuse: how far its measurement is from this device and software."""

    problem: Problem
    config: UserConfig
    time_us: float
    reuse: Reuse


def stored_winners(
    kernel: str, source_hash: str, device: DeviceSpec, path: str | Path | None = None
) -> list[UserWinner]:
    """Return what a store or results file (by default the user's) knows of a kernel with this very source, on devices
    of this compute capability. One that cannot be read costs a line in the log, never a call; so does a row that breaks
    a rule."""
    try:
        rows = autotuned_rows(device, path, kernel=kernel, source_hash=source_hash)
    except Exception as error:  # whatever is wrong with a place or a file: a call goes on without
        logger.info("No stored configs of %s: %s", kernel, error)
        return []
    found = []
    for row in rows:
        try:
            reuse = _reuse(row, device)
            found += [] if reuse is None else [winner_of(row, reuse)]
        except Exception as error:  # whatever it holds
            logger.warning("A stored winner of %s is ignored: %.300s", kernel, error)
    return found


def candidates(stored: Iterable[UserWinner], problem: Problem) -> Iterator[tuple[UserRung, UserWinner]]:
    """Yield the stored winners that may serve the problem, best first."""
    winners = list(stored)
    ours = (winner for winner in winners if winner.problem == problem)
    for winner in sorted(ours, key=lambda winner: DISTANCE_OF_REUSE[winner.reuse]):
        yield UserRung(str(winner.reuse)), winner
    others = ((problem.distance(winner.problem), winner) for winner in winners if winner.problem != problem)
    near = ((distance, winner.reuse, winner) for distance, winner in others if distance is not None)
    for winner in nearest_rows(near):
        yield UserRung.NEAREST, winner


def winner_of(row: Mapping[str, object], reuse: Reuse) -> UserWinner:
    """Return the winner that a row of a store or a frozen document holds.

    Raises:
        UsageError: a value breaks a rule.
    """
    time_us = row["time_us"]
    if not isinstance(time_us, (int, float)) or not 0 < time_us < 1e12:
        raise UsageError(f"`0 < time_us < 1e12` must hold, but got {time_us!r}.")
    return UserWinner(
        problem=Problem.from_document(row["problem"]),
        config=UserConfig.from_document(row["kernel"], row["config"]),
        time_us=float(time_us),
        reuse=reuse,
    )


def _reuse(row: Mapping[str, object], device: DeviceSpec) -> Reuse | None:
    """Return what the measurement of a stored row is worth on a device; None is nothing."""
    source_hash = str(row["source_hash"])
    software = {name: str(row[name]) for name in ("device_key", "triton", "ptxas", "driver")}
    measured = Identity(kernel_hash=source_hash, **software)
    return reuse_of(measured, present_identity(device, source_hash))
