"""What a block of a FlashAttention-2 forward kernel keeps on the chip, tile by tile, and where.

    budget = on_chip(config, shape, limits_for((9, 0)))
    [(tile.name, tile.bytes, str(tile.place)) for tile in budget.tiles]
    budget.shared_bytes, budget.least_registers

Where a tile lives depends on the instruction of the matrix products. `wgmma` reads Q, K and V from shared memory and
accumulates in registers. `mma` takes all operands from registers, so K and V pass through shared memory one tile
earlier. `tcgen05` keeps the accumulator and the probabilities in tensor memory. Without tensor cores every operand is
spread over the threads through shared memory, as float32, at the moment it is needed.

The sum of the shared tiles is what the compiler allocates for `wgmma`, and without tensor cores. Elsewhere it may
allocate more, for conversions between layouts or because Q leaves later (docs/models/shared_memory.md has figures).
Barriers are not counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from blocktune.kernels.base.flash_kernel import (
    FLOAT32_BYTES,
    IN_ORDER,
    buffer_depth,
    exchanges_in_turns,
    exchanges_probabilities,
    operand_widths,
    product_unit,
)
from blocktune.kernels.hardware.limits import WARP_SIZE, ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

REGISTER_BYTES = 4


class Place(StrEnum):
    """Memories of a multiprocessor."""

    REGISTERS = "registers"
    SHARED_MEMORY = "shared memory"
    TENSOR_MEMORY = "tensor memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A matrix or a column of statistics in one memory.

    count: copies of it, such as the buffers of a pipeline. reuses: it takes the registers of what it is made of.
    """

    name: str
    rows: int
    columns: int
    element_bytes: int
    place: Place
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
    """The budget of one block.

    tiles: what the loop over tiles holds. loading_bytes: shared memory that the queries pass through before it, or the
    output after it.
    num_warps: of the block, those that hold tiles in registers.
    """

    tiles: tuple[Tile, ...]
    loading_bytes: int
    num_warps: int

    def bytes_in(self, place: Place) -> int:
        """Of all tiles that live there."""
        return _total(tile for tile in self.tiles if tile.place is place)

    @property
    def shared_bytes(self) -> int:
        """The most that is needed at one time: by the queries on their way, or by the loop."""
        return max(self.loading_bytes, self.bytes_in(Place.SHARED_MEMORY))

    @property
    def least_registers(self) -> int:
        """Registers a thread that the tiles alone fill, without an address, a counter or a temporary: no compiler needs
        fewer unless it spills. It may exceed what a thread can have."""
        held = _total(tile for tile in self.tiles if tile.place is Place.REGISTERS and not tile.reuses)
        return -(-held // (REGISTER_BYTES * WARP_SIZE * self.num_warps))

    def to_json(self) -> dict[str, Any]:
        return {
            "tiles": [tile.to_json() for tile in self.tiles],
            "shared_bytes": self.shared_bytes,
            "least_registers": self.least_registers,
        }


def on_chip(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
    """The budget of this config on this compute capability.

    Args:
        config: of a `FlashKernel`.
        shape: its head dimensions are padded to powers of two, as the kernels hold them.
        limits: of the device.
    """
    if limits.mma == "none":
        return plain_on_chip(config, shape, operand_widths(shape))
    queries = _queries(config, shape, limits)
    softmax = _softmax(config, shape, limits)
    return OnChip(
        tiles=(queries, *_keys(config, shape, limits), *softmax),
        loading_bytes=queries.bytes if queries.place is not Place.TENSOR_MEMORY else 0,
        num_warps=config.num_warps,
    )


def plain_on_chip(config: KernelConfig, shape: AttentionShape, widths: tuple[int, int]) -> OnChip:
    """Return the budget of plain multiply-adds over tiles of these padded widths of Q and K, and of V.

    Their operands are float32 in shared memory: Q for the whole loop, and then whichever is larger of K and of what
    follows it. Scores of 16-bit inputs are converted before P and V come, one after the other.
    """
    m, n, (width, width_v) = config.block_m, config.block_n, widths
    p_and_v = [_operand("P", m, n), _operand("V", n, width_v)]
    largest = [max([_operand("K", n, width), *p_and_v], key=lambda tile: tile.bytes)]
    if shape.element_bytes == FLOAT32_BYTES and _total(p_and_v) > n * width * FLOAT32_BYTES:
        largest = p_and_v
    others = "KPV".translate({ord(tile.name): None for tile in largest})
    turns = [replace(tile, name=f"{tile.name}, in turns with {' and '.join(others)}") for tile in largest]
    held = [_held_tile("S", m, n), _held_tile("O", m, width_v), _held_tile("m", m, 1), _held_tile("l", m, 1)]
    return OnChip(tiles=(_operand("Q", m, width), *turns, *held), loading_bytes=0, num_warps=config.num_warps)


def _operand(name: str, rows: int, columns: int) -> Tile:
    return Tile(name=name, rows=rows, columns=columns, element_bytes=FLOAT32_BYTES, place=Place.SHARED_MEMORY)


def _held_tile(name: str, rows: int, columns: int) -> Tile:
    return Tile(name=name, rows=rows, columns=columns, element_bytes=FLOAT32_BYTES, place=Place.REGISTERS)


def _queries(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> Tile:
    """A float32 operand of `mma` and `wgmma` is kept as two tf32 ones. Running ahead of the second product, all but
    `wgmma` moves Q to registers before the buffers fill; float32 products of `tcgen05` have it in tensor memory."""
    place, unit = Place.SHARED_MEMORY, product_unit(config, limits)
    if unit == "mma" and not _in_order(config):
        place = Place.REGISTERS
    elif unit == "tcgen05" and shape.element_bytes == FLOAT32_BYTES:
        place = Place.TENSOR_MEMORY
    return Tile(
        name="Q",
        rows=config.block_m,
        columns=operand_widths(shape)[0],
        element_bytes=shape.element_bytes,
        place=place,
        count=2 if shape.element_bytes == FLOAT32_BYTES and unit in ("mma", "wgmma") else 1,
    )


def _keys(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> list[Tile]:
    """K and V in shared memory: one buffer a stage where the products read the buffers, one fewer where they read
    registers; and one for both, in turns, where nothing is loaded ahead."""
    width, width_v = operand_widths(shape)
    unit, buffers = product_unit(config, limits), buffer_depth(config, shape, limits)
    named = (("K", width), ("V", width_v))
    if exchanges_in_turns(config, limits):
        return [_key_tile("K", width, 1, config, shape), _turns(config, shape)]
    if unit == "wgmma" and shape.element_bytes == FLOAT32_BYTES:
        halves = [_key_tile("K or V, as two tf32 tiles", max(width, width_v), 2, config, shape)]
        return halves + [_key_tile(name, columns, buffers, config, shape) for name, columns in named if buffers]
    if buffers == 0:
        return [_key_tile("V, after K piece by piece", width_v, 1, config, shape)]
    if config.num_stages == 1 and _in_order(config):
        return [_key_tile("K or V, in turns", max(width, width_v), 1, config, shape)]
    return [_key_tile(name, columns, buffers, config, shape) for name, columns in named]


def _turns(config: KernelConfig, shape: AttentionShape) -> Tile:
    """P, which warps exchange, or V after it."""
    m, n, width_v = config.block_m, config.block_n, operand_widths(shape)[1]
    tile = _key_tile("V or P, in turns", width_v, 1, config, shape)
    return replace(tile, rows=m, columns=n) if m > width_v else tile


def _key_tile(name: str, width: int, count: int, config: KernelConfig, shape: AttentionShape) -> Tile:
    return Tile(
        name=name,
        rows=config.block_n,
        columns=width,
        element_bytes=shape.element_bytes,
        place=Place.SHARED_MEMORY,
        count=count,
    )


def _softmax(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> list[Tile]:
    """Scores, probabilities, accumulator and the statistics of every row."""
    accumulates_in = Place.TENSOR_MEMORY if product_unit(config, limits) == "tcgen05" else Place.REGISTERS
    p_place = Place.SHARED_MEMORY if exchanges_probabilities(config, shape, limits) else accumulates_in
    m, n, width_v = config.block_m, config.block_n, operand_widths(shape)[1]
    return [
        Tile(name="S", rows=m, columns=n, element_bytes=FLOAT32_BYTES, place=Place.REGISTERS),
        Tile(name="P", rows=m, columns=n, element_bytes=shape.element_bytes, place=p_place, reuses=_in_order(config)),
        Tile(name="O", rows=m, columns=width_v, element_bytes=FLOAT32_BYTES, place=accumulates_in),
        Tile(name="m", rows=m, columns=1, element_bytes=FLOAT32_BYTES, place=Place.REGISTERS),
        Tile(name="l", rows=m, columns=1, element_bytes=FLOAT32_BYTES, place=Place.REGISTERS),
    ]


def _in_order(config: KernelConfig) -> bool:
    return config.parameters["schedule"] == IN_ORDER


def _total(tiles: Iterable[Tile]) -> int:
    return sum(tile.bytes for tile in tiles)
