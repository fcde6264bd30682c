"""The device functions of decoding over an 8-bit cache: kernels/portable/decode/tiles.py with other operands.

Keys and values are e4m3 or int8, both of which float16 holds exactly; so both products are taken in float16, whatever
the queries' type is, and no number of the cache is rounded. What float16 cannot hold is moved into its range by powers
of two, which rounds nothing either:

- Queries of bfloat16 reach 3e38. Each row is multiplied by the power of two that brings its largest number to 2^13 ..
  2^14, and the inverse goes into the scale of the row's scores.
- Probabilities are multiplied by 2^14, so that float16 holds them in full precision down to 2^-28 instead of 2^-14.

Scales of a head multiply scores and the finished sums, in float32. Scales of tokens multiply the columns of the scores,
and the probabilities. What an output takes from a key is as large as their product: hence the largest product has the
exponent 0 there, not the largest probability, whether scales are 1e-8 or 1e8.
"""

import triton
import triton.language as tl

from blocktune.kernels.portable.decode.arguments import CachedKeys, Rows
from blocktune.kernels.portable.decode.tiles import (
    DECODE_SIZES,
    key_range,
    load_keys,
    store_output,
    store_partial,
    tree_bits,
)
from blocktune.kernels.portable.decode8.numbers import convert_to_float16, fit_float16, two_columns
from blocktune.kernels.portable.forward.arguments import SequenceBounds, SoftmaxState
from blocktune.kernels.portable.forward.pages import load_pages
from blocktune.kernels.portable.forward.scores import hyperbolic_tangent
from blocktune.kernels.portable.forward.tiles import in_elements

SCALE_STRIDES = ("stride_ksb", "stride_ksn", "stride_ksh", "stride_vsb", "stride_vsn", "stride_vsh")
"""Of the scales of keys and of values: entry or page, row, head; not compiled in."""


@triton.jit
def magnitude_log2(scales):
    """Return about log2 of |scales|: at most 0.09 below it; -100 for the smallest, and for 0."""
    bits = scales.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.maximum(bits.to(tl.float32) * (1.0 / 8388608.0) - 127.0, -100.0)


@triton.jit
def largest_height(heights):
    """Return the largest height [BLOCK_M] of heights [BLOCK_M, BLOCK_N], rounded up.

    From 2^25 on the sum of a score and a magnitude is rounded by 2 or more, and a reference that is too low makes
    float16 overflow. From 2^28 on it is rounded by 16 or more: a reference above the largest score would leave nothing.
    """
    height = tl.max(heights, 1)
    above = tl.maximum(height * 1.00000011920929, height * 0.99999988079071)  # one number of float32
    return tl.where(tl.abs(height) < 268435456.0, above, height)


@triton.jit
def weights_step(scores, largest, m_i, l_i):
    """Take one tile of the online softmax, and return the probabilities [BLOCK_M, BLOCK_N], the new reference and sums,
    and the factor [BLOCK_M] for what was accumulated.

    scores [BLOCK_M, BLOCK_N] have the base 2, a masked one is -inf. m_i [BLOCK_M], the reference, is the largest of the
    heights [BLOCK_M] of all tiles: the scores, plus log2 of the scales that probabilities will be multiplied with. l_i
    are the sums of the rows, or [BLOCK_M, BLOCK_N] what these are the sums of.
    """
    m_new = tl.maximum(m_i, largest)
    p = tl.exp2(scores - m_new[:, None])
    factor = tl.exp2(m_i - m_new)
    if len(l_i.shape) == 2:
        return p, m_new, l_i * factor[:, None] + p, factor
    else:
        return p, m_new, l_i * factor + tl.sum(p, 1), factor


@triton.jit
def scales_of_head(scales, batch, head, stride_b, stride_h, OPTIONS: tl.constexpr):
    """Return (where the scales of a key head begin, what all of its numbers are multiplied with): the first counts
    where every token has one, the second where the head has."""
    scales += head * stride_h
    if not (OPTIONS.PAGE_SIZE > 0 and OPTIONS.OF_TOKENS):
        scales += batch * stride_b
    if OPTIONS.OF_TOKENS:
        return scales, 1.0
    else:
        return scales, tl.load(scales)


@triton.jit
def load_rows(base, entry, stride_entry, places, stride_row, inside, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return [BLOCK_N, WIDTH] of K or V: the rows at these places [BLOCK_N] of an entry, or of as many; zeros where not
    inside, which is never read. What is the same in every tile is added up first, so that it is not in each."""
    columns = tl.arange(0, WIDTH)[None, :]
    offsets = ((places * stride_row)[:, None] + columns).to(tl.uint32)
    if len(entry.shape) == 0:
        pointers = base + entry * stride_entry + offsets
    else:
        pointers = base + (entry * stride_entry)[:, None] + offsets
    if DIM == WIDTH:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=inside[:, None] & (columns < DIM), other=0.0)


@triton.jit
def load_scales(base, entry, stride_entry, places, stride_row, inside):
    """Return [BLOCK_N] scales of the rows that `load_rows` loads; zeros where not inside."""
    return tl.load(base + entry * stride_entry + (places * stride_row).to(tl.uint32), mask=inside, other=0.0)


@triton.jit
def decode8_split(
    q, keys, scales, row_scale, rows, sequence, cap_log2,
    ALIBI: tl.constexpr, INT8: tl.constexpr, COLUMNS: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Attend to this program's share of the keys with q [BLOCK_M, WIDTH] of `Rows` in float16, whose scores are
    multiplied with row_scale [BLOCK_M].

    Return the `SoftmaxState`, acc times 2^14 and without the scale of the head's values. scales: `CachedKeys` of the
    scales. A number of V holds two columns, one of K as many as COLUMNS says.
    """
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    PAGE_SIZE: tl.constexpr = OPTIONS.PAGE_SIZE
    PRECISION: tl.constexpr = OPTIONS.PRECISION
    HEAD_DIM: tl.constexpr = OPTIONS.HEAD_DIM
    WIDTH: tl.constexpr = OPTIONS.WIDTH
    WIDTH_V: tl.constexpr = OPTIONS.WIDTH_V
    OF_TOKENS: tl.constexpr = OPTIONS.OF_TOKENS
    even = tl.zeros([q.shape[0], WIDTH_V // 2], tl.float32)
    odd = tl.zeros([q.shape[0], WIDTH_V // 2], tl.float32)
    if q.shape[0] < 64:
        # the warps share the columns of a low tile: to add them up in every tile would take barriers
        l_i = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
    else:
        l_i = tl.zeros([q.shape[0]], tl.float32)
    m_i = tl.full([q.shape[0]], -3.0e38, tl.float32)  # no -inf: -inf minus -inf would be NaN
    first, stop, stop_key = key_range(sequence, OPTIONS)
    if PAGE_SIZE == 0:
        # a tile counts as an entry, which begins with its first row
        k_entry, v_entry, k_scale_entry, v_scale_entry = keys.k_row, keys.v_row, scales.k_row, scales.v_row
        places = tl.arange(0, BLOCK_N)
    else:
        k_entry, v_entry, k_scale_entry, v_scale_entry = keys.k_entry, keys.v_entry, scales.k_entry, scales.v_entry
        pages = load_pages(keys.table, first, stop_key, OPTIONS)
    if COLUMNS == 2:
        q_even, q_odd = tl.split(tl.reshape(q, [q.shape[0], WIDTH // 2, 2]))
    for tile in tl.range(first, stop, num_stages=OPTIONS.STAGES):
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < stop_key
        if PAGE_SIZE == 0:
            entry = tl.cast(tile * BLOCK_N, tl.int64)
        else:
            places = columns % PAGE_SIZE
            entry = pages
            # a tile ahead: loads whose addresses are loaded in the same iteration run ahead less far
            pages = load_pages(keys.table, tile + 1, stop_key, OPTIONS)
        # [BLOCK_N, WIDTH / COLUMNS] and [BLOCK_N, WIDTH_V / 2]
        k = load_rows(keys.k, entry, k_entry, places, keys.k_row, inside, HEAD_DIM // COLUMNS, WIDTH // COLUMNS)
        v = load_rows(keys.v, entry, v_entry, places, keys.v_row, inside, OPTIONS.HEAD_DIM_V // 2, WIDTH_V // 2)
        # [BLOCK_M, BLOCK_N]
        if COLUMNS == 2:
            k_even, k_odd = two_columns(k, INT8)
            scores = tl.dot(q_even, k_even.T, input_precision=PRECISION)
            scores = tl.dot(q_odd, k_odd.T, scores, input_precision=PRECISION)
        else:
            scores = tl.dot(q, convert_to_float16(k).T, input_precision=PRECISION)
        scores *= row_scale[:, None]
        if OF_TOKENS:
            scores *= load_scales(scales.k, entry, k_scale_entry, places, scales.k_row, inside)[None, :]
        if OPTIONS.SOFTCAP:
            scores = cap_log2 * hyperbolic_tangent(scores, 1.0 / cap_log2)
        distance = rows.queries[:, None] + sequence.diagonal - columns[None, :]
        if ALIBI:
            scores -= rows.slopes[:, None] * tl.abs(distance).to(tl.float32)
        visible = inside[None, :]
        if OPTIONS.LEFT:
            visible = visible & (distance <= sequence.left)
        if OPTIONS.RIGHT:
            visible = visible & (distance >= -sequence.right)
        if OPTIONS.WORDS > 0:
            drafts = columns - (sequence.seqlen_k - sequence.seqlen_q)
            visible = visible & ((drafts < 0)[None, :] | tree_bits(rows, drafts))
        scores = tl.where(visible, scores, float("-inf"))
        if OF_TOKENS:
            token_scales = load_scales(scales.v, entry, v_scale_entry, places, scales.v_row, inside)
            heights = scores + magnitude_log2(token_scales)[None, :]
            p, m_i, l_i, factor = weights_step(scores, largest_height(heights), m_i, l_i)
            p *= (token_scales * 16384.0)[None, :]
        else:
            p, m_i, l_i, factor = weights_step(scores, tl.max(scores, 1), m_i, l_i)
            p *= 16384.0
        p = p.to(tl.float16)
        v_even, v_odd = two_columns(v, INT8)
        even = tl.dot(p, v_even, even * factor[:, None], input_precision=PRECISION)
        odd = tl.dot(p, v_odd, odd * factor[:, None], input_precision=PRECISION)
    if len(l_i.shape) == 2:
        l_i = tl.sum(l_i, 1)
    m_i = tl.where(l_i == 0.0, float("-inf"), m_i)
    acc = tl.interleave(even, odd)  # [BLOCK_M, WIDTH_V]
    return SoftmaxState(acc, l_i, m_i)


@triton.jit(do_not_specialize=(*DECODE_SIZES, *SCALE_STRIDES))
def flash_decode8_kernel(
    Q, K, V, Out, Lse, Work, Lengths, Table, Tree, Slopes, scale_log2, cap_log2,
    stride_table, stride_slopes, stride_tree_b, stride_tree_m,
    KScales, VScales, stride_ksb, stride_ksn, stride_ksh, stride_vsb, stride_vsn, stride_vsh,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    num_heads, num_heads_kv, group_size, row_tiles, total_rows, seqlen_q, seqlen_k, left, right,
    OPTIONS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Decode as `flash_decode_kernel` does, over K and V of e4m3 or int8, and Q of 16 bits.

    KScales and VScales: float32, what the numbers of K and V are multiplied with, or None for 1; at (entry or page,
    row, head) with OF_TOKENS, else the strides of rows are 0.
    """
    if OPTIONS.OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    q_strides = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    k_strides = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    v_strides = in_elements(stride_vb, stride_vh, stride_vn, UNIT)
    o_strides = in_elements(stride_ob, stride_oh, stride_om, UNIT)
    batch_head = tl.program_id(0) // row_tiles
    batch = (batch_head // num_heads_kv).to(tl.int64)
    head_kv = (batch_head % num_heads_kv).to(tl.int64)
    packed = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = packed < group_size * seqlen_q
    heads = head_kv * group_size + packed // seqlen_q
    queries = packed % seqlen_q
    length = seqlen_k
    if Lengths is not None:
        length = tl.minimum(tl.load(Lengths + batch), seqlen_k)
    q_offsets = batch * q_strides.batch + heads * q_strides.head + queries * q_strides.row
    # [BLOCK_M, WIDTH], [BLOCK_M]
    q, row_scale = fit_float16(load_keys(Q, q_offsets, inside, OPTIONS.HEAD_DIM, OPTIONS.WIDTH))
    row_scale *= scale_log2
    slopes, low, high = 0, 0, 0
    if Slopes is not None:
        slopes = tl.load(Slopes + batch * stride_slopes + heads, mask=inside, other=0.0) * 1.4426950408889634
    if OPTIONS.WORDS > 0:
        words = Tree + batch * stride_tree_b + queries * stride_tree_m
        low = tl.load(words, mask=inside, other=0)
        high = tl.load(words + 1, mask=inside, other=0) if OPTIONS.WORDS > 1 else low
    INT8: tl.constexpr = K.dtype.element_ty == tl.int8
    # two columns at a time; their strides are even. A product sums up 16 at least. Keys of whole tiles stay bytes
    COLUMNS: tl.constexpr = 2 if BLOCK_M < 64 and OPTIONS.WIDTH >= 32 and OPTIONS.HEAD_DIM % 2 == 0 else 1
    if COLUMNS == 2:
        K = K.to(tl.pointer_type(tl.uint16))
    k_entry, k_row = k_strides.batch // COLUMNS, k_strides.row // COLUMNS
    v_entry, v_row = v_strides.batch // 2, v_strides.row // 2
    k_base, table = K + head_kv * (k_strides.head // COLUMNS), Table
    v_base = V.to(tl.pointer_type(tl.uint16)) + head_kv * (v_strides.head // 2)
    if OPTIONS.PAGE_SIZE == 0:
        k_base += batch * k_entry
        v_base += batch * v_entry
    else:
        table += batch * stride_table
    k_scale, v_scale = 1.0, 1.0
    if KScales is not None:
        KScales, k_scale = scales_of_head(KScales, batch, head_kv, stride_ksb, stride_ksh, OPTIONS)
    if VScales is not None:
        VScales, v_scale = scales_of_head(VScales, batch, head_kv, stride_vsb, stride_vsh, OPTIONS)
    row_scale *= k_scale
    keys = CachedKeys(k_base, v_base, k_entry, k_row, v_entry, v_row, table)
    scales = CachedKeys(KScales, VScales, stride_ksb, stride_ksn, stride_vsb, stride_vsn, table)
    rows = Rows(queries, slopes, low, high)
    diagonal = 0 if OPTIONS.FROM_START else length - seqlen_q
    sequence = SequenceBounds(seqlen_q, length, diagonal, left, right)
    acc, l_i, m_i = decode8_split(
        q, keys, scales, row_scale, rows, sequence, cap_log2, Slopes is not None, INT8, COLUMNS, OPTIONS
    )
    acc *= v_scale / 16384.0  # of the probabilities
    state = SoftmaxState(acc, l_i, m_i)
    places = (batch * num_heads + heads) * seqlen_q + queries
    if OPTIONS.SPLITS > 1:
        store_partial(Work, state, places, inside, total_rows, OPTIONS)
    else:
        out_pointers = Out + batch * o_strides.batch + heads * o_strides.head + queries * o_strides.row
        lse_pointers = None if Lse is None else Lse + places
        store_output(state, out_pointers, lse_pointers, inside, OPTIONS.HEAD_DIM_V)
