"""Cells that are drawn by a seed: one call of attention each, of every group in its share."""

from dataclasses import dataclass
from typing import Any, Self

from blocktune.kernels.values.shape import AttentionShape, Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One call.

    group: which group it belongs to. shape: of packed sequences and pages with the longest ones. lengths: the tokens of
    each packed sequence, or the keys of each entry of a paged cache; none otherwise.
    """

    group: str
    shape: AttentionShape
    lengths: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """The call in a line."""
        return f"{self.group}: {self.shape.label}"

    @property
    def is_backward(self) -> bool:
        """Whether the gradients are timed."""
        return self.shape.direction is Direction.BACKWARD

    def to_json(self) -> dict[str, Any]:
        return {"group": self.group, "shape": self.shape.to_json(), "lengths": list(self.lengths)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the cell that `to_json` wrote."""
        shape = AttentionShape.from_json(data["shape"])
        return cls(group=data["group"], shape=shape, lengths=tuple(data["lengths"]))
