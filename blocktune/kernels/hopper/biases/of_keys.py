"""What ALiBi, masks and dropout do to transposed scores [64 keys, 64 queries], in Gluon: device functions.

A thread has two of the keys, and two of every eight queries. What the forward's functions call a row is a key here, so
that masks are laid out with keys as rows (`turned` in mask_pass.py), and pairs to drop are made by other lanes
(`kept_bits_of_keys`).

Exponents are in base 2 and relative to the log-sum-exp. Of ALiBi on one side of the diagonal, -slope (q - k), the part
of the query's place in its block is in the log-sum-exp already, and that of the key is two numbers of a thread. Where
dropout scales what it keeps, so is the factor: a probability is p / kept_share.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.biases.philox import kept_bits_of_keys, place_of_query
from blocktune.kernels.hopper.biases.words import (
    alibi,
    as_float32,
    bits_of_block,
    select_constraints,
    thread_positions,
    values_of_block,
    where_set,
)
from blocktune.kernels.hopper.common.rows import broadcast_rows, by_thread


class KeyBiases(NamedTuple):
    """What a launch has, None for what it has not.

    slopes: float32, strides of (batch, head). anchor: the key that query 0 stands at. mask: as mask_pass.py writes it
    with keys as rows, strides of (batch, head, 64 keys) in tiles; mask_column: 1, or 0 where all queries have the same.
    The rest: the words of `keep_arguments` in kernels/values/dropout.py.
    """

    slopes: Any
    slope_batch: Any
    slope_head: Any
    anchor: Any
    mask: Any
    mask_batch: Any
    mask_head: Any
    mask_tile: Any
    mask_column: Any
    seed_lo: Any
    seed_hi: Any
    offset: Any
    threshold: Any


KEY_INTEGERS = tuple(name for name in KeyBiases._fields if name not in ("slopes", "mask"))
"""Run-time integers that are not compiled in."""


class HeadBiases(NamedTuple):
    """What a query head has for 64 keys; 0 for what it has not.

    rows, pairs: `thread_positions`. key: the first key. slope: in base 2. place: how far the first
    key is from the one that query 0 stands at. tile: of the mask. number: batch * num_heads + head.
    """

    rows: Any
    pairs: Any
    key: Any
    slope: Any
    place: Any
    tile: Any
    number: Any


@gluon.jit
def tile_of_mask(biases, batch, head, key, keys, TILE: gl.constexpr):
    """Return the mask of a head for the 64 keys from `key` on, of a sequence that has `keys`: its first tile of TILE
    elements."""
    n = gl.minimum(key, gl.maximum(keys - 1, 0)) // 64
    at = batch.to(gl.int64) * biases.mask_batch + head * biases.mask_head + n * biases.mask_tile
    return biases.mask + at * TILE


@gluon.constexpr_function
def prefetch_asm(size):
    """Return assembly that begins to copy so many bytes to the L2 cache."""
    one = "elect.sync _|p, 0xffffffff;"
    return f"{{ .reg .pred p; {one} @p cp.async.bulk.prefetch.L2.global [$1], {size}; mov.b32 $0, 0; }}"


@gluon.jit
def prefetch(place, SIZE: gl.constexpr):
    """Begin to copy SIZE bytes from a pointer on to the L2 cache."""
    ASM: gl.constexpr = prefetch_asm(SIZE)
    address = place.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(ASM, "=r,l,~{memory}", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prefetch_mask(biases, tile, batch, head, m, OPTIONS: gl.constexpr):
    """Begin to copy an additive mask to the L2 cache: of the queries from m on and the keys of a `KeyTile`."""
    SIZE: gl.constexpr = 64 * OPTIONS.BLOCK_M * biases.mask.dtype.element_ty.primitive_bitwidth // 8
    for half in gl.static_range(OPTIONS.BLOCK_N // 64):
        key, keys = tile.n * OPTIONS.BLOCK_N + half * 64, tile.sequence.seqlen_k
        place = tile_of_mask(biases, batch, head, key, keys, 64 * 128)
        prefetch(place + m * biases.mask_column * 64, SIZE)


@gluon.jit
def biases_of_head(biases, tile, member, key, sizes, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return the `HeadBiases` of the query head number `member` of a `KeyTile`, for the 64 keys from `key` on; 0
    where a launch has none."""
    LOG2_E: gl.constexpr = 1.4426950408889634
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    if OPTIONS.ALIBI or OPTIONS.MASK or OPTIONS.DROPOUT:
        sequence = tile.sequence
        batch = tile.batch_head // sizes.num_heads_kv
        head = tile.batch_head % sizes.num_heads_kv * sizes.group_size + member
        rows, pairs = thread_positions(by_thread(gl.zeros([64, BLOCK_M], gl.float32, S_L)))
        slope, place, mask = 0, 0, 0
        if OPTIONS.ALIBI:
            at = batch.to(gl.int64) * biases.slope_batch + head * biases.slope_head
            slope = gl.load(biases.slopes + at) * LOG2_E
            place = key - biases.anchor - sequence.shift
        if OPTIONS.MASK:
            size: gl.constexpr = 64 * 4 if OPTIONS.MASK == 1 else 64 * 128
            mask = tile_of_mask(biases, batch, head, key, sequence.seqlen_k, size)
        number = batch * (sizes.num_heads_kv * sizes.group_size) + head
        return HeadBiases(rows, pairs, key, slope, place, mask, number)
    else:
        return 0


@gluon.jit
def mask_of_block(biases, head, m, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return what the queries from m on need of the mask; 0 without one."""
    loaded = 0
    if OPTIONS.MASK:
        column = m * biases.mask_column
        if OPTIONS.MASK == 1:
            loaded = bits_of_block(head.tile, column, head.rows, head.pairs, OPTIONS.BLOCK_M)
        else:
            loaded = values_of_block(head.tile, column, OPTIONS.BLOCK_M, S_L)
    return loaded


@gluon.jit
def kept_pairs(biases, head, m, OPTIONS: gl.constexpr):
    """Return the pairs of the queries from m on that dropout keeps (`kept_bits_of_keys`); 0 without dropout."""
    kept = 0
    if OPTIONS.DROPOUT:
        kept = kept_bits_of_keys(
            head.rows + head.key, head.pairs, m, head.number, biases.offset, biases.seed_lo, biases.seed_hi,
            biases.threshold,
        )  # fmt: skip
    return kept


@gluon.jit
def bias_exponents(exponents, m, loaded, head, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return the exponents [64, 64] of the queries from m on, with ALiBi and an additive mask."""
    LOG2_E: gl.constexpr = 1.4426950408889634
    if OPTIONS.ALIBI:
        x = by_thread(exponents)
        if OPTIONS.ALIBI == 1:
            x = x + broadcast_rows(head.slope * (head.rows + (head.place - m)).to(gl.float32), x)
        else:
            distance = (head.rows + (head.place - m) - 2 * head.pairs).to(gl.float32)
            x = x + alibi(x, head.slope, distance, False)
        exponents = gl.convert_layout(gl.reshape(x, exponents.shape), S_L)
    if OPTIONS.MASK == 2:
        exponents = limit_exponents(exponents + as_float32(loaded) * LOG2_E)
    return exponents


@gluon.jit
def limit_exponents(exponents):
    """Return exponents under an additive mask, of a masked row with n keys -log2(n) for every visible one.

    These come out as -1.44 * 2^50 + 2^52 (1 + log2(n) / 64) (`masked_row` in kernels/hopper/backward/pre_and_post.py),
    to the 2^-46th part of which an exponent of another row is 0. NaN and -inf stay.
    """
    LIMIT: gl.constexpr = 64.0 - 16.0 * 1.4426950408889634
    return gl.minimum(exponents, LIMIT - exponents * 1.4210854715202004e-14)


@gluon.jit
def hide_pairs(p, loaded, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return the probabilities [64, 64], zero for pairs that a boolean mask hides, whatever they were."""
    if OPTIONS.MASK == 1:
        p = gl.convert_layout(gl.reshape(where_set(loaded, by_thread(p), "0f00000000"), p.shape), S_L)
    return p


@gluon.jit
def drop_pairs(p, kept, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return the probabilities [64, 64], zero for pairs that dropout does not keep."""
    if OPTIONS.DROPOUT:
        p = gl.convert_layout(gl.reshape(where_set(kept, by_thread(p), "0f00000000", place_of_query), p.shape), S_L)
    return p


@gluon.constexpr_function
def choose_asm(count):
    """Return `select_asm` of words.py with a number for each pair in the place of the constant: the operands after the
    words."""
    text = ["{", ".reg .pred p;", ".reg .b32 bit;"]
    for row in range(2):
        for number in range(count // 2):
            at = number // 2 * 4 + 2 * row + number % 2
            text += [f"and.b32 bit, ${2 * count + 2 * row}, {1 << place_of_query(number)};", "setp.ne.s32 p, bit, 0;"]
            text += [f"selp.f32 ${at}, ${count + at}, ${3 * count + at}, p;"]
    return "\n".join([*text, "}"])


@gluon.jit
def choose(words, numbers, others):
    """Return the numbers [64, N / 8, 4, 2] of whose pairs the words [64, 4] have the bit, and the others in the place
    of the rest."""
    COUNT: gl.constexpr = numbers.shape[1] * 4
    ASM: gl.constexpr = choose_asm(COUNT)
    CONSTRAINTS: gl.constexpr = select_constraints(COUNT) + ",f" * COUNT
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [numbers, broadcast_rows(words, numbers), others], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@gluon.jit
def choose_slopes(dp, kept, slopes, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return what probabilities [64, 64] are multiplied with: dP^T less the row sums of out * dout, and of pairs that
    dropout does not keep `slopes` alone, minus the row sums [64]."""
    if OPTIONS.DROPOUT:
        wide, _ = gl.broadcast(slopes[None, :], dp)
        x = choose(kept, by_thread(dp), by_thread(wide))
        dp = gl.convert_layout(gl.reshape(x, dp.shape), S_L)
    return dp
