"""Decoding on Hopper in one launch, in Gluon: the kernel of kernels/hopper/decode/kernel.py.

kernels/hopper/decode/tiles.py says what makes it fast.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from blocktune.kernels.hopper.decode.arguments import Output, Rows, Sizes
from blocktune.kernels.hopper.decode.merges import finish_share, merge_warps, result_layout
from blocktune.kernels.hopper.decode.tiles import (
    in_elements,
    in_order,
    in_words,
    key_layout,
    key_offsets,
    keys_in_sight,
    keys_of,
    last_keys,
    load_pages,
    load_queries,
    load_words,
    outer_layout,
    probabilities,
    product_layout,
    query_offsets,
    share_of,
    sinks_of_rows,
    value_layout,
    values_of,
    words_of_head,
)

SIZES = (
    "num_heads",
    "group_size",
    "total_rows",
    "seqlen_k",
    "stride_table",
)
"""Integers that are not compiled in. A single query is: that saves divisions."""


@gluon.jit(do_not_specialize=SIZES)
def flash_decode_hopper_kernel(
    Q, K, V, Out, Lse, Work, Counter, Lengths, Table, Sinks, scale_log2, stride_table,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    num_heads, group_size, total_rows, seqlen_q, seqlen_k,
    OPTIONS: gl.constexpr, UNIT: gl.constexpr, UNIT_KV: gl.constexpr,
):  # fmt: skip
    """Decode with program (key head, split, batch): its packed rows, up to ROWS, and one of SPLITS shares of its keys.

    Q [batch, num_heads, seqlen_q, HEAD_DIM]; K and V [batch, num_heads_kv, seqlen_k, HEAD_DIM(_V)], or [pages,
    num_heads_kv, PAGE_SIZE, ...] with Table int32 [batch, stride_table]; Out like Q with HEAD_DIM_V; tiles have
    WIDTH(_V) columns, filled up with zeros; Lse [batch, num_heads, seqlen_q] or None. Work:
    the workspace, and Counter: zeros, one for each (key head, batch), and zeros at the end; both None with one split.
    Lengths int32 [batch] or None: all have seqlen_k keys. Sinks: a logit for each of num_heads that joins the softmax
    of its rows, or None. Strides of K and V are in UNIT_KV words of 32 bits, those of Q
    and Out in UNIT elements. OPTIONS: `Options`.
    """
    W: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = OPTIONS.BLOCK_N // W
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    WIDTH_V: gl.constexpr = OPTIONS.WIDTH_V
    PAGE_SIZE: gl.constexpr = OPTIONS.PAGE_SIZE
    ROWS: gl.constexpr = OPTIONS.ROWS
    SPLITS: gl.constexpr = OPTIONS.SPLITS
    STREAM: gl.constexpr = OPTIONS.STREAM
    HEAD_DIM: gl.constexpr = OPTIONS.HEAD_DIM
    HEAD_DIM_V: gl.constexpr = OPTIONS.HEAD_DIM_V
    PRODUCT: gl.constexpr = product_layout(W)
    K_A: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 8)
    Q_B: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 8)
    V_A: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    P_B: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    K_L: gl.constexpr = key_layout(W)
    V_L: gl.constexpr = value_layout(W)
    K_ROWS: gl.constexpr = outer_layout(K_L)
    V_ROWS: gl.constexpr = outer_layout(V_L)
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

    # The queries and the first tile are on their way before anything else is done, the queries first: after the tile
    # they would arrive last, and the first product waits for them. Branches, here and in the loop, because ptxas moves
    # no load across them: else it issues loads where it expects them to be needed.
    # [W, WIDTH, ROWS]
    q = load_queries(Q, q_offsets, W, HEAD_DIM, WIDTH, Q_B)
    # [W, KEYS, WIDTH / 32, 4, 4] words of K, [W, KEYS, WIDTH_V / 64, 8, 4] of V
    k = gl.zeros([W, KEYS, WIDTH // 32, 4, 4], gl.int32, K_L)
    v = gl.zeros([W, KEYS, WIDTH_V // 64, 8, 4], gl.int32, V_L)
    # [W, KEYS], where there are pages: numbers of them; offsets: words from the first of the entry or the cache
    k_pages = load_pages(table, first, share, PAGE_SIZE, W, KEYS, K_ROWS)
    v_pages = load_pages(table, first, share, PAGE_SIZE, W, KEYS, V_ROWS)
    if first < stop:
        k_offsets = key_offsets(first, stop_key, k_pages, k_strides, PAGE_SIZE, W, KEYS, K_ROWS)
        v_offsets = key_offsets(first, stop_key, v_pages, v_strides, PAGE_SIZE, W, KEYS, V_ROWS)
        k = load_words(k_base, k_offsets, HEAD_DIM, WIDTH // 32, STREAM, K_L)
        v = load_words(v_base, v_offsets, HEAD_DIM_V, WIDTH_V // 64, STREAM, V_L)
        k_pages = load_pages(table, first + 1, share, PAGE_SIZE, W, KEYS, K_ROWS)
        v_pages = load_pages(table, first + 1, share, PAGE_SIZE, W, KEYS, V_ROWS)

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
        scores = mma_v2(keys_of(k, q.dtype, K_A), q, nothing)
        if tile + 1 < stop:
            k_offsets = key_offsets(tile + 1, stop_key, k_pages, k_strides, PAGE_SIZE, W, KEYS, K_ROWS)
            k = load_words(k_base, k_offsets, HEAD_DIM, WIDTH // 32, STREAM, K_L)
            k_pages = load_pages(table, tile + 2, share, PAGE_SIZE, W, KEYS, K_ROWS)
        p, maximum, sums, factor = probabilities(scores, last, maximum, sums, tile, scale_log2, W, KEYS)
        p = gl.convert_layout(p.to(q.dtype), P_B)
        # [W, WIDTH_V, ROWS]
        acc = mma_v2(values_of(v, q.dtype, V_A), p, acc * factor[:, None, :])
        if tile + 1 < stop:
            v_offsets = key_offsets(tile + 1, stop_key, v_pages, v_strides, PAGE_SIZE, W, KEYS, V_ROWS)
            v = load_words(v_base, v_offsets, HEAD_DIM_V, WIDTH_V // 64, STREAM, V_L)
            v_pages = load_pages(table, tile + 2, share, PAGE_SIZE, W, KEYS, V_ROWS)

    found = merge_warps(in_order(acc), maximum, sums, OUT)
    place = (gl.program_id(2) * num_heads + head_kv * group_size) * seqlen_q
    out = Out + batch * o_strides.batch + head_kv.to(gl.int64) * group_size * o_strides.head
    output = Output(out, o_strides, Lse, sinks)
    finish_share(Work, Counter, output, found, Rows(count, place, seqlen_q), total_rows, HEAD_DIM_V, SPLITS, OUT)
