"""Draws cells by a seed, of every group in its share.

A group draws the widths and lengths of a cell once; batch and heads are drawn until the cell fits.
"""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from tools.bench.drawn_peers.cells import Cell

WIDTHS = tuple(range(40, 257, 8))
MIDDLE_WIDTHS = (72, 80, 80, 88, 96, 96, 104, 112, 120)
OTHER_WIDTHS = tuple(width for width in WIDTHS if width not in (64, *MIDDLE_WIDTHS, 128, 192, 256))
FEATURED_WIDTHS = (64, 64, 80, 96, 128, 128, 128, 192, 256)
USUAL_WIDTHS = (*(64,) * 7, *(128,) * 14, *WIDTHS)

GROUP_SIZES = (1, 1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 12, 16)
HEADS_KV = (1, 2, 4, 8, 8, 16)
BATCHES = (1, 1, 2, 3, 4, 8, 16, 32)
FEW_SEQUENCES = (1, 1, 2, 4)
MAX_HEADS = 128
MAX_FLOPS = 3 << 40
"""Of a cell: about 5 ms of an H200."""
MAX_BYTES = 3 << 30

SMALL, LONGEST = 512, 16384
CACHED_KEYS = 300, 131072

Sizes = dict[str, Any]
"""Arguments of a shape; `batches`, what its batch is drawn from; `lengths`, as a cell has them."""


def drawn_cells(seed: int, count: int) -> list[Cell]:
    """Return so many cells, the same ones for the same seed; a part from the beginning has all groups in their shares
    as well."""
    draw = random.Random(seed)
    return [_draw_cell(draw, group) for group in _turns(count)]


def _turns(count: int) -> list[str]:
    """Return the group of each cell: the one that is furthest behind its share."""
    total, given = sum(share for share, _ in GROUPS.values()), dict.fromkeys(GROUPS, 0)
    found = []
    for number in range(1, count + 1):
        group = max(GROUPS, key=lambda name: GROUPS[name][0] * number / total - given[name])
        given[group] += 1
        found.append(group)
    return found


def _draw_cell(draw: random.Random, group: str) -> Cell:
    sizes = GROUPS[group][1](draw)
    lengths, batches = sizes.pop("lengths", ()), sizes.pop("batches", BATCHES)
    while True:
        heads_kv, group_size = draw.choice(HEADS_KV), draw.choice(GROUP_SIZES)
        batch = len(lengths) or draw.choice(batches)
        shape = AttentionShape(batch=batch, num_heads=heads_kv * group_size, num_heads_kv=heads_kv, **sizes)
        if shape.num_heads <= MAX_HEADS and shape.flops <= MAX_FLOPS and shape.tensor_bytes <= MAX_BYTES:
            return Cell(group=group, shape=shape, lengths=lengths or _filled(draw, shape))


def _filled(draw: random.Random, shape: AttentionShape) -> tuple[int, ...]:
    """Return the keys of each entry of a paged cache, which is between half and quite full."""
    entries = shape.batch if shape.features.page_size else 0
    return tuple(draw.randint(shape.seqlen_k // 2, shape.seqlen_k) for _ in range(entries))


def _length(draw: random.Random, least: int, most: int) -> int:
    """Return any number between two, an octave as likely as another."""
    return round(math.exp(draw.uniform(math.log(least), math.log(most))))


def _causal(draw: random.Random, kind: Causal = Causal.UPPER_LEFT) -> Causal:
    return draw.choice((Causal.NONE, kind))


def _square(draw: random.Random, *widths: int, least: int = SMALL + 1, most: int = LONGEST, **more: Any) -> Sizes:
    """Return as many keys as queries."""
    sizes = {"seqlen_q": _length(draw, least, most), "head_dim": draw.choice(widths)}
    return sizes | {"causal": _causal(draw)} | more


def _small(draw: random.Random) -> Sizes:
    return _square(draw, *USUAL_WIDTHS, least=64, most=SMALL, batches=FEW_SEQUENCES)


def _window(draw: random.Random, **more: Any) -> Sizes:
    """Return a window that most of the sequence does not see; every third one looks ahead as well."""
    sizes = _square(draw, *FEATURED_WIDTHS, least=1024, **more)
    left = _length(draw, 64, sizes["seqlen_q"] // 2)
    is_causal = draw.random() < 0.67
    window = Features(window=(left, -1 if is_causal else _length(draw, 64, left)))
    return sizes | {"causal": Causal.UPPER_LEFT if is_causal else Causal.NONE, "features": window}


def _packed(draw: random.Random, **more: Any) -> Sizes:
    lengths = tuple(_length(draw, 64, 4096) for _ in range(draw.choice((2, 3, 4, 6, 8, 12, 16))))
    sizes = {"seqlen_q": max(lengths), "head_dim": draw.choice(FEATURED_WIDTHS), "features": Features(varlen=True)}
    return sizes | {"lengths": lengths, "causal": _causal(draw, Causal.LOWER_RIGHT)} | more


def _other_keys(draw: random.Random) -> Sizes:
    """Return fewer queries than keys, or more; a causal mask is that of a prompt's next part."""
    queries, keys = _length(draw, 32, 8192), _length(draw, SMALL, LONGEST)
    causal = _causal(draw, Causal.LOWER_RIGHT) if queries < keys else Causal.NONE
    width = draw.choice((64, 128, 128, *FEATURED_WIDTHS))
    return {"seqlen_q": queries, "seqlen_k": keys, "head_dim": width, "causal": causal}


def _decoding(draw: random.Random, *queries: int, **more: Any) -> Sizes:
    seqlen_q = draw.choice(queries)
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": _length(draw, *CACHED_KEYS), "head_dim": draw.choice(USUAL_WIDTHS)}
    return sizes | {"causal": Causal.LOWER_RIGHT, "batches": (*BATCHES, 64)} | more


def _pages(draw: random.Random) -> Sizes:
    """Return a cache of whole pages."""
    page_size = draw.choice((16, 32, 64, 128, 256))
    sizes = _decoding(draw, 1, 1, 1, 2, 4, 8, 16, features=Features(cached=True, page_size=page_size))
    return sizes | {"seqlen_k": -(-sizes["seqlen_k"] // page_size) * page_size}


def _widths(*widths: int, **more: Any) -> Callable[[random.Random], Sizes]:
    return lambda draw: _square(draw, *widths, **more)


BACKWARD: Sizes = {"direction": Direction.BACKWARD, "least": 256}


def _other_backward(draw: random.Random) -> Sizes:
    """Return a width without a group of its own; every fifth one is 192 columns with values of 128."""
    if draw.random() < 0.2:
        return _square(draw, 192, head_dim_v=128, **BACKWARD)
    return _square(draw, *(width for width in (*OTHER_WIDTHS, *MIDDLE_WIDTHS) if width != 96), **BACKWARD)


GROUPS: dict[str, tuple[int, Callable[[random.Random], Sizes]]] = {
    "forward, 512 tokens or fewer": (20, _small),
    "forward, head_dim 64": (10, _widths(64)),
    "forward, head_dim 72 to 120": (16, _widths(*MIDDLE_WIDTHS)),
    "forward, head_dim 128": (12, _widths(128)),
    "forward, head_dim 192": (6, _widths(192)),
    "forward, head_dim 192 and 128": (6, _widths(192, head_dim_v=128)),
    "forward, head_dim 256": (6, _widths(256)),
    "forward, other widths": (8, _widths(*OTHER_WIDTHS)),
    "forward, window": (10, _window),
    "forward, packed": (8, _packed),
    "forward, other number of keys": (8, _other_keys),
    "backward, head_dim 64": (8, _widths(64, **BACKWARD)),
    "backward, head_dim 96": (6, _widths(96, **BACKWARD)),
    "backward, head_dim 128": (12, _widths(128, **BACKWARD)),
    "backward, head_dim 192": (6, _widths(192, **BACKWARD)),
    "backward, head_dim 256": (6, _widths(256, **BACKWARD)),
    "backward, other widths": (8, _other_backward),
    "backward, window": (7, partial(_window, direction=Direction.BACKWARD)),
    "backward, packed": (5, partial(_packed, direction=Direction.BACKWARD)),
    "decoding, one query": (12, lambda draw: _decoding(draw, 1)),
    "decoding, several queries": (10, lambda draw: _decoding(draw, *range(2, 17))),
    "decoding, pages": (10, _pages),
}
"""The share of each group, and what draws its sizes."""
