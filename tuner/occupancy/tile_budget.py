"""What a block of a FlashAttention-2 forward kernel keeps on the chip, tile by tile, and where.

    budget = on_chip(config, shape, limits_for((9, 0)))
    [(tile.name, tile.bytes, str(tile.place)) for tile in budget.tiles]
    budget.shared_bytes, budget.least_registers

Where a tile lives depends on the instruction of the matrix products. `wgmma` reads Q, K and V from shared memory and
accumulates in registers. `mma` takes all operands from registers, so K and V pass through shared memory one tile
earlier. `tcgen05` keeps the accumulator and the probabilities in tensor memory. Without tensor cores a tile of K or V
is spread over the threads through shared memory at the moment it is needed.

The sum of the shared tiles is what the compiler allocates for `wgmma`. Elsewhere it may allocate more, for conversions
between layouts or because Q leaves later (docs/shared_memory.md has figures). Barriers are not counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from blocktune.kernels.base.flash_kernel import IN_ORDER, buffer_depth, exchanges_probabilities, padded_width
from blocktune.kernels.hardware.limits import WARP_SIZE, ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

FLOAT32_BYTES = 4
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

    tiles: what the loop over tiles holds. loading_bytes: shared memory that the queries pass through before it.
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
    queries = _queries(config, shape, limits)
    softmax = _softmax(config, shape, limits)
    return OnChip(
        tiles=(queries, *_keys(config, shape, limits), *softmax),
        loading_bytes=queries.bytes if queries.place is not Place.TENSOR_MEMORY else 0,
        num_warps=config.num_warps,
    )


def _queries(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> Tile:
    """A float32 operand of `mma` and `wgmma` is kept as two tf32 ones. Running ahead of the second product, all but
    `wgmma` moves Q to registers before the buffers fill; float32 products of `tcgen05` have it in tensor memory."""
    place = Place.SHARED_MEMORY
    if limits.mma in ("none", "mma") and not _in_order(config):
        place = Place.REGISTERS
    elif limits.mma == "tcgen05" and shape.element_bytes == FLOAT32_BYTES:
        place = Place.TENSOR_MEMORY
    return Tile(
        name="Q",
        rows=config.block_m,
        columns=padded_width(shape.head_dim),
        element_bytes=shape.element_bytes,
        place=place,
        count=2 if shape.element_bytes == FLOAT32_BYTES and limits.mma in ("mma", "wgmma") else 1,
    )


def _keys(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> list[Tile]:
    """K and V in shared memory: one buffer a stage where the products read the buffers, one fewer where they read
    registers; and one for both, in turns, where nothing is loaded ahead."""
    widths = {"K": padded_width(shape.head_dim), "V": padded_width(shape.head_dim_v)}
    widest = max(widths.values())
    buffers = buffer_depth(config, shape, limits)
    if limits.mma == "wgmma" and shape.element_bytes == FLOAT32_BYTES:
        halves = [_key_tile("K or V, as two tf32 tiles", widest, 2, config, shape)]
        return halves + [_key_tile(name, width, buffers, config, shape) for name, width in widths.items() if buffers]
    if buffers == 0 or (config.num_stages == 1 and _in_order(config)):
        return [_key_tile("K or V, in turns", widest, 1, config, shape)]
    return [_key_tile(name, width, buffers, config, shape) for name, width in widths.items()]


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
    accumulates_in = Place.TENSOR_MEMORY if limits.mma == "tcgen05" else Place.REGISTERS
    p_place = Place.SHARED_MEMORY if exchanges_probabilities(config, shape, limits) else accumulates_in
    m, n, width_v = config.block_m, config.block_n, padded_width(shape.head_dim_v)
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
