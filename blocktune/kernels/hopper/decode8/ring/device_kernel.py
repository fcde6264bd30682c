"""Decoding over an 8-bit cache on Hopper with many rows, in Gluon: the kernel of kernels/hopper/decode8/ring/kernel.py.

1. Bytes of keys and values come to shared memory by asynchronous copies, STAGES tiles ahead (copies.py), and go from
   there to registers, where they are converted and multiplied (operands.py).
2. A tile takes two barriers: at the first the warps agree whether references move (softmax.py), and the next tile has
   arrived; at the second the probabilities of all warps are there, and all of the tile is in registers, so that the
   copies of a tile that is to come take its place.
3. A multiprocessor holds two blocks: one computes while the other waits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from blocktune.kernels.hopper.decode.arguments import Found, Output, Rows, Sizes, Strides
from blocktune.kernels.hopper.decode.device_kernel import SIZES
from blocktune.kernels.hopper.decode.merges import block_barrier, store_result
from blocktune.kernels.hopper.decode.tiles import (
    in_elements,
    in_words,
    keys_in_sight,
    query_offsets,
    share_of,
    words_of_head,
)
from blocktune.kernels.hopper.decode8.ring.copies import (
    Cache,
    Ring,
    copy_layout,
    copy_tile,
    key_memory,
    load_pages,
    new_scales,
    new_words,
    value_memory,
)
from blocktune.kernels.hopper.decode8.ring.operands import (
    in_order,
    in_order_of_keys,
    key_layout,
    keys_of,
    product_layout,
    value_layout,
    values_of,
)
from blocktune.kernels.hopper.decode8.ring.results import store_share
from blocktune.kernels.hopper.decode8.ring.softmax import announce, any_above, raised, thread_sums
from blocktune.kernels.hopper.decode8.tiles import in_range, magnitude_log2, scales_of_head
from blocktune.kernels.portable.decode8.tiles import SCALE_STRIDES


@gluon.jit
def launch_merge_early(number):
    """Let the blocks of the merge start once all blocks of this launch run."""
    ASM: gl.constexpr = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(ASM, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_queries(Q, offsets, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Q [rows, WIDTH]; offsets [rows]."""
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    return gl.load(Q + offsets[:, None] + columns[None, :])


@gluon.jit
def as_operand(q):
    """(Q [rows, WIDTH] as float16, in the order of columns that K has, [rows] what the scores of each row are to be
    multiplied with)."""
    ROWS: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    q, row_scale = in_range(gl.reshape(gl.permute(q, (1, 0)), [1, WIDTH, ROWS]))
    return in_order_of_keys(gl.permute(gl.reshape(q, [WIDTH, ROWS]), (1, 0))), gl.reshape(row_scale, [ROWS])


@gluon.jit
def visible(scores, tile, last):
    """scores [keys, rows] of a tile, of which row r sees the keys up to last[r]: -inf elsewhere."""
    KEYS: gl.constexpr = scores.shape[0]
    # [keys]
    keys = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, scores.type.layout))
    return gl.where(keys[:, None] <= last[None, :], scores, float("-inf"))


@gluon.jit(do_not_specialize=(*SIZES, *SCALE_STRIDES))
def flash_decode8_ring_kernel(
    Q, K, V, Out, Lse, Work, Lengths, Table, scale_log2, stride_table,
    KScales, VScales, stride_ksb, stride_ksn, stride_ksh, stride_vsb, stride_vsn, stride_vsh,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    num_heads, group_size, total_rows, seqlen_q, seqlen_k,
    OPTIONS: gl.constexpr, UNIT: gl.constexpr, UNIT_KV: gl.constexpr,
):  # fmt: skip
    """Program (key head, split, batch): its packed rows, up to ROWS, and one of SPLITS shares of its keys.

    Arguments as of `flash_decode8_hopper_kernel`; keys and values have WIDTH columns. With several splits the shares
    are left in Work, as `merge_splits_kernel` reads them; OVERLAP: once all programs run, its programs may start.
    """
    if OPTIONS.OVERLAP:
        launch_merge_early(num_heads)
    W: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    PAGE_SIZE: gl.constexpr = OPTIONS.PAGE_SIZE
    CAUSAL: gl.constexpr = OPTIONS.CAUSAL
    ROWS: gl.constexpr = OPTIONS.ROWS
    KEYS: gl.constexpr = OPTIONS.KEYS
    SPLITS: gl.constexpr = OPTIONS.SPLITS
    STAGES: gl.constexpr = OPTIONS.STAGES
    OF_TOKENS: gl.constexpr = OPTIONS.OF_TOKENS
    INT8: gl.constexpr = K.dtype.element_ty == gl.int8
    PRODUCT: gl.constexpr = product_layout(W, ROWS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    PER_ROW: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    PER_KEY: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    COPIES: gl.constexpr = copy_layout(W, WIDTH // 4)
    K_L: gl.constexpr = key_layout(W, KEYS, WIDTH // 4)
    V_L: gl.constexpr = value_layout(W, KEYS, WIDTH // 4)
    Q_L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [W, 1], [1, 0])
    q_strides = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    o_strides = in_elements(stride_ob, stride_oh, stride_om, UNIT)
    k_strides = in_words(stride_kb, stride_kh, stride_kn, UNIT_KV)
    v_strides = in_words(stride_vb, stride_vh, stride_vn, UNIT_KV)
    batch = gl.program_id(2).to(gl.int64)
    head_kv = gl.program_id(0)
    sizes = Sizes(num_heads, group_size, total_rows, seqlen_q, seqlen_k)
    count = group_size * seqlen_q
    stop_key, diagonal = keys_in_sight(Lengths, batch, seqlen_q, seqlen_k, CAUSAL, OPTIONS.FROM_START)
    seen_by_all = stop_key  # keys
    if CAUSAL:
        seen_by_all = gl.minimum(stop_key, diagonal + 1)
    share = share_of(stop_key, KEYS, SPLITS)
    first, stop = share.first, share.stop
    table = Table
    if PAGE_SIZE > 0:
        table += batch * stride_table
    k_scale_strides = Strides(stride_ksb, stride_ksh, stride_ksn)
    v_scale_strides = Strides(stride_vsb, stride_vsh, stride_vsn)
    k_scale, v_scale = 1.0, 1.0
    if KScales is not None:
        KScales, k_scale = scales_of_head(KScales, batch, head_kv, k_scale_strides, PAGE_SIZE > 0, OF_TOKENS)
    if VScales is not None:
        VScales, v_scale = scales_of_head(VScales, batch, head_kv, v_scale_strides, PAGE_SIZE > 0, OF_TOKENS)
    cache = Cache(
        k=words_of_head(K, batch, head_kv, k_strides, PAGE_SIZE),
        v=words_of_head(V, batch, head_kv, v_strides, PAGE_SIZE),
        k_scales=KScales,
        v_scales=VScales,
        table=table,
        stride_k=(k_strides.batch, k_strides.row),
        stride_v=(v_strides.batch, v_strides.row),
        stride_ks=(stride_ksb, stride_ksn),
        stride_vs=(stride_vsb, stride_vsn),
        stop=stop,
        stop_key=stop_key,
    )
    ring = Ring(
        k=new_words(STAGES, KEYS, WIDTH // 4, key_memory()),
        v=new_words(STAGES, KEYS, WIDTH // 4, value_memory()),
        k_scales=new_scales(STAGES, KEYS) if OF_TOKENS else None,
        v_scales=new_scales(STAGES, KEYS) if OF_TOKENS else None,
    )
    # the queries first: after the tiles they would arrive last, and the first product waits for them
    q_offsets = query_offsets(batch, head_kv, sizes, q_strides, ROWS, gl.SliceLayout(1, Q_L))
    queries = load_queries(Q, q_offsets, WIDTH, Q_L)
    PAGES: gl.constexpr = gl.SliceLayout(1, COPIES)
    # all pages before any copy, which waits for one
    first_pages = (load_pages(cache, first, PAGE_SIZE, KEYS, PAGES),)
    for ahead in gl.static_range(1, STAGES + 1):
        # a tuple grows while it is compiled
        first_pages += (load_pages(cache, first + ahead, PAGE_SIZE, KEYS, PAGES),)  # type: ignore[assignment]
    for ahead in gl.static_range(STAGES):
        copy_tile(ring, ahead, cache, first + ahead, first_pages[ahead], PAGE_SIZE, COPIES)
    pages = first_pages[STAGES]

    # [ROWS, WIDTH] and, of the probabilities, [2, KEYS, ROWS] in float16
    q_memory = gl.allocate_shared_memory(
        gl.float16, [ROWS, WIDTH], gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], gl.float16)
    )
    p_memory = gl.allocate_shared_memory(
        gl.float16, [2, KEYS, ROWS], gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], gl.float16)
    )
    flags = gl.allocate_shared_memory(gl.float32, [2, W, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    q, row_scale = as_operand(queries)
    q_memory.store(q)
    if CAUSAL:
        # [ROWS], which few tiles need
        last_memory = gl.allocate_shared_memory(gl.int32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        query = gl.arange(0, ROWS, PER_ROW) % seqlen_q
        last_memory.store(gl.minimum(query + diagonal, stop_key - 1))
    # [ROWS]
    row_scale = gl.convert_layout(row_scale, PER_ROW) * (scale_log2 * k_scale)
    async_copy.wait_group(STAGES - 1)
    fence_async_shared()
    block_barrier()

    # [KEYS, ROWS] of scores, [WIDTH, ROWS] of the output, [ROWS] of references, of sums those of every thread
    nothing = gl.zeros([KEYS, ROWS], gl.float32, PRODUCT)
    acc = gl.zeros([WIDTH, ROWS], gl.float32, PRODUCT)
    references = gl.zeros([ROWS], gl.float32, PER_ROW)
    sums = thread_sums(nothing)
    k = keys_of(ring.k.index(0).load(K_L), INT8, OPERAND)
    scores = warpgroup_mma(k, q_memory.permute((1, 0)), nothing, is_async=True, use_acc=False)
    v = values_of(ring.v.index(0).load(V_L), INT8, OPERAND)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    place = 0
    for tile in range(first, stop):
        half = tile % 2
        if OF_TOKENS:
            scores *= ring.k_scales.index(place).load(PER_KEY)[:, None]
        if (tile + 1) * KEYS > seen_by_all:
            last = gl.full([ROWS], stop_key - 1, gl.int32, PER_ROW)
            if CAUSAL:
                last = last_memory.load(PER_ROW)
            scores = visible(scores, tile, last)
        scores = scores * row_scale[None, :] - references[None, :]
        # [KEYS]: log2 of what probabilities are multiplied with
        magnitudes = gl.zeros([KEYS], gl.float32, PER_KEY)
        if OF_TOKENS:
            v_scales = ring.v_scales.index(place).load(PER_KEY)
            magnitudes = gl.maximum(magnitude_log2(v_scales), -80.0)
        announce(scores, magnitudes, flags.index(half))
        p = gl.exp2(scores)
        added = sums + thread_sums(p)
        if OF_TOKENS:
            p *= v_scales[:, None]
        p_memory.index(half).store(p.to(gl.float16))
        fence_async_shared()
        async_copy.wait_group(STAGES - 2)
        block_barrier()
        if any_above(flags.index(half)) or tile == first:
            heights = scores + magnitudes[:, None]
            references, sums, acc, move = raised(heights, references, sums, acc, tile == first)
            p = gl.exp2(scores - move[None, :])
            added = sums + thread_sums(p)
            if OF_TOKENS:
                p *= v_scales[:, None]
            p_memory.index(half).store(p.to(gl.float16))
            fence_async_shared()
            block_barrier()
        sums = added
        acc = warpgroup_mma(v, p_memory.index(half), acc, is_async=True)
        copy_tile(ring, place, cache, tile + STAGES, pages, PAGE_SIZE, COPIES)
        pages = load_pages(cache, tile + STAGES + 1, PAGE_SIZE, KEYS, PAGES)
        place = place + 1 if place < STAGES - 1 else 0
        # behind the last tile of the share the place holds an older one, whose products are not used
        k = keys_of(ring.k.index(place).load(K_L), INT8, OPERAND)
        scores = warpgroup_mma(k, q_memory.permute((1, 0)), nothing, is_async=True, use_acc=False)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        v = values_of(ring.v.index(place).load(V_L), INT8, OPERAND)
        scores = warpgroup_mma_wait(0, deps=(scores,))
    async_copy.wait_group(0)

    # [ROWS, WIDTH], [ROWS], [ROWS]
    o = in_order(acc) * v_scale
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    l = gl.convert_layout(gl.sum(gl.sum(sums, 0), 0), OUT_ROWS)
    m = gl.where(l == 0.0, float("-inf"), gl.convert_layout(references, OUT_ROWS))
    start = (gl.program_id(2) * num_heads + head_kv * group_size) * seqlen_q
    rows, found = Rows(count, start, seqlen_q), Found(o, m, l)
    if SPLITS == 1:
        out = Out + batch * o_strides.batch + head_kv.to(gl.int64) * group_size * o_strides.head
        store_result(Output(out, o_strides, Lse, None), found, rows, WIDTH)
    else:
        store_share(Work, found, rows, total_rows, SPLITS)
