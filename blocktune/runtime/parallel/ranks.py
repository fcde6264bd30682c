"""The ranks that share a sequence, as a row or as a table whose rows trade heads for tokens."""

from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.parallel.messages import ProcessGroup


@dataclass(frozen=True, slots=True)
class Ranks:
    """A table of ranks: along a column keys travel, along a row heads are traded for tokens.

    number: of this rank, row after row. column, row: the groups of this rank, None where it is alone. num_rows: ranks
    of a column. num_columns: ranks of a row.
    """

    number: int
    column: ProcessGroup
    row: ProcessGroup
    num_rows: int
    num_columns: int

    @classmethod
    def of(cls, group: Any) -> Self:
        """Return the ranks of a process group, of a DeviceMesh with one or two dimensions, or of all processes.

        Raises:
            UsageError: torch.distributed is not initialised, this rank is not in the group, or it is a mesh of more
                dimensions.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                "Attention over several ranks needs an initialised process group, but there is no group. Call "
                "torch.distributed.init_process_group first; one process alone calls blocktune.attention."
            )
        if hasattr(group, "get_coordinate"):
            return cls._of_mesh(group)
        group = dist.group.WORLD if group is None else group
        number = dist.get_rank(group)
        if number < 0:
            raise UsageError(
                f"Only ranks of `group` may call this, but rank {dist.get_rank()} is not in it. Give its own group."
            )
        return cls(number, group, None, dist.get_world_size(group), 1)

    @classmethod
    def _of_mesh(cls, mesh: Any) -> Self:
        place = mesh.get_coordinate()
        if mesh.ndim > 2 or place is None:
            raise UsageError(
                "A DeviceMesh as `group` must have one or two dimensions and hold this rank, but got one with "
                f"{mesh.ndim} and this rank at {place}. Take a sub-mesh by its names: keys travel along the first "
                "dimension, heads along the second."
            )
        if mesh.ndim == 1:
            return cls(place[0], mesh.get_group(), None, mesh.size(), 1)
        rows, columns = mesh.size(0), mesh.size(1)
        return cls(place[0] * columns + place[1], mesh.get_group(0), mesh.get_group(1), rows, columns)

    @property
    def size(self) -> int:
        """Ranks that share the sequence."""
        return self.num_rows * self.num_columns

    @property
    def row_number(self) -> int:
        """Which row this rank is in, which is its number in the column."""
        return self.number // self.num_columns

    @property
    def column_number(self) -> int:
        """Which column this rank is in, which is its number in the row."""
        return self.number % self.num_columns

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The groups in which this rank is not alone, the row first."""
        return tuple(group for group in (self.row, self.column) if group is not None)

    def as_row(self) -> "Ranks":
        """Return the ranks of a column as a row, whose ranks trade heads for tokens."""
        return Ranks(self.number, None, self.column, 1, self.num_rows)
