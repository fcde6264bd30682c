"""One step of the Hopper attention forward, in Gluon: which keys it sees, its copies, products and softmax.

Tiles of shared memory are a tuple: (tiles [count, rows, width],), or where the width is no power of two (96 and 192),
but three panels of W columns, (tiles [count, rows, 2 W], tiles [count, rows, W]): products take the first two panels
together and then the third. Copies move one panel at a time; a swizzle is as wide as one, so that a tile [rows, 2 W]
lies in memory as two of them do.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from blocktune.kernels.hopper.common.device_functions import (
    advance,
    as_block,
    copy_in,
    copy_out,
    pin,
    reinterpret,
    tanh,
)
from blocktune.kernels.hopper.common.rows import times_factor
from blocktune.kernels.hopper.forward.biases import (
    alibi_of_block,
    begins_with_alibi,
    biased,
    dropped,
    kept_of_block,
    loaded_of_block,
)
from blocktune.kernels.hopper.forward.row_maxima import softmax

# ---- where the keys are


@gluon.jit
def sequence(batch, right, left, cu_q, cu_k, LOWER_RIGHT: gl.constexpr):
    """Of a packed sequence: where its queries and keys begin, how many there are, and the bounds of the keys that query
    0 sees; from the lower right they are relative to the distance of the last query and the last key."""
    begin_q = gl.load(cu_q + batch)
    begin_k = gl.load(cu_k + batch)
    length_q = gl.load(cu_q + batch + 1) - begin_q
    length_k = gl.load(cu_k + batch + 1) - begin_k
    if LOWER_RIGHT:
        right += length_k - length_q
        left += length_k - length_q
    return begin_q, begin_k, length_q, length_k, right, left


@gluon.jit
def key_range(
    row, seqlen_q, seqlen_k, right, left, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, RIGHT: gl.constexpr,
    LEFT: gl.constexpr,
):  # fmt: skip
    """(first, last): the blocks of keys that queries row .. row + ROWS - 1 walk along, from the last to the first.

    There is always one, if need be one that nobody sees: no tile is without a step, and the pipeline has no exception.
    """
    high = seqlen_k
    if RIGHT:
        high = gl.minimum(high, gl.minimum(row + ROWS, seqlen_q) + right)
    last = gl.maximum(high - 1, 0) // BLOCK_N
    first = last * 0
    if LEFT:
        first = gl.minimum(gl.maximum(row + left, 0) // BLOCK_N, last)
    return first, last


@gluon.jit
def row_bounds(
    row, seqlen_k, right, left, ROWS: gl.constexpr, RAGGED: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr,
    ROW_S: gl.constexpr,
):  # fmt: skip
    """(last, first): the keys that queries row .. row + ROWS - 1 see, each its own; first only counts if LEFT."""
    # [ROWS]
    rows = row + gl.arange(0, ROWS, ROW_S)
    last = rows + right
    if not RIGHT:
        last = gl.full([ROWS], seqlen_k - 1, gl.int32, ROW_S)
    elif RAGGED:
        last = gl.minimum(last, seqlen_k - 1)
    return last, rows + left


@gluon.jit
def hide(qk, last, first, column, BOUND: gl.constexpr, LEFT: gl.constexpr, S_L: gl.constexpr):
    """The scores of the keys from `column` on, -inf where the query does not see the key. BOUND: `last` says something
    (of full blocks without a right bound it does not)."""
    # [BLOCK_N]
    columns = column + gl.arange(0, qk.shape[1], gl.SliceLayout(0, S_L))
    # [64, BLOCK_N]
    if BOUND:
        qk = gl.where(last[:, None] >= columns[None, :], qk, float("-inf"))
    if LEFT:
        qk = gl.where(first[:, None] <= columns[None, :], qk, float("-inf"))
    return qk


# ---- copies


@gluon.jit
def panel(memory, place, PART: gl.constexpr, PANELS: gl.constexpr):
    """What one copy moves of tile `place`."""
    if PANELS == 1:
        return memory[0].index(place)
    elif PART == 2:
        return memory[1].index(place)
    else:
        both = memory[0].index(place)
        ROWS: gl.constexpr = both.shape[0]
        W: gl.constexpr = both.shape[1] // 2
        return reinterpret(both, both.dtype, [2, ROWS, W], both.layout).index(PART)


@gluon.jit
def load_rows(
    desc, batch, head, row, begin, length, barrier, memory, place, PANELS: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Copies a tile of a head from `row` on into tile `place` of shared memory; zeros beyond the end.

    The end of a packed sequence is inside the tensor. Its descriptor (`describe_packed` in
    kernels/hopper/common/descriptors.py) has a dimension of 2^30 rows that ends where the sequence ends, so that the
    copy engine clips there, too.
    """
    W: gl.constexpr = desc.block_type.shape[len(desc.block_type.shape) - 1]
    for part in gl.static_range(PANELS):
        block = as_block(desc, panel(memory, place, part, PANELS))
        if VARLEN:
            copy_in(desc, [1 << 30, begin + length, head, (1 << 30) - length + row, part * W], barrier, block)
        else:
            copy_in(desc, [batch, head, row, part * W], barrier, block)


@gluon.jit
def store_rows(
    desc, batch, head, row, begin, length, memory, place, PANELS: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """The way back of `load_rows`: what lies beyond the end is not written."""
    W: gl.constexpr = desc.block_type.shape[len(desc.block_type.shape) - 1]
    for part in gl.static_range(PANELS):
        store_panel(desc, batch, head, row, begin, length, part * W, panel(memory, place, part, PANELS), VARLEN)


@gluon.jit
def store_panel(desc, batch, head, row, begin, length, column, tile, VARLEN: gl.constexpr):
    """Copies a tile of shared memory to a head's rows from `row` and columns from `column` on."""
    if VARLEN:
        copy_out(desc, [1 << 30, begin + length, head, (1 << 30) - length + row, column], as_block(desc, tile))
    else:
        copy_out(desc, [batch, head, row, column], as_block(desc, tile))


@gluon.jit
def release(memory, slot, SPLIT_RELEASE: gl.constexpr):
    """Gives a whole slot back."""
    mbarrier.arrive(memory.k_empty.index(slot), count=1)
    if SPLIT_RELEASE:
        mbarrier.arrive(memory.v_empty.index(slot), count=1)


@gluon.jit
def values_read(memory, slot, SPLIT_RELEASE: gl.constexpr):
    """Gives a slot back whose V is read: all of it, or with separate releases what its K left."""
    if SPLIT_RELEASE:
        mbarrier.arrive(memory.v_empty.index(slot), count=1)
    else:
        mbarrier.arrive(memory.k_empty.index(slot), count=1)


@gluon.jit
def hand_back(count, memory, slot, phase, STAGES: gl.constexpr, SPLIT_RELEASE: gl.constexpr):
    """Gives slots back unused. Each is awaited first: an arrival ahead of its turn would count for the slot's use
    before, which other warpgroups may not have finished."""
    for i in range(count):
        mbarrier.wait(memory.full.index(slot), phase)
        release(memory, slot, SPLIT_RELEASE)
        slot, phase = advance(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def passed_over(blocks, ONE_RING: gl.constexpr):
    """How many slots are ahead of the first step, or behind the last one, of a warpgroup that sees fewer blocks than
    its tile. In one ring, one tile of these blocks is among its own: it is given back there."""
    if ONE_RING:
        return gl.maximum(2 * blocks - 1, 0)
    else:
        return blocks


# ---- products


@gluon.jit
def columns_of(memory, PART: gl.constexpr, COLUMNS: gl.constexpr):
    """Part PART of a tile [rows, width] that is cut into parts of COLUMNS: it lies in memory as these do."""
    ROWS: gl.constexpr = memory.shape[0]
    PARTS: gl.constexpr = memory.shape[1] // COLUMNS
    if PARTS == 1:
        return memory
    else:
        return reinterpret(memory, memory.dtype, [PARTS, ROWS, COLUMNS], memory.layout).index(PART)


@gluon.jit
def queries(q_smem, place, COLUMNS: gl.constexpr, PANELS: gl.constexpr, S_L: gl.constexpr):
    """The operands of the first product, one for every part of a tile: the first COLUMNS columns of a warpgroup's
    queries in registers, which leaves shared memory to others, the rest where it is."""
    Q_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    first = q_smem[0].index(place)
    WIDTH: gl.constexpr = first.shape[1]
    if COLUMNS > 0:
        first = columns_of(first, 0, COLUMNS if COLUMNS < WIDTH else WIDTH).load(Q_L)
    if PANELS == 1:
        return (first,)
    else:
        rest = q_smem[1].index(place)
        if COLUMNS > WIDTH:
            rest = rest.load(Q_L)
        return first, rest


@gluon.jit
def scores(q, q_smem, q_place, k_smem, slot, acc, UPON: gl.constexpr, PANELS: gl.constexpr):
    """Issues Q K^T [64, BLOCK_N], upon an accumulator or (not UPON) alone. q: what `queries` gives."""
    q_tile, k_tile = q_smem[0].index(q_place), k_smem[0].index(slot)
    COLUMNS: gl.constexpr = q[0].shape[1]
    qk = warpgroup_mma(q[0], columns_of(k_tile, 0, COLUMNS).permute((1, 0)), acc, use_acc=UPON, is_async=True)
    for part in gl.static_range(1, q_tile.shape[1] // COLUMNS):
        k_part = columns_of(k_tile, part, COLUMNS).permute((1, 0))
        qk = warpgroup_mma(columns_of(q_tile, part, COLUMNS), k_part, qk, is_async=True)
    if PANELS == 3:
        qk = warpgroup_mma(q[1], k_smem[1].index(slot).permute((1, 0)), qk, is_async=True)
    return qk


@gluon.jit
def biased_scores(memory, q, place, slot, column, no_acc, bias, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Issues the scores [64, BLOCK_N] of the keys from `column` on, upon ALiBi where that is possible."""
    biases, tile_biases, row_start, moved, _ = bias
    if begins_with_alibi(OPTIONS):
        acc = alibi_of_block(column, row_start, moved, no_acc, biases, tile_biases, OPTIONS, S_L)
        return scores(q, memory.q, place, memory.k, slot, acc, True, OPTIONS.QK_PANELS)
    else:
        return scores(q, memory.q, place, memory.k, slot, no_acc, False, OPTIONS.QK_PANELS)


@gluon.jit
def no_sums(ROWS: gl.constexpr, PANELS: gl.constexpr, W: gl.constexpr, O_L: gl.constexpr, REST_L: gl.constexpr):
    """The accumulators of the second product: one, or two where V has three panels."""
    if PANELS == 1:
        return (gl.zeros([ROWS, W], gl.float32, O_L),)
    else:
        return gl.zeros([ROWS, 2 * W], gl.float32, O_L), gl.zeros([ROWS, W], gl.float32, REST_L)


@gluon.jit
def rescaled(acc, factor, PANELS: gl.constexpr, O_L: gl.constexpr, REST_L: gl.constexpr):
    """The accumulators times the factors of their rows [64, 4]."""
    if PANELS == 1:
        return (times_factor(acc[0], factor, O_L),)
    else:
        return times_factor(acc[0], factor, O_L), times_factor(acc[1], factor, REST_L)


@gluon.jit
def add_product(p, v_smem, slot, acc, PANELS: gl.constexpr, REST_P: gl.constexpr):
    """Issues acc += P V."""
    if PANELS == 1:
        return (warpgroup_mma(p, v_smem[0].index(slot), acc[0], is_async=True),)
    else:
        first = warpgroup_mma(p, v_smem[0].index(slot), acc[0], is_async=True)
        return first, warpgroup_mma(gl.convert_layout(p, REST_P), v_smem[1].index(slot), acc[1], is_async=True)


@gluon.jit
def finished(acc, PANELS: gl.constexpr):
    """The accumulators, once no product is in flight."""
    if PANELS == 1:
        return (warpgroup_mma_wait(0, deps=(acc[0],)),)
    else:
        first, rest = warpgroup_mma_wait(0, deps=(acc[0], acc[1]))
        return first, rest


@gluon.jit
def finished_and_kept(acc, p, PANELS: gl.constexpr):
    """`finished`, with P named in the wait, which changes nothing but ptxas' schedule."""
    if PANELS == 1:
        first, p = warpgroup_mma_wait(0, deps=(acc[0], p))
        return (first,)
    else:
        first, rest, p = warpgroup_mma_wait(0, deps=(acc[0], acc[1], p))
        return first, rest


@gluon.jit
def columns(x, W: gl.constexpr):
    """The columns of x, W by W, in the registers where they are."""
    if x.shape[1] == W:
        return (x,)
    elif x.shape[1] == 2 * W:
        left, right = halves(x)
        return left, right
    else:
        left, right = halves(x)
        first, second = halves(left)
        third, fourth = halves(right)
        return first, second, third, fourth


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


# ---- softmax


@gluon.jit
def step(
    memory, q, q_place, state, slot, phase, previous, column, mask, scales, bend, no_acc, bias,
    OPTIONS: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr, REST_L: gl.constexpr,
):  # fmt: skip
    """The scores of one block beside the second product of the block before, and its softmax beside that product.

    state: accumulators, probabilities (already converted if EARLY_P), factor of the accumulators, running maximum with
    its scale, and sums of the block before. mask: each row's last and first key, and between which columns a block is
    wholly visible. bias: `Biases`, `biases_of_tile`, the first row, the distance of the tile's diagonal from that of
    all, and batch * num_heads + head.
    """
    V_PANELS: gl.constexpr = OPTIONS.V_PANELS
    acc, p, factor, top, sums = state
    dtype: gl.constexpr = memory.q[0].dtype
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    REST_P: gl.constexpr = gl.DotOperandLayout(0, REST_L, 2)
    biases, tile_biases, row_start, moved, batch_head = bias
    loaded = loaded_of_block(tile_biases, column, OPTIONS, S_L)
    # [64, BLOCK_N]
    qk_t = biased_scores(memory, q, q_place, slot, column, no_acc, bias, OPTIONS, S_L)
    # [64, head_dim_v], beside the scores: rescale the accumulator, convert P, give the previous slot back
    acc = rescaled(acc, pin(factor), V_PANELS, O_L, REST_L)
    if OPTIONS.EARLY_P:
        p_low = p
    else:
        p_low = gl.convert_layout(pin(p).to(dtype), P_L)
    values_read(memory, previous, OPTIONS.SPLIT_RELEASE)
    v_slot = slot + 0
    if OPTIONS.ONE_RING:
        v_slot, phase = advance(slot, phase, OPTIONS.STAGES)
        mbarrier.wait(memory.full.index(v_slot), phase)
    acc_t = add_product(p_low, memory.v, v_slot, acc, V_PANELS, REST_P)
    kept = kept_of_block(biases, tile_biases, row_start, column, batch_head, OPTIONS)
    # [64, BLOCK_N]: softmax, while the second product runs
    qk = warpgroup_mma_wait(1 if V_PANELS == 1 else 2, deps=(qk_t,))
    if OPTIONS.SPLIT_RELEASE or OPTIONS.ONE_RING:
        mbarrier.arrive(memory.k_empty.index(slot), count=1)
    if OPTIONS.SOFTCAP:
        qk = tanh(qk * bend)
    qk = biased(qk, column, row_start, moved, loaded, no_acc, biases, tile_biases, OPTIONS, S_L)
    if (OPTIONS.RIGHT or OPTIONS.LEFT) and not OPTIONS.ALIGNED:
        last, first, highest, lowest = mask
        if (column > highest) | (column < lowest):
            qk = hide(qk, last, first, column, OPTIONS.RAGGED or OPTIONS.RIGHT, OPTIONS.LEFT, S_L)
    # [64, BLOCK_N], its sums [64, 4]
    p, top, factor, added = softmax(qk, top, scales, S_L)
    p = dropped(p, kept, OPTIONS.DROPOUT, S_L)
    sums = sums * factor + added
    previous = v_slot + 0
    slot, phase = advance(v_slot, phase, OPTIONS.STAGES)
    # operands of the next step; also the branch that keeps the wait for the product below the softmax
    mbarrier.wait(memory.full.index(slot), phase)
    if OPTIONS.KEEP_P:
        acc = finished_and_kept(acc_t, p_low, V_PANELS)
    else:
        acc = finished(acc_t, V_PANELS)
    if OPTIONS.EARLY_P:
        p = gl.convert_layout(pin(p).to(dtype), P_L)
    return (acc, p, factor, top, sums), slot, phase, previous
