"""Layouts of tiles over threads, and the memory through which one becomes another, by Triton 3.6's allocations."""

from itertools import product

import pytest

from blocktune.kernels.layouts.exchange import exchange_bytes
from blocktune.kernels.layouts.register_layouts import (
    RegisterLayout,
    TileSize,
    accumulated,
    accumulated_by_group,
    in_tensor_memory,
    loaded,
    summed,
    turned_operand,
)

pytestmark = pytest.mark.triton_free

WIDE = TileSize(128, 256)
SQUARE = TileSize(128, 128)
LAYOUTS = {
    "loaded": lambda size, warps: loaded(size, 8, warps),
    "summed": summed,
    "side by side": lambda size, warps: accumulated(size, warps, by_columns=True),
    "one below another": lambda size, warps: accumulated(size, warps, by_columns=False),
    "by groups": accumulated_by_group,
    "in tensor memory": in_tensor_memory,
    "operand": lambda size, warps: turned_operand(size, warps, 2, by_columns=True),
}
SIZES = [TileSize(*sizes) for sizes in ((16, 16), (32, 256), (64, 32), (64, 128), (128, 64), (256, 128))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_a_place_for_every_element(name: str) -> None:
    for size, warps in product(SIZES, (4, 8)):
        layout = LAYOUTS[name](size, warps)
        places = [place for place in (*layout.registers, *layout.lanes, *layout.warps) if place]
        assert sorted(places) == [1 << bit for bit in range(size.elements.bit_length() - 1)]
        assert len(layout.lanes) == 5


@pytest.mark.parametrize(
    ("source", "target", "element_bits", "cc", "allocated"),
    [
        (accumulated(WIDE, 8, by_columns=True), loaded(WIDE, 4, 8), 32, (8, 6), 16_384),
        (accumulated(SQUARE, 4, by_columns=False), loaded(SQUARE, 8, 4), 32, (8, 6), 8_192),
        (accumulated_by_group(WIDE, 4), loaded(WIDE, 4, 4), 32, (9, 0), 65_536),
        (in_tensor_memory(SQUARE, 4), loaded(SQUARE, 4, 4), 32, (10, 0), 16_384),
        (in_tensor_memory(TileSize(64, 256), 8), loaded(TileSize(64, 256), 4, 8), 32, (10, 0), 16_384),
        (summed(TileSize(64, 256), 4), loaded(TileSize(64, 256), 4, 4), 32, (7, 5), 4_096),
        (
            loaded(TileSize(64, 256), 8, 8),
            turned_operand(TileSize(64, 256), 8, 2, by_columns=True),
            16,
            (8, 0),
            32_768,
        ),
        (loaded(TileSize(16, 64), 1, 4), accumulated(TileSize(16, 64), 4, by_columns=True), 32, (8, 6), 4_096),
        (
            loaded(TileSize(64, 128), 1, 8).turned(128),
            accumulated(TileSize(128, 64), 8, by_columns=True),
            16,
            (8, 9),
            16_384,
        ),
    ],
)
def test_a_tile_changes_its_layout_through_what_the_compiler_allocates(
    source: RegisterLayout, target: RegisterLayout, element_bits: int, cc: tuple[int, int], allocated: int
) -> None:
    assert exchange_bytes(source, target, element_bits, cc) == allocated


def test_no_exchange_takes_more_than_the_tile() -> None:
    for size, (one, other) in product(SIZES, product(LAYOUTS.values(), repeat=2)):
        taken = exchange_bytes(one(size, 4), other(size, 4), 16, (9, 0))
        assert 0 < taken <= 2 * size.elements
        assert 2 * size.elements % taken == 0


def test_halves_of_columns_join_to_a_tile_of_twice_as_many() -> None:
    half, whole = TileSize(64, 32), TileSize(64, 64)
    joined = accumulated(half, 4, by_columns=False).joined
    assert joined.registers[0] == 1
    assert joined.elements == whole.elements
    assert set(joined.lanes) == {4, 8, 64, 128, 256}
