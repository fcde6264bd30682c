"""The device functions of decoding: a few queries against many keys, split over programs, and the merge of the parts.

The query heads that share a key head and their seqlen_q queries are the rows of one tile (row r: query head
r // seqlen_q of the group, query r % seqlen_q), so that keys and values are read once for all of them. Every split
yields for each row a maximum m (base 2), a sum l = sum 2^(s - m) and an output o = sum 2^(s - m) v. Two such triples
merge into one of the same kind, in any order (FlashDecoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

The workspace is float32: o [splits, total_rows, HEAD_DIM_V], then m [splits, total_rows], then l likewise, with
total_rows = batch * num_heads * seqlen_q. A second launch merges what it holds. Of two splits the program that ends
later can merge instead (PAIRED): only the other one writes a share, and nothing has to be launched.
"""

import triton
import triton.language as tl

from blocktune.kernels.portable.decode.arguments import CachedKeys, Rows
from blocktune.kernels.portable.forward.arguments import SequenceBounds, SoftmaxState
from blocktune.kernels.portable.forward.pages import load_pages
from blocktune.kernels.portable.forward.scores import hyperbolic_tangent
from blocktune.kernels.portable.forward.softmax import online_step
from blocktune.kernels.portable.forward.tiles import in_elements

DECODE_SIZES = (
    "num_heads",
    "num_heads_kv",
    "group_size",
    "row_tiles",
    "total_rows",
    "seqlen_q",
    "seqlen_k",
    "left",
    "right",
    "stride_table",
    "stride_slopes",
    "stride_tree_b",
    "stride_tree_m",
)
"""Integers that are not compiled in."""


@triton.jit
def key_range(sequence, OPTIONS: tl.constexpr):
    """Return (first tile, stop tile, stop key) of this program's split: an equal share of the key tiles that a query
    sees."""
    SPLITS: tl.constexpr = OPTIONS.SPLITS
    length, diagonal = sequence.seqlen_k, sequence.diagonal
    start_key = tl.maximum(0, diagonal - sequence.left) if OPTIONS.LEFT else 0
    stop_key = tl.minimum(length, sequence.seqlen_q + diagonal + sequence.right) if OPTIONS.RIGHT else length
    first = start_key // OPTIONS.BLOCK_N
    tiles = tl.maximum(0, tl.cdiv(stop_key, OPTIONS.BLOCK_N) - first)
    split = tl.program_id(1)
    return first + tiles * split // SPLITS, first + tiles * (split + 1) // SPLITS, stop_key


@triton.jit
def load_keys(base, offsets, inside, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return [BLOCK_N, WIDTH] of K or V: the rows at these offsets [BLOCK_N], zeros where not inside. What lies behind
    the last key is never read: it may be NaN, which no probability of zero would undo."""
    columns = tl.arange(0, WIDTH)
    pointers = base + offsets[:, None] + columns[None, :]
    if DIM == WIDTH:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=inside[:, None] & (columns[None, :] < DIM), other=0.0)


@triton.jit
def tree_bits(rows, drafts):
    """Return whether the tree of each of `Rows` holds these draft keys, [BLOCK_M, BLOCK_N]; drafts [BLOCK_N] counts
    from the first draft."""
    words = tl.where(drafts[None, :] < 32, rows.low[:, None], rows.high[:, None])
    return ((words >> (drafts & 31)[None, :]) & 1) != 0


@triton.jit
def decode_split(q, keys, rows, sequence, scale_log2, cap_log2, ALIBI: tl.constexpr, OPTIONS: tl.constexpr):
    """Attend to this program's share of the keys with q [BLOCK_M, WIDTH] of `Rows`, and return the `SoftmaxState`."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    PAGE_SIZE: tl.constexpr = OPTIONS.PAGE_SIZE
    WIDTH_V: tl.constexpr = OPTIONS.WIDTH_V
    acc = tl.zeros([q.shape[0], WIDTH_V], tl.float32)
    l_i = tl.zeros([q.shape[0]], tl.float32)
    m_i = tl.full([q.shape[0]], float("-inf"), tl.float32)
    first, stop, stop_key = key_range(sequence, OPTIONS)
    if PAGE_SIZE > 0:
        pages = load_pages(keys.table, first, stop_key, OPTIONS)
    for tile in tl.range(first, stop, num_stages=OPTIONS.STAGES):
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < stop_key
        if PAGE_SIZE > 0:
            places = (columns % PAGE_SIZE).to(tl.int64)
            k_offsets = pages * keys.k_entry + places * keys.k_row
            v_offsets = pages * keys.v_entry + places * keys.v_row
            # a tile ahead: loads whose addresses are loaded in the same iteration run ahead less far
            pages = load_pages(keys.table, tile + 1, stop_key, OPTIONS)
        else:
            k_offsets = columns.to(tl.int64) * keys.k_row
            v_offsets = columns.to(tl.int64) * keys.v_row
        # [BLOCK_N, WIDTH]
        k = load_keys(keys.k, k_offsets, inside, OPTIONS.HEAD_DIM, OPTIONS.WIDTH)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, k.T, input_precision=OPTIONS.PRECISION) * scale_log2
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
        p, m_i, l_i, factor = online_step(tl.where(visible, scores, float("-inf")), m_i, l_i, 1.0, True)
        # [BLOCK_N, WIDTH_V]
        v = load_keys(keys.v, v_offsets, inside, OPTIONS.HEAD_DIM_V, WIDTH_V)
        # [BLOCK_M, WIDTH_V]
        acc = tl.dot(p.to(q.dtype), v, acc * factor[:, None], input_precision=OPTIONS.PRECISION)
    return SoftmaxState(acc, l_i, m_i)


@triton.jit
def store_partial(work, state, places, inside, total_rows, OPTIONS: tl.constexpr):
    """Write the state of this program's split into the workspace, at the rows `places` [BLOCK_M] of [0, total_rows)."""
    SPLITS: tl.constexpr = OPTIONS.SPLITS
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    acc, l_i, m_i = state
    columns = tl.arange(0, acc.shape[1])
    places = tl.program_id(1) * total_rows.to(tl.int64) + places
    sums = work + SPLITS * total_rows.to(tl.int64) * HEAD_DIM_V
    mask = inside[:, None] & (columns[None, :] < HEAD_DIM_V)
    tl.store(work + places[:, None] * HEAD_DIM_V + columns[None, :], acc, mask=mask)
    tl.store(sums + places, m_i, mask=inside)
    tl.store(sums + SPLITS * total_rows.to(tl.int64) + places, l_i, mask=inside)


@triton.jit
def is_first(counter):
    """Return whether this program of two is the first to come here. The other one will be told so by `await_share`."""
    return tl.atomic_add(counter, 1, sem="relaxed") == 0


@triton.jit
def announce_share(counter):
    """Tell the other program of two that everything that this one stored can be read."""
    tl.debug_barrier()  # all threads have stored
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def await_share(counter):
    """Wait until the other program of two has announced its share, and leave the counter at zero. It runs already, and
    waits for nothing."""
    seen = 0
    while seen < 3:
        seen = tl.atomic_add(counter, 0, sem="acquire")
    tl.store(counter, 0)


@triton.jit
def merge_pair(work, state, places, inside, total_rows, HEAD_DIM_V: tl.constexpr):
    """Return the state of both splits, of which the other one's is in the workspace. It is added up in the order of the
    splits, so that it is the same to the bit whichever of them merges."""
    acc, l_i, m_i = state
    columns = tl.arange(0, acc.shape[1])
    sums = work + 2 * total_rows.to(tl.int64) * HEAD_DIM_V
    places = (1 - tl.program_id(1)) * total_rows.to(tl.int64) + places
    mask = inside[:, None] & (columns[None, :] < HEAD_DIM_V)
    # past the first-level cache: another program wrote them
    m = tl.load(sums + places, mask=inside, other=float("-inf"), cache_modifier=".cg")
    l = tl.load(sums + 2 * total_rows.to(tl.int64) + places, mask=inside, other=0.0, cache_modifier=".cg")
    # [BLOCK_M, WIDTH_V]
    o = tl.load(work + places[:, None] * HEAD_DIM_V + columns[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    best = tl.maximum(m_i, m)
    base = tl.where(best == float("-inf"), 0.0, best)
    own, other = tl.exp2(m_i - base), tl.exp2(m - base)
    earlier = tl.program_id(1) == 0
    first, second = tl.where(earlier, own, other), tl.where(earlier, other, own)
    total = tl.where(earlier, l_i, l) * first + tl.where(earlier, l, l_i) * second
    merged = tl.where(earlier, acc, o) * first[:, None] + tl.where(earlier, o, acc) * second[:, None]
    return SoftmaxState(merged, total, best)


@triton.jit
def store_output(state, out_pointers, lse_pointers, inside, HEAD_DIM_V: tl.constexpr):
    """Write the finished rows: divided by their sums, zeros and -inf where a row saw no key."""
    acc, l_i, m_i = state
    ln_2: tl.constexpr = 0.6931471805599453
    columns = tl.arange(0, acc.shape[1])
    sums = tl.where(l_i == 0.0, 1.0, l_i)
    if lse_pointers is not None:
        tl.store(lse_pointers, tl.where(l_i == 0.0, float("-inf"), (m_i + tl.log2(sums)) * ln_2), mask=inside)
    mask = inside[:, None] & (columns[None, :] < HEAD_DIM_V)
    result = (acc / sums[:, None]).to(out_pointers.dtype.element_ty)
    tl.store(out_pointers[:, None] + columns[None, :], result, mask=mask)


@triton.jit(do_not_specialize=DECODE_SIZES)
def flash_decode_kernel(
    Q, K, V, Out, Lse, Work, Lengths, Table, Tree, Slopes, scale_log2, cap_log2,
    stride_table, stride_slopes, stride_tree_b, stride_tree_m, Counter,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    num_heads, num_heads_kv, group_size, row_tiles, total_rows, seqlen_q, seqlen_k, left, right,
    OPTIONS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Decode with program (x, split): BLOCK_M rows of one (batch, key head) and one of SPLITS shares of its keys.

    Q [batch, num_heads, seqlen_q, HEAD_DIM]; K and V [batch, num_heads_kv, seqlen_k, HEAD_DIM(_V)], or [pages,
    num_heads_kv, PAGE_SIZE, ...] with Table int32 [batch, stride_table]; Out like Q; Lse [batch, num_heads, seqlen_q]
    or None. Work: the workspace, None with one split, which writes Out itself. Lengths int32 [batch] or None: all have
    seqlen_k keys. Tree int32 [batch, seqlen_q, WORDS], with WORDS 0 none. Slopes float32 [.., num_heads] or None.
    Counter: zeros, one for each x, and zeros at the end, if PAIRED: of two splits the later program merges; else None.
    cap_log2: the soft cap times log2(e). OPTIONS: `Options`.
    """
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    if OPTIONS.OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
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
    q = load_keys(Q, q_offsets, inside, OPTIONS.HEAD_DIM, OPTIONS.WIDTH)  # [BLOCK_M, WIDTH]
    slopes, low, high = 0, 0, 0
    if Slopes is not None:
        slopes = tl.load(Slopes + batch * stride_slopes + heads, mask=inside, other=0.0) * 1.4426950408889634
    if OPTIONS.WORDS > 0:
        words = Tree + batch * stride_tree_b + queries * stride_tree_m
        low = tl.load(words, mask=inside, other=0)
        high = tl.load(words + 1, mask=inside, other=0) if OPTIONS.WORDS > 1 else low
    k_base, v_base, table = K + head_kv * k_strides.head, V + head_kv * v_strides.head, Table
    if OPTIONS.PAGE_SIZE == 0:
        k_base += batch * k_strides.batch
        v_base += batch * v_strides.batch
    else:
        table += batch * stride_table
    rows = Rows(queries, slopes, low, high)
    keys = CachedKeys(k_base, v_base, k_strides.batch, k_strides.row, v_strides.batch, v_strides.row, table)
    diagonal = 0 if OPTIONS.FROM_START else length - seqlen_q
    sequence = SequenceBounds(seqlen_q, length, diagonal, left, right)
    state = decode_split(q, keys, rows, sequence, scale_log2, cap_log2, Slopes is not None, OPTIONS)
    places = (batch * num_heads + heads) * seqlen_q + queries
    out_pointers = Out + batch * o_strides.batch + heads * o_strides.head + queries * o_strides.row
    lse_pointers = None if Lse is None else Lse + places
    counter = Counter + tl.program_id(0) if OPTIONS.PAIRED else Counter
    if OPTIONS.SPLITS == 1:
        store_output(state, out_pointers, lse_pointers, inside, HEAD_DIM_V)
    elif not OPTIONS.PAIRED:
        store_partial(Work, state, places, inside, total_rows, OPTIONS)
    elif is_first(counter):
        store_partial(Work, state, places, inside, total_rows, OPTIONS)
        announce_share(counter)
    else:
        await_share(counter)
        state = merge_pair(Work, state, places, inside, total_rows, HEAD_DIM_V)
        store_output(state, out_pointers, lse_pointers, inside, HEAD_DIM_V)


@triton.jit(do_not_specialize=("num_heads", "seqlen_q", "total_rows"))
def merge_splits_kernel(
    Out, Lse, Work, stride_ob, stride_oh, stride_om, num_heads, seqlen_q, total_rows,
    SPLITS: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge with program (row, part): BLOCK_D columns of one row of Out, from the triples of all splits in Work; the
    first part writes the row's log-sum-exp, unless Lse is None. OVERLAP: launched early, it waits for the splits."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    places = tl.arange(0, SPLITS) * total_rows.to(tl.int64) + row
    sums = Work + SPLITS * total_rows.to(tl.int64) * HEAD_DIM_V
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    m = tl.load(sums + places)
    l = tl.load(sums + SPLITS * total_rows.to(tl.int64) + places)
    # [SPLITS, BLOCK_D]
    o = tl.load(Work + places[:, None] * HEAD_DIM_V + columns[None, :], mask=columns[None, :] < HEAD_DIM_V, other=0.0)
    best = tl.max(m, 0)
    weights = tl.exp2(m - tl.where(best == float("-inf"), 0.0, best))  # [SPLITS]
    total = tl.sum(weights * l, 0)
    batch, head, query = row // seqlen_q // num_heads, row // seqlen_q % num_heads, row % seqlen_q
    result = tl.sum(weights[:, None] * o, 0) / tl.where(total == 0.0, 1.0, total)
    pointers = Out + batch * stride_ob + head * stride_oh + query * stride_om + columns
    tl.store(pointers, result.to(Out.dtype.element_ty), mask=columns < HEAD_DIM_V)
    if Lse is not None:
        if tl.program_id(1) == 0:
            log2_total = tl.log2(tl.where(total == 0.0, 1.0, total))  # best is -inf where the total is 0
            tl.store(Lse + row, (best + log2_total) * 0.6931471805599453)
