"""The ways in which ranks can share attention, and which of them a problem allows."""

from dataclasses import dataclass
from enum import StrEnum

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.parallel.plan.blocks import Sight
from blocktune.runtime.parallel.plan.layout import SequenceLayout


class Schedule(StrEnum):
    """How queries and keys of different ranks meet; those that hold fewer keys of other ranks at a time come first."""

    RING = "ring"
    """The keys of one rank after the other travel while blocks compute."""
    ULYSSES = "ulysses"
    """Each rank gets all tokens of some heads."""
    ALL_GATHER = "all_gather"
    """The keys of all other ranks travel while the rank's own are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProblem:
    """Attention that ranks share. num_columns: ranks that trade heads whatever the schedule."""

    batch: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    element_bytes: int
    sight: Sight
    layout: SequenceLayout
    num_columns: int = 1


def possible(problem: RankProblem) -> tuple[Schedule, ...]:
    """Return the schedules of which each rank gets whole heads."""
    return tuple(schedule for schedule in Schedule if _obstacle(problem, schedule) is None)


def require_possible(problem: RankProblem, schedule: Schedule) -> None:
    """Check that each rank gets whole heads.

    Raises:
        UsageError: it does not.
    """
    obstacle = _obstacle(problem, schedule)
    if obstacle is not None:
        raise UsageError(obstacle)


def _obstacle(problem: RankProblem, schedule: Schedule) -> str | None:
    """Return why a schedule cannot serve, or None."""
    if schedule is Schedule.ULYSSES and problem.num_columns > 1:
        return (
            f"The schedule `{schedule}` needs ranks in a row, but got a mesh with {problem.num_columns} columns. Take "
            f"`{Schedule.RING}` or `{Schedule.ALL_GATHER}`, which trade heads along the second dimension."
        )
    size, heads, heads_kv = columns_of(problem, schedule), problem.num_heads, problem.num_heads_kv
    if heads % size or (heads_kv % size and size % heads_kv):
        return (
            f"{heads} query heads and {heads_kv} key heads cannot be divided among the {size} ranks that trade heads: "
            "each rank must get equally many query heads, and equally many key heads or a single one. Use "
            f"`{Schedule.RING}` or `{Schedule.ALL_GATHER}`, and a mesh with fewer ranks in the second dimension."
        )
    return None


def columns_of(problem: RankProblem, schedule: Schedule) -> int:
    """Count the ranks that trade heads."""
    return problem.layout.num_ranks if schedule is Schedule.ULYSSES else problem.num_columns
