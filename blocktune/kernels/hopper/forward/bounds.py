"""The walk of a tile along its blocks of keys in the Hopper attention forward, in Gluon."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.common.sequences import KeyBlocks, cached_sequence, packed_sequence, whole_sequence


class Walk(NamedTuple):
    """The blocks of keys of a tile, and the one that its walk begins with."""

    first: Any
    last: Any
    start: Any


class KeyPart(NamedTuple):
    """One of the parts that the keys of a head are cut into."""

    batch_head: Any
    number: Any


@gluon.jit
def key_part(place, KEY_PARTS: gl.constexpr):
    """Return the part of keys that is the `place`-th of all heads."""
    if KEY_PARTS == 1:
        return KeyPart(batch_head=place, number=0)
    else:
        return KeyPart(batch_head=place // KEY_PARTS, number=place % KEY_PARTS)


@gluon.jit
def blocks_of_part(blocks, number, KEY_PARTS: gl.constexpr):
    """Return the blocks that a tile walks along in one part of the keys: of those from block 0 on an equal share or one
    more. Where these are fewer than the parts, some parts have the block after the last one alone, which no row sees.
    """
    if KEY_PARTS == 1:
        return blocks
    else:
        count = blocks.last + 1
        first, end = count * number // KEY_PARTS, count * (number + 1) // KEY_PARTS
        first = gl.where(first == end, count, first)
        return KeyBlocks(first=first, last=gl.maximum(first, end - 1))


@gluon.jit
def output_head(head, number, KEY_PARTS: gl.constexpr):
    """Return the head of the output [batch, num_heads * KEY_PARTS, seqlen_q, head_dim_v] that a part writes."""
    if KEY_PARTS == 1:
        return head
    else:
        return head * KEY_PARTS + number


@gluon.jit
def sequence_of(batch, tensors, sizes, LOWER_RIGHT: gl.constexpr):
    """Return the bounds of the sequence of a batch entry, packed or not, or over a cache."""
    if tensors.lengths is not None:
        return cached_sequence(batch, tensors.cu_q, tensors.lengths, sizes, LOWER_RIGHT)
    elif tensors.cu_q is None:
        return whole_sequence(sizes)
    else:
        return packed_sequence(batch, tensors.cu_q, tensors.cu_k, sizes, LOWER_RIGHT)


@gluon.constexpr_function
def walks_round(options):
    """Return whether a walk begins where the tile's queries stand and goes round: ALiBi on both sides leaves the keys
    far left of a query as low as those far right, and a walk from the last key would raise maxima in every block.
    Packed sequences, and what is loaded a block ahead, need the walk from the last key."""
    return options.ALIBI == 2 and not (options.LOWER_RIGHT or options.RIGHT or options.LEFT or options.MASK)


@gluon.jit
def walk_start(row, diagonal, last, ROWS: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the block of keys that the walk of queries row .. row + ROWS - 1 begins with."""
    if walks_round(OPTIONS):
        return gl.minimum(gl.maximum(row + ROWS - 1 + diagonal, 0) // OPTIONS.BLOCK_N, last)
    else:
        return last


@gluon.jit
def walked(walk, block, OPTIONS: gl.constexpr):
    """Return the block that a walk comes to: from block 0 it goes on to the last one, if it goes round."""
    if walks_round(OPTIONS):
        return gl.where(block < 0, block + walk.last + 1, block)
    else:
        return block


@gluon.jit
def stretch(part, start, last, place, BLOCK_N: gl.constexpr):
    """Return (first block, how many, how many of these are crossed, and how many hidden in part) of a part of a walk
    that goes round, after its first block `start`: down to the last block with a key that is not right of all 64
    places of rows from `place` on, down to block 0, and from the last block down.

    Crossed are blocks with keys right of a row's place and with others; hidden in part is the last one.
    """
    ahead = gl.minimum((gl.maximum(place + 64, 0) + BLOCK_N - 1) // BLOCK_N, start)
    crossed = ahead - gl.minimum(gl.maximum(place + 1, 0) // BLOCK_N, ahead)
    first = gl.where(part == 0, start, gl.where(part == 1, ahead, last + 1)) - 1
    end = gl.where(part == 0, ahead, gl.where(part == 1, 0, start + 1))
    return first, first + 1 - end, gl.where(part == 1, crossed, 0), part // 2
