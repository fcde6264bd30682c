"""The tiles that a block of a kernel keeps on the chip, each in its memory.

tuner/occupancy/tiles_by_kernel.py lists those of an ordinary forward or backward; a kernel with other ones lists
them itself, made of `shared_tile`, `register_tile` and the groups below.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from blocktune.kernels.hardware.limits import WARP_SIZE

REGISTER_BYTES = 4
ACCUMULATOR_BYTES = 4
"""Of a score, a statistic or an element of a sum: float32."""


class ChipMemory(StrEnum):
    """Memories of a multiprocessor."""

    REGISTERS = "registers"
    SHARED_MEMORY = "shared memory"
    TENSOR_MEMORY = "tensor memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipTile:
    """A matrix or a column of statistics in one memory.

    count: copies of it, such as the buffers of a pipeline. reuses: it takes the registers of what it is made of.
    """

    name: str
    rows: int
    columns: int
    element_bytes: int
    place: ChipMemory
    count: int = 1
    reuses: bool = False

    @property
    def bytes(self) -> int:
        return self.count * self.rows * self.columns * self.element_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rows": self.rows,
            "columns": self.columns,
            "element_bytes": self.element_bytes,
            "count": self.count,
            "bytes": self.bytes,
            "place": str(self.place),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OnChip:
    """What one block keeps on the chip.

    tiles: what the loop over tiles holds. leaving_bytes: shared memory that the output passes through after it.
    num_warps: of the block, those that hold tiles in registers.
    """

    tiles: tuple[ChipTile, ...]
    leaving_bytes: int = 0
    num_warps: int

    def bytes_in(self, place: ChipMemory) -> int:
        """Return the bytes of all tiles that live there."""
        return total_bytes(tile for tile in self.tiles if tile.place is place)

    @property
    def shared_bytes(self) -> int:
        """The most that is needed at one time: by the loop, or by the output on its way."""
        return max(self.leaving_bytes, self.bytes_in(ChipMemory.SHARED_MEMORY))

    @property
    def least_registers(self) -> int:
        """Registers a thread that the tiles alone fill, without an address, a counter or a temporary: no compiler needs
        fewer unless it spills. It may exceed what a thread can have."""
        held = total_bytes(tile for tile in self.tiles if tile.place is ChipMemory.REGISTERS and not tile.reuses)
        return -(-held // (REGISTER_BYTES * WARP_SIZE * self.num_warps))

    def to_json(self) -> dict[str, Any]:
        return {
            "tiles": [tile.to_json() for tile in self.tiles],
            "shared_bytes": self.shared_bytes,
            "least_registers": self.least_registers,
        }


def total_bytes(tiles: Iterable[ChipTile]) -> int:
    """Return the bytes of all these tiles."""
    return sum(tile.bytes for tile in tiles)


def shared_tile(name: str, rows: int, columns: int, element_bytes: int, count: int = 1) -> ChipTile:
    """Return a tile of which shared memory holds `count`."""
    return ChipTile(
        name=name, rows=rows, columns=columns, element_bytes=element_bytes, place=ChipMemory.SHARED_MEMORY, count=count
    )


def register_tile(name: str, rows: int, columns: int, element_bytes: int, *, reuses: bool = False) -> ChipTile:
    """Return a tile that the threads of a block hold together."""
    return ChipTile(
        name=name, rows=rows, columns=columns, element_bytes=element_bytes, place=ChipMemory.REGISTERS, reuses=reuses
    )


def softmax_tiles(block_m: int, block_n: int, width_v: int, element_bytes: int) -> tuple[ChipTile, ...]:
    """Return scores, probabilities in their place, accumulator and the statistics of every row, in registers."""
    return (
        register_tile("S", block_m, block_n, ACCUMULATOR_BYTES),
        register_tile("P", block_m, block_n, element_bytes, reuses=True),
        register_tile("O", block_m, width_v, ACCUMULATOR_BYTES),
        register_tile("m", block_m, 1, ACCUMULATOR_BYTES),
        register_tile("l", block_m, 1, ACCUMULATOR_BYTES),
    )


def gradient_tiles(
    block_m: int, block_n: int, widths: tuple[int, int], element_bytes: int, sums: ChipMemory = ChipMemory.REGISTERS
) -> tuple[ChipTile, ...]:
    """Return what a pass over keys holds: transposed scores and their gradients, from which P and dS are made in place,
    and dK and dV, of these widths, which are summed along the walk. dQ of a tile is made when the scores are gone."""
    width, width_v = widths
    return (
        register_tile("S", block_n, block_m, ACCUMULATOR_BYTES),
        register_tile("P", block_n, block_m, element_bytes, reuses=True),
        register_tile("dP", block_n, block_m, ACCUMULATOR_BYTES),
        replace(register_tile("dK", block_n, width, ACCUMULATOR_BYTES), place=sums),
        replace(register_tile("dV", block_n, width_v, ACCUMULATOR_BYTES), place=sums),
    )
