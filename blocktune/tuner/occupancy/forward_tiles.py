"""The tiles that a block of a FlashAttention-2 forward kernel keeps on the chip, and where.

    held = on_chip(config, shape, limits_for((9, 0)))
    [(tile.name, tile.bytes, str(tile.place)) for tile in held.tiles]
    held.shared_bytes, held.least_registers

Where a tile lives depends on the instruction of the matrix products. `wgmma` reads Q, K and V from shared memory and
accumulates in registers. `mma` takes all operands from registers, so K and V pass through shared memory one tile
earlier. `tcgen05` keeps the accumulator and the probabilities in tensor memory. Without tensor cores every operand is
spread over the threads through shared memory, as float32, at the moment it is needed.

Tiles that change their layout, and barriers, are not listed (notes/models/shared_memory.md says what they take).
"""

from dataclasses import replace

from blocktune.kernels.base.flash_kernel import (
    FLOAT32_BYTES,
    IN_ORDER,
    buffer_depth,
    exchanges_in_turns,
    exchanges_probabilities,
    operand_widths,
    product_unit,
    tf32_tiles,
)
from blocktune.kernels.base.on_chip import ChipMemory, ChipTile, OnChip, total_bytes
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape


def on_chip(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
    """Return the tiles of this config on this compute capability.

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
        num_warps=config.num_warps,
    )


def plain_on_chip(config: KernelConfig, shape: AttentionShape, widths: tuple[int, int]) -> OnChip:
    """Return the tiles for plain multiply-adds, with these padded widths for Q and K, and for V.

    Their operands are float32 in shared memory: Q for the whole loop, and then whichever is larger of K and of what
    follows it. Scores of 16-bit inputs are converted before P and V come, one after the other.
    """
    m, n, (width, width_v) = config.block_m, config.block_n, widths
    p_and_v = [_operand("P", m, n), _operand("V", n, width_v)]
    largest = [max([_operand("K", n, width), *p_and_v], key=lambda tile: tile.bytes)]
    if shape.element_bytes == FLOAT32_BYTES and total_bytes(p_and_v) > n * width * FLOAT32_BYTES:
        largest = p_and_v
    others = "KPV".translate({ord(tile.name): None for tile in largest})
    turns = [replace(tile, name=f"{tile.name}, in turns with {' and '.join(others)}") for tile in largest]
    held = [_held_tile("S", m, n), _held_tile("O", m, width_v), _held_tile("m", m, 1), _held_tile("l", m, 1)]
    return OnChip(tiles=(_operand("Q", m, width), *turns, *held), num_warps=config.num_warps)


def _operand(name: str, rows: int, columns: int) -> ChipTile:
    return ChipTile(name=name, rows=rows, columns=columns, element_bytes=FLOAT32_BYTES, place=ChipMemory.SHARED_MEMORY)


def _held_tile(name: str, rows: int, columns: int) -> ChipTile:
    return ChipTile(name=name, rows=rows, columns=columns, element_bytes=FLOAT32_BYTES, place=ChipMemory.REGISTERS)


def _queries(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> ChipTile:
    """Return the queries. A float32 operand of `mma` and `wgmma` is kept as two tf32 ones; float32 products of
    `tcgen05` have it in tensor memory."""
    unit = product_unit(config, limits)
    elsewhere = unit == "tcgen05" and shape.element_bytes == FLOAT32_BYTES
    return ChipTile(
        name="Q",
        rows=config.block_m,
        columns=operand_widths(shape)[0],
        element_bytes=shape.element_bytes,
        place=ChipMemory.TENSOR_MEMORY if elsewhere else ChipMemory.SHARED_MEMORY,
        count=1 if elsewhere else tf32_tiles(shape),
    )


def _keys(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> list[ChipTile]:
    """Return K and V in shared memory: one buffer per stage where the products read the buffers, one fewer where they
    read registers; and one for both, in turns, where nothing is loaded ahead."""
    width, width_v = operand_widths(shape)
    unit, buffers = product_unit(config, limits), buffer_depth(config, shape, limits)
    named = (("K", width), ("V", width_v))
    if exchanges_in_turns(config, limits):
        return [_key_tile("K", width, 1, config, shape), _turns(config, shape)]
    if unit in ("wgmma", "tcgen05") and shape.element_bytes == FLOAT32_BYTES:
        halves = [_key_tile("K or V, as two tf32 tiles", max(width, width_v), 2, config, shape)]
        return halves + [_key_tile(name, columns, buffers, config, shape) for name, columns in named if buffers]
    if buffers == 0:
        return [_key_tile("V, after K piece by piece", width_v, 1, config, shape)]
    if config.num_stages == 1 and _in_order(config):
        return [_key_tile("K or V, in turns", max(width, width_v), 1, config, shape)]
    tiles = [_key_tile(name, columns, buffers, config, shape) for name, columns in named]
    if unit == "tcgen05" and config.num_stages > 1 and not _in_order(config):  # one V fewer
        tiles[1] = replace(tiles[1], count=buffers - 1)
    return tiles


def _turns(config: KernelConfig, shape: AttentionShape) -> ChipTile:
    """Return P, which warps exchange, or V after it."""
    m, n, width_v = config.block_m, config.block_n, operand_widths(shape)[1]
    tile = _key_tile("V or P, in turns", width_v, 1, config, shape)
    return replace(tile, rows=m, columns=n) if m > width_v else tile


def _key_tile(name: str, width: int, count: int, config: KernelConfig, shape: AttentionShape) -> ChipTile:
    return ChipTile(
        name=name,
        rows=config.block_n,
        columns=width,
        element_bytes=shape.element_bytes,
        place=ChipMemory.SHARED_MEMORY,
        count=count,
    )


def _softmax(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> list[ChipTile]:
    """Return the scores, probabilities, accumulator and the statistics of every row."""
    accumulates_in = ChipMemory.TENSOR_MEMORY if product_unit(config, limits) == "tcgen05" else ChipMemory.REGISTERS
    p_place = ChipMemory.SHARED_MEMORY if exchanges_probabilities(config, shape, limits) else accumulates_in
    m, n, width_v = config.block_m, config.block_n, operand_widths(shape)[1]
    p_tile = ChipTile(
        name="P",
        rows=m,
        columns=n,
        element_bytes=shape.element_bytes,
        place=p_place,
        count=tf32_tiles(shape) if p_place is ChipMemory.SHARED_MEMORY else 1,
        reuses=_in_order(config),
    )
    return [
        ChipTile(name="S", rows=m, columns=n, element_bytes=FLOAT32_BYTES, place=ChipMemory.REGISTERS),
        p_tile,
        ChipTile(name="O", rows=m, columns=width_v, element_bytes=FLOAT32_BYTES, place=accumulates_in),
        ChipTile(name="m", rows=m, columns=1, element_bytes=FLOAT32_BYTES, place=ChipMemory.REGISTERS),
        ChipTile(name="l", rows=m, columns=1, element_bytes=FLOAT32_BYTES, place=ChipMemory.REGISTERS),
    ]


def _in_order(config: KernelConfig) -> bool:
    return config.parameters["schedule"] == IN_ORDER
