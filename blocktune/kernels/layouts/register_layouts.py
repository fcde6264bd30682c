"""The threads and registers that hold the elements of a tile, as Triton 3.6 lays them out.

A place in a tile of rows x columns is a number whose low bits are its column. Each bit of a register's, a lane's or a
warp's number moves the element by one power of two: a layout is these powers, and 0 where a bit moves nothing.
"""

import re
from dataclasses import dataclass
from functools import cache

from blocktune.kernels.hardware.limits import MatrixUnit

WARP_LANES, WARP_LANES_BITS = 32, 5
FRAGMENT = "c0 r3", "c1 c2 r0 r1 r2"
"""Registers and lanes of 16 x 8 accumulators of `mma.sync`, as bits of rows and columns."""
TURNED_OPERAND = {2: ("c0 c3", "c1 c2 r0 r1 r2"), 4: ("c2", "c0 c1 r0 r1 r2")}
"""The same of its second operand, turned round, by the bytes of an element."""


@dataclass(frozen=True, slots=True)
class RegisterLayout:
    """The places that the bits of a register's, a lane's and a warp's number move an element by.

    elements: of the tile.
    """

    elements: int
    registers: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]

    def turned(self, columns: int) -> "RegisterLayout":
        """Return the layout of the tile turned round, which had `columns` columns."""
        rows = self.elements // columns

        def turn(places: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(place * rows if place < columns else place // columns for place in places)

        return RegisterLayout(self.elements, turn(self.registers), turn(self.lanes), turn(self.warps))

    @property
    def joined(self) -> "RegisterLayout":
        """The layout of a tile whose even and odd columns are two of this one."""

        def wide(places: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(2 * place for place in places)

        return RegisterLayout(2 * self.elements, (1, *wide(self.registers)), wide(self.lanes), wide(self.warps))


@dataclass(frozen=True, slots=True)
class TileSize:
    """A tile of `rows` x `columns` elements, both powers of two."""

    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def turned(self) -> "TileSize":
        return TileSize(self.columns, self.rows)

    def place(self, bit: str) -> int:
        """Return the place of a bit such as `r3` of the row or `c0` of the column; 0 outside the tile."""
        power = 1 << int(bit[1:])
        if bit[0] == "c":
            return power if power < self.columns else 0
        return power * self.columns if power < self.rows else 0

    @property
    def bits(self) -> tuple[str, ...]:
        """The bits of the column, and then those of the row."""
        return (*_bits("c", self.columns), *_bits("r", self.rows))


def _bits(letter: str, size: int) -> tuple[str, ...]:
    return tuple(f"{letter}{bit}" for bit in range(size.bit_length() - 1))


@cache
def arranged(size: TileSize, registers: str, lanes: str, warps: str) -> RegisterLayout:
    """Return the layout of these bits; registers hold those that are left, too. Missing lanes hold what others do."""
    named = [re.findall(r"[rc]\d+", text) for text in (registers, lanes, warps)]
    taken = {bit for bits in named for bit in bits}
    named[0] += [bit for bit in size.bits if bit not in taken]
    of_registers, of_lanes, of_warps = (tuple(size.place(bit) for bit in bits) for bits in named)
    missing = (0,) * (WARP_LANES_BITS - len(of_lanes))
    return RegisterLayout(size.elements, tuple(place for place in of_registers if place), of_lanes + missing, of_warps)


def blocked(size: TileSize, thread_rows: int, thread_columns: int, num_warps: int) -> RegisterLayout:
    """Return the layout of threads that hold `thread_rows` x `thread_columns` each: the threads of a warp go along the
    columns first, and so do the warps."""
    registers = [*_bits("c", min(thread_columns, size.columns)), *_bits("r", min(thread_rows, size.rows))]
    free = [bit for bit in size.bits if bit not in registers]
    lanes, free = free[:WARP_LANES_BITS], free[WARP_LANES_BITS:]
    warps = free[: num_warps.bit_length() - 1]
    return arranged(size, " ".join(registers), " ".join(lanes), " ".join(warps))


def loaded(size: TileSize, vector: int, num_warps: int) -> RegisterLayout:
    """Return the layout of a tile whose threads load or store `vector` columns at a time."""
    return blocked(size, 1, min(vector, max(1, size.elements // (WARP_LANES * num_warps))), num_warps)


def summed(size: TileSize, num_warps: int) -> RegisterLayout:
    """Return the layout of accumulators of plain multiply-adds."""
    per_thread = size.elements // (WARP_LANES * num_warps)
    side = 4 if per_thread >= 16 else 2 if per_thread >= 4 else 1
    return blocked(size, side, side, num_warps)


def accumulated(size: TileSize, num_warps: int, *, by_columns: bool) -> RegisterLayout:
    """Return the layout of accumulators of `mma.sync`, whose warps stand next to (`by_columns`) or below each other."""
    return arranged(size, *FRAGMENT, _warps("c" if by_columns else "r", 3 if by_columns else 4, num_warps))


def accumulated_by_group(size: TileSize, num_warps: int) -> RegisterLayout:
    """Return the layout of accumulators of `wgmma`: two groups of warps share the columns of 64 rows."""
    columns = f"c{size.columns.bit_length() - 2}" if size.rows <= 64 else "r6"
    return arranged(size, *FRAGMENT, f"r4 r5 {columns if num_warps > 4 else ''}")


def in_tensor_memory(size: TileSize, num_warps: int) -> RegisterLayout:
    """Return the layout in which accumulators come from tensor memory: a lane has a row, or half of one of 64 rows."""
    top = size.columns.bit_length() - 2
    halves = f"c{top}" if num_warps > 4 else ""
    if size.rows > 64:
        return arranged(size, "", "r0 r1 r2 r3 r4", f"r5 r6 {halves}")
    return arranged(size, "", f"r0 r1 r2 r3 c{top - bool(halves)}", f"r4 r5 {halves}")


def products_layout(unit: MatrixUnit, size: TileSize, num_warps: int, *, by_columns: bool) -> RegisterLayout:
    """Return the layout of what an instruction's products leave in registers; by_columns: as of `accumulated`."""
    if unit == "none":
        return summed(size, num_warps)
    if unit == "tcgen05":
        return in_tensor_memory(size, num_warps)
    if unit == "wgmma":
        return accumulated_by_group(size, num_warps)
    return accumulated(size, num_warps, by_columns=by_columns)


def scores_layout(unit: MatrixUnit, size: TileSize, num_warps: int, *, by_columns: bool) -> RegisterLayout:
    """Return the same for scores: all warps of a block hold their rows, though some hold what others do."""
    if unit == "wgmma":
        return accumulated(size, num_warps, by_columns=False)
    return products_layout(unit, size, num_warps, by_columns=by_columns)


def turned_operand(size: TileSize, num_warps: int, element_bytes: int, *, by_columns: bool) -> RegisterLayout:
    """Return the layout of rows that are columns of the second operand of `mma.sync`: keys of a product of scores.
    by_columns: whether warps stand next to each other, so that each has keys of its own."""
    return arranged(size, *TURNED_OPERAND[element_bytes], _warps("r", 3, num_warps) if by_columns else "")


def _warps(letter: str, first: int, num_warps: int) -> str:
    return " ".join(f"{letter}{first + bit}" for bit in range(num_warps.bit_length() - 1))
