"""Instructions that move registers to and from shared memory, and the tiles that a pair of them moves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blocktune.kernels.layouts.bases import common
from blocktune.kernels.layouts.register_layouts import RegisterLayout

VECTOR_BITS = 128
"""What a thread, or a row of a matrix, moves at a time."""
ROW_BITS = 3
"""Bits of the number of a row among those that are moved together."""


@dataclass(frozen=True, slots=True)
class MoveInstruction:
    """An instruction by the bits of a lane's number.

    row_lanes: of lanes that hold one row of VECTOR_BITS together; the rest of the row is in registers.
    rows_lanes: of lanes that hold different rows.
    """

    row_lanes: tuple[int, ...]
    rows_lanes: tuple[int, ...]

    @property
    def spare_registers(self) -> int:
        """Bits of registers that one instruction moves besides."""
        return len(self.row_lanes) + len(self.rows_lanes) - ROW_BITS

    def rows(self, layout: RegisterLayout, row: Sequence[int]) -> list[int] | None:
        """Return the places of the rows that are moved together, or None if registers are too few for them."""
        from_registers = [place for place in layout.registers if place and place not in row]
        missing = ROW_BITS - len(self.rows_lanes)
        if len(from_registers) < missing:
            return None
        return from_registers[:missing] + [layout.lanes[bit] for bit in self.rows_lanes]


VECTORS = MoveInstruction((), (0, 1, 2))
MATRICES = MoveInstruction((0, 1), (2, 3, 4))
MATRICES_TURNED = MoveInstruction((2, 3, 4), (0, 1))


@dataclass(frozen=True, slots=True)
class Move:
    """A pair of instructions: places of a row, and of the rows that are written and read together."""

    row: list[int]
    written: list[int]
    read: list[int]
    spare_registers: int


def moves(source: RegisterLayout, target: RegisterLayout, element_bits: int, cc: tuple[int, int]) -> Iterator[Move]:
    """Yield the pairs of instructions of a compute capability that can move the tile by rows of VECTOR_BITS."""
    for store in _instructions(element_bits, matrices=cc >= (9, 0)):
        for load in _instructions(element_bits, matrices=cc >= (7, 5)):
            row = _row(source, target, store, load, (VECTOR_BITS // element_bits).bit_length() - 1)
            if row is None:
                continue
            written, read = store.rows(source, row), load.rows(target, row)
            if written is not None and read is not None:
                yield Move(row, written, read, min(store.spare_registers, load.spare_registers))


def _instructions(element_bits: int, *, matrices: bool) -> tuple[MoveInstruction, ...]:
    if not matrices or element_bits > 32:
        return (VECTORS,)
    return (VECTORS, MATRICES, MATRICES_TURNED) if element_bits == 16 else (VECTORS, MATRICES)


def _row(
    source: RegisterLayout, target: RegisterLayout, store: MoveInstruction, load: MoveInstruction, bits: int
) -> list[int] | None:
    """Return the places of a row of 2**bits elements that both instructions can move, or None."""
    one, other, wide, narrow = source, target, store, load
    if len(wide.row_lanes) > len(narrow.row_lanes):
        one, other, wide, narrow = target, source, load, store
    in_registers = bits - len(narrow.row_lanes)
    row = common(one.registers, other.registers)[: max(0, in_registers)]
    lanes, few = [other.lanes[bit] for bit in narrow.row_lanes], [one.lanes[bit] for bit in wide.row_lanes]
    if in_registers < 0 or len(row) < in_registers or 0 in lanes or 0 in few:
        return None
    beside = len(lanes) - len(few)
    if any(place not in one.registers for place in lanes[:beside]) or lanes[beside:] != few:
        return None
    return row + lanes
