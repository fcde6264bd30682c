"""The tiles of FlashAttention-2 forward: device functions that the pointer and the descriptor kernel share.

A program owns BLOCK_M query rows of one head and visits key tiles of BLOCK_N rows.
"""

import triton
import triton.language as tl

from blocktune.kernels.portable.forward.arguments import SoftmaxState, Strides
from blocktune.kernels.portable.forward.masked_rows import log_sum_exp
from blocktune.kernels.portable.forward.softmax import (
    exact_step,
    fixed_step,
    is_exact,
    is_sound,
    no_maximum,
    online_step,
)

# No module-level tl.constexpr here: Triton 3.6 hashes a function differently when such a global was already merged by
# another kernel's hash, and code that was compiled ahead would not be found.


@triton.jit
def in_elements(batch, head, row, UNIT: tl.constexpr):
    """Return the `Strides` in elements, of those in units (kernels/base/specialize.py): products of which the compiler
    knows that UNIT divides them."""
    if UNIT == 1:
        return Strides(batch, head, row)
    else:
        # 64 bits: what is short in units may be long in elements
        return Strides(tl.cast(batch, tl.int64) * UNIT, tl.cast(head, tl.int64) * UNIT, tl.cast(row, tl.int64) * UNIT)


@triton.jit
def locate_tile(pid, num_tiles_m, batch_heads, head_group, CAUSAL: tl.constexpr):
    """Return the (query tile, batch * num_heads + head) of a program.

    Full attention: the query tiles of a head follow each other, so that its keys stay in L2. Causal: inside a group of
    heads whose keys fit in L2 together the longest tiles start first, which keeps the last wave short.
    """
    if CAUSAL:
        per_group = num_tiles_m * head_group
        first_head = pid // per_group * head_group
        heads_here = tl.minimum(batch_heads - first_head, head_group)
        rest = pid % per_group
        return num_tiles_m - 1 - rest // heads_here, first_head + rest % heads_here
    else:
        return pid % num_tiles_m, pid // num_tiles_m


@triton.jit
def key_tiles(row_start, sequence, OPTIONS: tl.constexpr):
    """Return (full, stop): key tiles 0..full-1 need no mask, full..stop-1 do, and no row sees a later one."""
    seqlen_k = sequence.seqlen_k
    if OPTIONS.CAUSAL:
        first_row_sees = tl.maximum(0, tl.minimum(seqlen_k, row_start + sequence.diagonal + 1))
        last_row_sees = tl.maximum(0, tl.minimum(seqlen_k, row_start + sequence.diagonal + OPTIONS.BLOCK_M))
        return first_row_sees // OPTIONS.BLOCK_N, tl.cdiv(last_row_sees, OPTIONS.BLOCK_N)
    else:
        return seqlen_k // OPTIONS.BLOCK_N, tl.cdiv(seqlen_k, OPTIONS.BLOCK_N)


@triton.jit
def load_matrix(matrix, row, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """Return rows row..row+BLOCK-1 of a `Matrix` of DIM columns as [BLOCK, WIDTH], zeros outside."""
    rows = row + tl.arange(0, BLOCK)
    columns = tl.arange(0, WIDTH)
    # [BLOCK, WIDTH]
    pointers = matrix.base + rows.to(tl.int64)[:, None] * matrix.stride + columns[None, :]
    if CHECK_ROWS and DIM != WIDTH:
        return tl.load(pointers, mask=(rows[:, None] < matrix.rows) & (columns[None, :] < DIM), other=0.0)
    elif CHECK_ROWS:
        return tl.load(pointers, mask=rows[:, None] < matrix.rows, other=0.0)
    elif DIM != WIDTH:
        return tl.load(pointers, mask=columns[None, :] < DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_tile(
    matrix, keys, tile, DIM: tl.constexpr, WIDTH: tl.constexpr, CHECK_ROWS: tl.constexpr, OPTIONS: tl.constexpr
):
    """Return a tile of K or V, [BLOCK_N, WIDTH]. A descriptor fills with zeros outside the tensor by itself."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    if OPTIONS.TMA:
        return tl.reshape(matrix.base.load([keys.batch, keys.head, tile * BLOCK_N, 0]), [BLOCK_N, WIDTH])
    else:
        return load_matrix(matrix, tile * BLOCK_N, BLOCK_N, DIM, WIDTH, CHECK_ROWS)


@triton.jit
def mask_scores(scores, row_start, tile, seqlen_k, diagonal, CAUSAL: tl.constexpr):
    """Return scores [BLOCK_M, BLOCK_N] with -inf where the key is past the end or invisible to the query."""
    columns = tile * scores.shape[1] + tl.arange(0, scores.shape[1])
    visible = columns[None, :] < seqlen_k
    if CAUSAL:
        rows = row_start + tl.arange(0, scores.shape[0])
        visible = visible & (columns[None, :] <= rows[:, None] + diagonal)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def no_state(OPTIONS: tl.constexpr):
    """Return the `SoftmaxState` of rows that have seen no key."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    WIDTH_V: tl.constexpr = OPTIONS.WIDTH_V
    acc = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)
    return SoftmaxState(acc, tl.zeros([BLOCK_M], tl.float32), no_maximum(BLOCK_M))


@triton.jit
def attend_in_order(
    q, keys, state, first, stop, row_start, sequence, scale_log2,
    MASKED: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Attend to tiles first..stop-1 one after another: scores, softmax, product with V. Return the `SoftmaxState`,
    whose maxima are not scaled if EXACT."""
    acc, l_i, m_i = state
    for tile in tl.range(first, stop, num_stages=STAGES, disable_licm=EXACT):  # what is hoisted would be spilled
        # [BLOCK_N, WIDTH]
        k = load_tile(keys.k, keys, tile, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, MASKED and OPTIONS.RAGGED, OPTIONS)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, k.T, input_precision=OPTIONS.PRECISION)
        if MASKED:
            scores = mask_scores(scores, row_start, tile, sequence.seqlen_k, sequence.diagonal, OPTIONS.CAUSAL)
        if EXACT:
            p, m_i, l_i, factor = exact_step(scores, m_i, l_i, scale_log2)
        else:
            p, m_i, l_i, factor = online_step(scores, m_i, l_i, scale_log2, MASKED)
        # [BLOCK_N, WIDTH_V]
        v = load_tile(keys.v, keys, tile, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, MASKED and OPTIONS.RAGGED, OPTIONS)
        # [BLOCK_M, WIDTH_V]
        acc = tl.dot(p.to(q.dtype), v, acc * factor[:, None], input_precision=OPTIONS.PRECISION)
    return SoftmaxState(acc, l_i, m_i)


@triton.jit
def pack(p, dtype: tl.constexpr):
    """Pack probabilities [BLOCK_M, BLOCK_N] in a 16-bit type, as integers to be carried from one iteration to the next.

    A loop-carried operand of a product would travel through shared memory; one that is cast on arrival stays in
    registers.
    """
    return p.to(dtype).to(tl.int16, bitcast=True)


@triton.jit
def unpack(carried, dtype: tl.constexpr):
    """Unpack the probabilities that `pack` made."""
    return carried.to(dtype, bitcast=True)


if triton.knobs.runtime.interpret:

    @triton.jit
    def await_product(acc):
        """Return acc itself: the interpreter leaves nothing in flight, and knows no inline assembly."""
        return acc
else:

    @triton.jit
    def await_product(acc):
        """Return acc, used in this iteration by no instruction at all.

        Without a use Triton leaves the product in flight while its operand registers are written again, and the result
        is wrong (seen with Triton 3.6 and ptxas 12.8 on sm_90).
        """
        return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def attend_ahead(q, keys, state, full, scale_log2, OPTIONS: tl.constexpr):
    """Attend to tiles full-1 down to 0, none masked, with the scores of a tile computed ahead of the product of the one
    before.

    The softmax of a tile then depends on nothing that the product with V of the previous tile computes, so that the
    assembler places the exponentials between the tensor-core instructions (FlashAttention-3, arXiv 2407.08608, section
    3.2, reached here without a wait that Triton cannot express). full >= 1.
    """
    k = load_tile(keys.k, keys, full - 1, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, False, OPTIONS)
    scores = tl.dot(q, k.T)
    m_i = tl.maximum(no_maximum(scores.shape[0]), tl.max(scores, 1) * scale_log2)
    p, l_i = fixed_step(scores, m_i, state.l_i, scale_log2)
    acc = state.acc
    carried = pack(p, q.dtype)
    for step in tl.range(1, full, num_stages=OPTIONS.STAGES):
        tile = full - 1 - step
        k = load_tile(keys.k, keys, tile, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, False, OPTIONS)
        v = load_tile(keys.v, keys, tile + 1, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, False, OPTIONS)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, k.T)
        # [BLOCK_M, WIDTH_V]
        acc = tl.dot(unpack(carried, q.dtype), v, acc)
        if OPTIONS.SCHEDULE == 2:
            acc = await_product(acc)
            p, l_i = fixed_step(scores, m_i, l_i, scale_log2)
        else:
            p, m_i, l_i, factor = online_step(scores, m_i, l_i, scale_log2, False)
            acc = acc * factor[:, None]
        carried = pack(p, q.dtype)
    v = load_tile(keys.v, keys, 0, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, False, OPTIONS)
    return SoftmaxState(tl.dot(unpack(carried, q.dtype), v, acc), l_i, m_i)


@triton.jit
def attend(q, keys, row_start, sequence, scale_log2, OPTIONS: tl.constexpr):
    """Attend to all visible key tiles with q [BLOCK_M, WIDTH], and return the `SoftmaxState`."""
    full, stop = key_tiles(row_start, sequence, OPTIONS)
    state = no_state(OPTIONS)
    if OPTIONS.SCHEDULE == 0:
        state = attend_in_order(
            q, keys, state, 0, full, row_start, sequence, scale_log2, False, False, OPTIONS.STAGES, OPTIONS
        )
    elif full > 0:
        state = attend_ahead(q, keys, state, full, scale_log2, OPTIONS)
    if OPTIONS.CAUSAL or OPTIONS.RAGGED:
        state = attend_in_order(q, keys, state, full, stop, row_start, sequence, scale_log2, True, False, 1, OPTIONS)
    sound = is_exact(state.m_i)
    if OPTIONS.SCHEDULE == 2:
        sound = sound & is_sound(state.l_i, state.acc)
    if not sound:
        state = attend_in_order(
            q, keys, no_state(OPTIONS), 0, stop, row_start, sequence, scale_log2, True, True, 1, OPTIONS
        )
        state = SoftmaxState(state.acc, state.l_i, state.m_i * scale_log2)
    return state


@triton.jit
def store_rows(
    state, out_base, lse_base, row_start, stride_om, seqlen_q, HEAD_DIM_V: tl.constexpr, ADDITIVE: tl.constexpr = False
):
    """Divide acc [BLOCK_M, WIDTH_V] by the row sums and write it, with the natural log-sum-exp unless lse_base is None.

    A row that saw no key has a sum of zero: its output is 0 and its log-sum-exp -inf. ADDITIVE: a mask may have hidden
    all keys of a row with finite numbers (masked_rows.py).
    """
    acc, l_i, m_i = state
    rows = row_start + tl.arange(0, acc.shape[0])
    columns = tl.arange(0, acc.shape[1])
    ln_2: tl.constexpr = 0.6931471805599453
    sums = tl.where(l_i == 0.0, 1.0, l_i)
    if lse_base is not None:
        lse = log_sum_exp(m_i, sums) if ADDITIVE else (m_i + tl.log2(sums)) * ln_2
        tl.store(lse_base + rows, tl.where(l_i == 0.0, float("-inf"), lse), mask=rows < seqlen_q)
    pointers = out_base + rows.to(tl.int64)[:, None] * stride_om + columns[None, :]
    inside = (rows[:, None] < seqlen_q) & (columns[None, :] < HEAD_DIM_V)
    tl.store(pointers, (acc / sums[:, None]).to(out_base.dtype.element_ty), mask=inside)
