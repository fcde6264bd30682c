"""The shared memory through which a tile changes its layout, as Triton 3.6 allocates it.

Elements that stay in registers on both sides are moved one after the other, through the same memory.
"""

from functools import cache

from blocktune.kernels.layouts.bases import BANK_BITS, LINE_BITS, common, line_starts
from blocktune.kernels.layouts.instructions import VECTOR_BITS, Move, moves
from blocktune.kernels.layouts.register_layouts import RegisterLayout


@cache
def exchange_bytes(source: RegisterLayout, target: RegisterLayout, element_bits: int, cc: tuple[int, int]) -> int:
    """Return the bytes of shared memory through which a tile of `source` becomes one of `target`."""
    found = [
        _conflicts_and_rounds(source, target, element_bits, move) for move in moves(source, target, element_bits, cc)
    ]
    if found:
        _, rounds = min(found, key=lambda pair: (pair[0], -pair[1]))
    else:
        _, rounds = _conflicts_and_rounds(source, target, element_bits, _plain_move(source, target, element_bits))
    return (source.elements >> rounds) * element_bits // 8


def _conflicts_and_rounds(
    source: RegisterLayout, target: RegisterLayout, element_bits: int, move: Move
) -> tuple[int, int]:
    """Return the bank conflicts of a move, and how often memory is used again, in powers of two."""
    dimensions, row = source.elements.bit_length() - 1, move.row
    row_bits = element_bits << len(row)
    banks = min((LINE_BITS // row_bits).bit_length() - 1, dimensions - len(row))
    starts = line_starts([*row, *move.written], [*row, *move.read], dimensions, dimensions - banks - len(row))
    again = sum(place in source.registers and place in target.registers for place in starts)
    conflicts = sum((1 << len(common(starts, rows))) - 1 for rows in (move.written, move.read))
    return conflicts, again - min(again, move.spare_registers)


def _plain_move(source: RegisterLayout, target: RegisterLayout, element_bits: int) -> Move:
    """Return the move of instructions that take fewer than VECTOR_BITS of a thread."""
    row = common(source.registers, target.registers)[: (VECTOR_BITS // element_bits).bit_length() - 1]
    row = _filled(row, source, target, element_bits)
    vectors = max(1, (element_bits << len(row)) // BANK_BITS).bit_length() - 1
    written, read = (list(layout.lanes[: len(layout.lanes) - vectors]) for layout in (source, target))
    return Move(row, written, read, spare_registers=0)


def _filled(row: list[int], source: RegisterLayout, target: RegisterLayout, element_bits: int) -> list[int]:
    """Return the row with places of registers and warps until it fills a bank."""
    missing = (BANK_BITS // element_bits).bit_length() - 1 - len(row)
    if missing <= 0:
        return row
    warps, others = ([place for place in layout.warps if place] for layout in (source, target))
    here = common([place for place in source.registers if place not in row], others)
    there = common([place for place in target.registers if place not in row], warps)
    most = min(here, there, key=min) if here and len(here) == len(there) else max(there, here, key=len)
    paired = [place for pair in zip(warps, others, strict=False) for place in pair]
    candidates = [*most, *common(warps, others), *paired, *warps, *others]
    return [*row, *dict.fromkeys(place for place in candidates if place not in row)][: len(row) + missing]
