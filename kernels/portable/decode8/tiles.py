"""The device functions of decoding over an 8-bit cache: kernels/portable/decode/tiles.py with other operands.

Keys and values are e4m3 or int8, both of which float16 holds exactly; so both products are taken in float16, whatever
the queries' type is, and no number of the cache is rounded. What float16 cannot hold is moved into its range by powers
of two, which rounds nothing either:

- Queries of bfloat16 reach 3e38. Each row is multiplied by the power of two that brings its largest number to 2^13 ..
  2^14, and the inverse goes into the scale of the row's scores.
- Probabilities are multiplied by 2^14, so that float16 holds them in full precision down to 2^-28 instead of 2^-14.

Scales of a head multiply scores and the finished sums, in float32. Scales of tokens multiply the columns of the scores,
and the probabilities after a division by the largest of the tile, which multiplies the tile's product in float32: a
scale of 1e-8 alone would leave no probability in float16's range.
"""

import triton
import triton.language as tl

from blocktune.kernels.portable.decode.tiles import (
    DECODE_SIZES,
    key_range,
    load_keys,
    load_pages,
    store_output,
    store_partial,
    tree_bits,
)
from blocktune.kernels.portable.forward.scores import hyperbolic_tangent
from blocktune.kernels.portable.forward.softmax import online_step

SCALE_STRIDES = ("stride_ksb", "stride_ksn", "stride_ksh", "stride_vsb", "stride_vsn", "stride_vsh")
"""Of the scales of keys and of values: entry or page, row, head; not compiled in."""


@triton.jit
def as_float16(numbers):
    """The numbers of an 8-bit tile, exactly."""
    if numbers.dtype == tl.int8:
        # the bits of 1024 + (x + 128), whose unit in the last place is 1: shorter than 8-bit conversions, one by one
        biased = (numbers.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return biased.to(tl.float16, bitcast=True) - 1152.0
    else:
        return numbers.to(tl.float16)


@triton.jit
def two_columns(pairs, INT8: tl.constexpr):
    """The even and the odd columns of a tile whose columns lie in pairs in 16 bits, as float16.

    As bytes, values would be loaded from shared memory one by one: the second product wants two keys next to each other
    in a register, and only elements of 16 bits are transposed on the way.
    """
    low, high = pairs & 0xFF, pairs >> 8
    if INT8:
        return (
            ((low ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0),
            ((high ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0),
        )
    else:
        return (
            low.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16),
            high.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16),
        )


@triton.jit
def in_range(q):
    """(q [BLOCK_M, WIDTH] as float16, [BLOCK_M] what each row is to be multiplied with)."""
    if q.dtype == tl.float16:
        return q, tl.full([q.shape[0]], 1.0, tl.float32)
    else:
        numbers = q.to(tl.float32)
        bits = tl.max(tl.abs(numbers), 1).to(tl.int32, bitcast=True)
        exponents = tl.maximum(bits >> 23, 14)  # biased by 127
        up = ((267 - exponents) << 23).to(tl.float32, bitcast=True)
        return (numbers * up[:, None]).to(tl.float16), ((exponents - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scales_of_head(scales, batch, head, stride_b, stride_h, IN_PAGES: tl.constexpr, OF_TOKENS: tl.constexpr):
    """(where the scales of a key head begin, what all of its numbers are multiplied with): the first counts where every
    token has one, the second where the head has."""
    if scales is None:
        return None, 1.0
    else:
        scales += head * stride_h
        if not (IN_PAGES and OF_TOKENS):
            scales += batch * stride_b
        if OF_TOKENS:
            return scales, 1.0
        else:
            return scales, tl.load(scales)


@triton.jit
def decode8_split(
    q, k_base, v_base, k_scales, v_scales, row_scale, table, rows, slopes, low, high,
    stride_kb, stride_kn, stride_vb, stride_vn, stride_ksb, stride_ksn, stride_vsb, stride_vsn,
    length, seqlen_q, diagonal, left, right, cap_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, OF_TOKENS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """This program's share of the keys for q [BLOCK_M, WIDTH] in float16, whose rows are the queries `rows` [BLOCK_M]
    and whose scores are multiplied with row_scale [BLOCK_M]: the triple acc [BLOCK_M, WIDTH_V], l_i and m_i
    [BLOCK_M], acc times 2^14 and without the scale of the head's values."""
    even = tl.zeros([q.shape[0], WIDTH_V // 2], tl.float32)
    odd = tl.zeros([q.shape[0], WIDTH_V // 2], tl.float32)
    l_i = tl.zeros([q.shape[0]], tl.float32)
    m_i = tl.full([q.shape[0]], float("-inf"), tl.float32)
    first, stop, stop_key = key_range(length, seqlen_q, diagonal, left, right, BLOCK_N, SPLITS, LEFT, RIGHT)
    if PAGE_SIZE > 0:
        pages = load_pages(table, first, stop_key, BLOCK_N, PAGE_SIZE)
    for tile in tl.range(first, stop, num_stages=STAGES):
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < stop_key
        places = columns.to(tl.int64)
        entry = 0
        if PAGE_SIZE > 0:
            places = (columns % PAGE_SIZE).to(tl.int64)
            entry = pages
            # a tile ahead: loads whose addresses are loaded in the same iteration run ahead less far
            pages = load_pages(table, tile + 1, stop_key, BLOCK_N, PAGE_SIZE)
        # [BLOCK_N, WIDTH]
        k = load_keys(k_base, entry * stride_kb + places * stride_kn, inside, HEAD_DIM, WIDTH)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, as_float16(k).T, input_precision=PRECISION) * row_scale[:, None]
        if OF_TOKENS:
            scores *= tl.load(k_scales + entry * stride_ksb + places * stride_ksn, mask=inside, other=0.0)[None, :]
        if SOFTCAP:
            scores = cap_log2 * hyperbolic_tangent(scores, 1.0 / cap_log2, False)
        distance = rows[:, None] + diagonal - columns[None, :]
        if ALIBI:
            scores -= slopes[:, None] * tl.abs(distance).to(tl.float32)
        visible = inside[None, :]
        if LEFT:
            visible = visible & (distance <= left)
        if RIGHT:
            visible = visible & (distance >= -right)
        if TREE:
            drafts = columns - (length - seqlen_q)
            visible = visible & ((drafts < 0)[None, :] | tree_bits(low, high, drafts))
        p, m_i, l_i, factor = online_step(tl.where(visible, scores, float("-inf")), m_i, l_i, 1.0, True)
        # [BLOCK_N, WIDTH_V / 2], two columns in one number
        v = load_keys(v_base, entry * stride_vb + places * stride_vn, inside, HEAD_DIM_V // 2, WIDTH_V // 2)
        v_even, v_odd = two_columns(v, k.dtype == tl.int8)
        p *= 16384.0
        even *= factor[:, None]
        odd *= factor[:, None]
        if OF_TOKENS:
            scales = tl.load(v_scales + entry * stride_vsb + places * stride_vsn, mask=inside, other=0.0)
            largest = tl.max(tl.abs(scales), 0)
            p = (p * (scales / tl.where(largest == 0.0, 1.0, largest))[None, :]).to(tl.float16)
            even += tl.dot(p, v_even, input_precision=PRECISION) * largest
            odd += tl.dot(p, v_odd, input_precision=PRECISION) * largest
        else:
            even = tl.dot(p.to(tl.float16), v_even, even, input_precision=PRECISION)
            odd = tl.dot(p.to(tl.float16), v_odd, odd, input_precision=PRECISION)
    acc = tl.interleave(even, odd)  # [BLOCK_M, WIDTH_V]
    return acc, l_i, m_i


@triton.jit(do_not_specialize=(*DECODE_SIZES, *SCALE_STRIDES))
def flash_decode8_kernel(
    Q, K, V, Out, Lse, Work, Lengths, Table, Tree, Slopes, scale_log2, cap_log2,
    stride_table, stride_slopes, stride_tree_b, stride_tree_m,
    KScales, VScales, stride_ksb, stride_ksn, stride_ksh, stride_vsb, stride_vsn, stride_vsh,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    num_heads, num_heads_kv, group_size, row_tiles, total_rows, seqlen_q, seqlen_k, left, right,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr, FROM_START: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, WORDS: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr, OF_TOKENS: tl.constexpr,
):  # fmt: skip
    """`flash_decode_kernel` over K and V of e4m3 or int8, and Q of 16 bits.

    KScales and VScales: float32, what the numbers of K and V are multiplied with, or None for 1. OF_TOKENS: every row
    of a key head has its own, at (entry or page, row, head); else the strides of rows are 0, and the entry is that of
    the batch.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    batch_head = tl.program_id(0) // row_tiles
    batch = (batch_head // num_heads_kv).to(tl.int64)
    head_kv = (batch_head % num_heads_kv).to(tl.int64)
    packed = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = packed < group_size * seqlen_q
    heads = head_kv * group_size + packed // seqlen_q
    rows = packed % seqlen_q
    length = seqlen_k
    if Lengths is not None:
        length = tl.minimum(tl.load(Lengths + batch), seqlen_k)
    q_offsets = batch * stride_qb + heads * stride_qh + rows * stride_qm
    q, row_scale = in_range(load_keys(Q, q_offsets, inside, HEAD_DIM, WIDTH))  # [BLOCK_M, WIDTH], [BLOCK_M]
    row_scale *= scale_log2
    slopes, low, high = 0, 0, 0
    if Slopes is not None:
        slopes = tl.load(Slopes + batch * stride_slopes + heads, mask=inside, other=0.0) * 1.4426950408889634
    if WORDS > 0:
        words = Tree + batch * stride_tree_b + rows * stride_tree_m
        low = tl.load(words, mask=inside, other=0)
        high = tl.load(words + 1, mask=inside, other=0) if WORDS > 1 else low
    k_base, table = K + head_kv * stride_kh, Table
    # two columns of the values at a time; their strides are even
    stride_vb, stride_vn = stride_vb // 2, stride_vn // 2
    v_base = V.to(tl.pointer_type(tl.uint16)) + head_kv * (stride_vh // 2)
    if PAGE_SIZE == 0:
        k_base += batch * stride_kb
        v_base += batch * stride_vb
    else:
        table += batch * stride_table
    k_scales, k_scale = scales_of_head(KScales, batch, head_kv, stride_ksb, stride_ksh, PAGE_SIZE > 0, OF_TOKENS)
    v_scales, v_scale = scales_of_head(VScales, batch, head_kv, stride_vsb, stride_vsh, PAGE_SIZE > 0, OF_TOKENS)
    row_scale *= k_scale
    acc, l_i, m_i = decode8_split(
        q, k_base, v_base, k_scales, v_scales, row_scale, table, rows, slopes, low, high,
        stride_kb, stride_kn, stride_vb, stride_vn, stride_ksb, stride_ksn, stride_vsb, stride_vsn,
        length, seqlen_q, 0 if FROM_START else length - seqlen_q, left, right, cap_log2,
        HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, PAGE_SIZE, LEFT, RIGHT, WORDS > 0, SOFTCAP, Slopes is not None,
        OF_TOKENS, PRECISION, BLOCK_N, SPLITS, STAGES,
    )  # fmt: skip
    acc *= v_scale / 16384.0  # of the probabilities
    places = (batch * num_heads + heads) * seqlen_q + rows
    if SPLITS > 1:
        store_partial(Work, acc, l_i, m_i, places, inside, total_rows, HEAD_DIM_V, SPLITS)
    else:
        out_pointers = Out + batch * stride_ob + heads * stride_oh + rows * stride_om
        lse_pointers = None if Lse is None else Lse + places
        store_output(acc, l_i, m_i, out_pointers, lse_pointers, inside, HEAD_DIM_V, Lse is not None)
