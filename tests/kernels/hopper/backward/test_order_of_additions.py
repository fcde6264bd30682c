"""The protocol of a fixed order of additions, in random interleavings: it always ends, in the order of the tiles.

Blocks take tiles from a counter, the next one while they still work. Their warpgroups hand dQ of a step over when a
slot of memory is free, and the two warps that add wait for the tile's turn, add, give the slot back, and pass the turn
on. Warpgroups of wide heads add themselves when the warp says so: to hand a step over is then to have it.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace

import pytest

from blocktune.kernels.hopper.backward import bounds, tiles, turns
from blocktune.kernels.hopper.backward.layout import BLOCK_M, bounds_of, form_of, keys_of_block
from blocktune.kernels.hopper.common import device_functions, sequences
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction

pytestmark = pytest.mark.triton_free

NO, UPPER_LEFT, LOWER_RIGHT = Causal
Step = tuple[int, int, int, int]
"""Tile of keys, head, block of queries and turn."""


@pytest.fixture(autouse=True)
def as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    language = SimpleNamespace(maximum=max, minimum=min, where=lambda chosen, yes, no: yes if chosen else no)
    for module in (bounds, device_functions, tiles, turns):
        monkeypatch.setattr(module, "gl", language)
    monkeypatch.setattr(tiles, "locate", device_functions.locate.fn)
    monkeypatch.setattr(tiles, "walks_back", bounds.walks_back.fn)
    monkeypatch.setattr(tiles, "whole_sequence", sequences.whole_sequence.fn)
    for name in ("locate_keys", "query_range", "sequence_of"):
        monkeypatch.setattr(tiles, name, getattr(tiles, name).fn)


def steps_of(shape: AttentionShape, tile: int, head_group: int) -> Iterator[Step]:
    """The steps of a tile, in the order of its walk."""
    (right, left), block_n = bounds_of(shape), keys_of_block(shape)
    options = SimpleNamespace(**form_of(shape), BLOCK_M=BLOCK_M, BLOCK_N=block_n, PANELS=1)
    sizes = SimpleNamespace(
        seqlen_q=shape.seqlen_q, seqlen_k=shape.seqlen_k, right=right, left=left, head_group=head_group,
        num_heads_kv=shape.num_heads, batch_heads=shape.num_heads,
    )  # fmt: skip
    found = tiles.tile_of_keys.fn(tile, tiles_of(shape), None, sizes, options)
    for place in range(found.walk.first, found.walk.end, BLOCK_M):
        m = bounds.block_at.fn(found.walk, place, options)
        yield found.n, found.batch_head, m, turns.turn_of.fn(found, m, options)


def tiles_of(shape: AttentionShape) -> int:
    return -(-shape.seqlen_k // keys_of_block(shape))


@dataclass
class Block:
    """steps: of the tiles it took; handed, freed and passed: how far its warps are."""

    steps: list[Step] = field(default_factory=list)
    handed: int = 0
    freed: set[int] = field(default_factory=set)
    passed: list[int] = field(default_factory=lambda: [0, 1])  # the next step of each warp that adds

    def moves(self, slots: int, counted: dict[tuple[int, int], int]) -> list[tuple[str, int]]:
        """What may happen next: a warpgroup hands a step over, a warp adds one, or passes its turn on."""
        found = []
        if self.handed < len(self.steps) and (self.handed < slots or self.handed - slots in self.freed):
            found.append(("hand", self.handed))
        for number in self.passed:
            if number in self.freed:
                found.append(("pass", number))
            elif number < self.handed:
                _, head, m, turn = self.steps[number]
                if turn < 0 or counted.get((head, m), 0) == turn:
                    found.append(("add", number))
        return found


class Game:
    """Blocks that take all tiles of a shape, in an order that is drawn."""

    def __init__(self, shape: AttentionShape, blocks: int, slots: int, head_group: int, seed: int) -> None:
        self.shape, self.slots, self.head_group, self.draw = shape, slots, head_group, random.Random(seed)
        self.blocks = [Block() for _ in range(blocks)]
        self.tiles = list(range(tiles_of(shape) * shape.num_heads))
        self.counted: dict[tuple[int, int], int] = {}
        self.added: dict[tuple[int, int], list[int]] = {}

    def play(self) -> None:
        while moves := list(self.moves()):
            self.move(*self.draw.choice(moves))
        assert not self.tiles
        assert all(min(block.handed, *block.passed) >= len(block.steps) for block in self.blocks), "nothing moves"

    def moves(self) -> Iterator[tuple[Block, str, int]]:
        for block in self.blocks:
            if self.tiles and len(block.steps) - block.handed < 2:
                yield block, "take", 0
            for kind, number in block.moves(self.slots, self.counted):
                yield block, kind, number

    def move(self, block: Block, kind: str, number: int) -> None:
        if kind == "take":
            block.steps += steps_of(self.shape, self.tiles.pop(0), self.head_group)
            return
        n, head, m, turn = block.steps[number]
        if kind == "hand":
            block.handed += 1
        elif kind == "add":
            block.freed.add(number)
            self.added.setdefault((head, m), []).extend([n] if turn >= 0 else [])
        else:
            block.passed[number % 2] += 2
            self.counted[head, m] = self.counted.get((head, m), 0) + (turn >= 0)


def first_keys_add_first(shape: AttentionShape, head: int, head_group: int) -> bool:
    """Whether the order begins with the tile of the first keys: without a bound that keys end at, and under a diagonal
    in the last of several groups of heads."""
    if shape.causal is NO and not shape.features.window:
        return True
    first_of_last_group = (shape.num_heads - 1) // head_group * head_group
    windowed = shape.features.window is not None and shape.features.window[0] >= 0
    return not windowed and 0 < first_of_last_group <= head


MASKS = [(NO, ""), (LOWER_RIGHT, ""), (UPPER_LEFT, ""), (LOWER_RIGHT, "window=100:-1"), (NO, "window=70:200")]


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("lengths", [(512, 512), (300, 700), (700, 300)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_no_interleaving_hangs_or_leaves_the_order(
    head_dim: int, lengths: tuple[int, int], causal: Causal, window: str
) -> None:
    shape = AttentionShape(
        batch=1, num_heads=3, num_heads_kv=3, seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=head_dim,
        head_dim_v=head_dim, causal=causal, direction=Direction.BACKWARD,
        features=Features.parse(f"deterministic {window}"),
    )  # fmt: skip
    for seed, (blocks, slots, head_group) in enumerate(product((1, 2, 5, 40), (1, 2), (1, 2, 3))):
        game = Game(shape, blocks, slots, head_group, seed)
        game.play()
        for (head, _), order in game.added.items():
            assert order == sorted(set(order), reverse=not first_keys_add_first(shape, head, head_group))
        assert sum(map(len, game.added.values())) == sum(game.counted.values()) > 0
