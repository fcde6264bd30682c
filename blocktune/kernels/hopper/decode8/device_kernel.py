"""Decoding over an 8-bit cache on Hopper in one launch, in Gluon: the kernel of kernels/hopper/decode8/kernel.py.

kernels/hopper/decode/tiles.py says what makes it fast.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from blocktune.kernels.hopper.decode.arguments import Found, Output, Rows, Sizes, Strides
from blocktune.kernels.hopper.decode.device_kernel import SIZES
from blocktune.kernels.hopper.decode.merges import finish_share, merge_warps, result_layout
from blocktune.kernels.hopper.decode.tiles import (
    in_elements,
    in_words,
    key_layout,
    key_offsets,
    keys_in_sight,
    last_keys,
    load_pages,
    outer_layout,
    product_layout,
    query_offsets,
    share_of,
    sinks_of_rows,
    words_of_head,
)
from blocktune.kernels.hopper.decode8.numbers import in_order, keys_of, values_of
from blocktune.kernels.hopper.decode8.tiles import (
    in_range,
    largest_height,
    load_queries,
    load_scales,
    load_words,
    magnitude_log2,
    scales_of_head,
    value_layout,
    visible_scores,
    weights_step,
)
from blocktune.kernels.portable.decode8.tiles import SCALE_STRIDES


@gluon.jit(do_not_specialize=(*SIZES, *SCALE_STRIDES))
def flash_decode8_hopper_kernel(
    Q, K, V, Out, Lse, Work, Counter, Lengths, Table, Sinks, scale_log2, stride_table,
    KScales, VScales, stride_ksb, stride_ksn, stride_ksh, stride_vsb, stride_vsn, stride_vsh,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    num_heads, group_size, total_rows, seqlen_q, seqlen_k,
    OPTIONS: gl.constexpr, UNIT: gl.constexpr, UNIT_KV: gl.constexpr,
):  # fmt: skip
    """`flash_decode_hopper_kernel` over K and V of e4m3 or int8.

    KScales and VScales: float32, what the numbers of K and V are multiplied with, or None for 1. OF_TOKENS: every row
    of a key head has its own, at (entry or page, row, head); else the strides of rows are 0, and the entry is that of
    the batch.
    """
    W: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = OPTIONS.BLOCK_N // W
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    WIDTH_V: gl.constexpr = OPTIONS.WIDTH_V
    PAGE_SIZE: gl.constexpr = OPTIONS.PAGE_SIZE
    ROWS: gl.constexpr = OPTIONS.ROWS
    SPLITS: gl.constexpr = OPTIONS.SPLITS
    STREAM: gl.constexpr = OPTIONS.STREAM
    OF_TOKENS: gl.constexpr = OPTIONS.OF_TOKENS
    INT8: gl.constexpr = K.dtype.element_ty == gl.int8
    PRODUCT: gl.constexpr = product_layout(W)
    K_A: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 8)
    Q_B: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 8)
    V_A: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    P_B: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    K_L: gl.constexpr = key_layout(W)
    V_L: gl.constexpr = value_layout(W, WIDTH_V // 32)
    K_ROWS: gl.constexpr = outer_layout(K_L)
    V_ROWS: gl.constexpr = outer_layout(V_L)
    PER_KEY: gl.constexpr = gl.SliceLayout(2, PRODUCT)
    PER_ROW: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    OUT: gl.constexpr = result_layout(W, ROWS)
    q_strides = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    o_strides = in_elements(stride_ob, stride_oh, stride_om, UNIT)
    k_strides = in_words(stride_kb, stride_kh, stride_kn, UNIT_KV)
    v_strides = in_words(stride_vb, stride_vh, stride_vn, UNIT_KV)
    batch = gl.program_id(2).to(gl.int64)
    head_kv = gl.program_id(0)
    sizes = Sizes(num_heads, group_size, total_rows, seqlen_q, seqlen_k)
    count = group_size * seqlen_q
    stop_key, diagonal = keys_in_sight(Lengths, batch, seqlen_q, seqlen_k, OPTIONS.CAUSAL, OPTIONS.FROM_START)
    share = share_of(stop_key, OPTIONS.BLOCK_N, SPLITS)
    first, stop = share.first, share.stop
    k_base = words_of_head(K, batch, head_kv, k_strides, PAGE_SIZE)
    v_base = words_of_head(V, batch, head_kv, v_strides, PAGE_SIZE)
    table = Table
    if PAGE_SIZE > 0:
        table += batch * stride_table
    # [ROWS]
    q_offsets = query_offsets(batch, head_kv, sizes, q_strides, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, Q_B)))
    k_scale_strides = Strides(stride_ksb, stride_ksh, stride_ksn)
    v_scale_strides = Strides(stride_vsb, stride_vsh, stride_vsn)
    k_scale, v_scale = 1.0, 1.0
    if KScales is not None:
        KScales, k_scale = scales_of_head(KScales, batch, head_kv, k_scale_strides, PAGE_SIZE > 0, OF_TOKENS)
    if VScales is not None:
        VScales, v_scale = scales_of_head(VScales, batch, head_kv, v_scale_strides, PAGE_SIZE > 0, OF_TOKENS)

    # The queries and the first tile are on their way before anything else is done, and branches keep loads where they
    # are, as in the kernel over 16 bits.
    # [W, WIDTH, ROWS]
    queries = load_queries(Q, q_offsets, W, WIDTH, Q_B)
    # [W, KEYS, WIDTH / 64, 4, 4] words of K, [W, KEYS, 1, 8, WIDTH_V / 32] of V
    k = gl.zeros([W, KEYS, WIDTH // 64, 4, 4], gl.int32, K_L)
    v = gl.zeros([W, KEYS, 1, 8, WIDTH_V // 32], gl.int32, V_L)
    # [W, KEYS]
    k_scales = gl.full([W, KEYS], 1.0, gl.float32, PER_KEY)
    v_scales = gl.full([W, KEYS], 1.0, gl.float32, PER_KEY)
    k_pages = load_pages(table, first, share, PAGE_SIZE, W, KEYS, K_ROWS)
    v_pages = load_pages(table, first, share, PAGE_SIZE, W, KEYS, V_ROWS)
    scale_pages = 0
    if OF_TOKENS:
        scale_pages = load_pages(table, first, share, PAGE_SIZE, W, KEYS, PER_KEY)
    if first < stop:
        k_offsets = key_offsets(first, stop_key, k_pages, k_strides, PAGE_SIZE, W, KEYS, K_ROWS)
        v_offsets = key_offsets(first, stop_key, v_pages, v_strides, PAGE_SIZE, W, KEYS, V_ROWS)
        k = load_words(k_base, k_offsets, WIDTH // 64, 4, STREAM, K_L)
        v = load_words(v_base, v_offsets, 1, WIDTH_V // 32, STREAM, V_L)
        k_pages = load_pages(table, first + 1, share, PAGE_SIZE, W, KEYS, K_ROWS)
        v_pages = load_pages(table, first + 1, share, PAGE_SIZE, W, KEYS, V_ROWS)
        if OF_TOKENS:
            k_scales = load_scales(KScales, first, stop_key, scale_pages, k_scale_strides, PAGE_SIZE, W, KEYS, PER_KEY)
            v_scales = load_scales(VScales, first, stop_key, scale_pages, v_scale_strides, PAGE_SIZE, W, KEYS, PER_KEY)
            scale_pages = load_pages(table, first + 1, share, PAGE_SIZE, W, KEYS, PER_KEY)

    # [W, WIDTH, ROWS] in float16, [W, ROWS]
    q, row_scale = in_range(queries)
    row_scale = gl.convert_layout(row_scale, PER_ROW) * (scale_log2 * k_scale)
    sinks = None
    if Sinks is not None:
        # [ROWS]
        sinks = sinks_of_rows(Sinks, head_kv, sizes, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, OUT)))

    # [W, KEYS, ROWS] of scores, [W, ROWS] of rows, [W, WIDTH_V, ROWS] of the output
    nothing = gl.zeros([W, KEYS, ROWS], gl.float32, PRODUCT)
    maximum = gl.full([W, ROWS], float("-inf"), gl.float32, PER_ROW)
    sums = gl.zeros([W, ROWS], gl.float32, PER_ROW)
    acc = gl.zeros([W, WIDTH_V, ROWS], gl.float32, PRODUCT)
    # [W, ROWS]
    last = last_keys(stop_key, diagonal, seqlen_q, OPTIONS.CAUSAL, W, ROWS, PER_ROW)
    for tile in range(first, stop):
        # [W, KEYS, ROWS]
        scores = mma_v2(keys_of(k, INT8, K_A), q, nothing) * row_scale[:, None, :]
        if OF_TOKENS:
            scores *= k_scales[:, :, None]
        if tile + 1 < stop:
            k_offsets = key_offsets(tile + 1, stop_key, k_pages, k_strides, PAGE_SIZE, W, KEYS, K_ROWS)
            k = load_words(k_base, k_offsets, WIDTH // 64, 4, STREAM, K_L)
            k_pages = load_pages(table, tile + 2, share, PAGE_SIZE, W, KEYS, K_ROWS)
        scores = visible_scores(scores, last, tile, W, KEYS)
        if OF_TOKENS:
            heights = scores + magnitude_log2(v_scales)[:, :, None]
            p, maximum, sums, factor = weights_step(scores, largest_height(heights), maximum, sums)
            p *= (v_scales * 16384.0)[:, :, None]
        else:
            p, maximum, sums, factor = weights_step(scores, gl.max(scores, 1), maximum, sums)
            p *= 16384.0
        p = gl.convert_layout(p.to(gl.float16), P_B)
        # [W, WIDTH_V, ROWS]
        acc = mma_v2(values_of(v, INT8, V_A), p, acc * factor[:, None, :])
        if tile + 1 < stop:
            v_offsets = key_offsets(tile + 1, stop_key, v_pages, v_strides, PAGE_SIZE, W, KEYS, V_ROWS)
            v = load_words(v_base, v_offsets, 1, WIDTH_V // 32, STREAM, V_L)
            v_pages = load_pages(table, tile + 2, share, PAGE_SIZE, W, KEYS, V_ROWS)
            if OF_TOKENS:
                k_scales = load_scales(
                    KScales, tile + 1, stop_key, scale_pages, k_scale_strides, PAGE_SIZE, W, KEYS, PER_KEY
                )
                v_scales = load_scales(
                    VScales, tile + 1, stop_key, scale_pages, v_scale_strides, PAGE_SIZE, W, KEYS, PER_KEY
                )
                scale_pages = load_pages(table, tile + 2, share, PAGE_SIZE, W, KEYS, PER_KEY)

    found = merge_warps(in_order(acc), maximum, sums, OUT)
    found = Found(o=found.o * (v_scale / 16384.0), m=found.m, l=found.l)  # of the probabilities
    place = (gl.program_id(2) * num_heads + head_kv * group_size) * seqlen_q
    out = Out + batch * o_strides.batch + head_kv.to(gl.int64) * group_size * o_strides.head
    output = Output(out, o_strides, Lse, sinks)
    finish_share(Work, Counter, output, found, Rows(count, place, seqlen_q), total_rows, WIDTH_V, SPLITS, OUT)
