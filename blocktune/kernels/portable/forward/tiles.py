"""The tiles of FlashAttention-2 forward: device functions that the pointer and the descriptor kernel share.

A program owns BLOCK_M query rows of one head and visits key tiles of BLOCK_N rows. `source` stands for K or V: a
pointer to the head's first row or, when TMA, a tensor descriptor of the whole [batch, num_heads_kv, seqlen_k, head_dim]
tensor.
"""

import triton
import triton.language as tl

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
def in_elements(stride_b, stride_h, stride_n, UNIT: tl.constexpr):
    """Strides of (batch, head, row) in elements, of those in units (kernels/base/specialize.py): products of which the
    compiler knows that UNIT divides them."""
    if UNIT == 1:
        return stride_b, stride_h, stride_n
    else:
        # 64 bits: what is short in units may be long in elements
        return (
            tl.cast(stride_b, tl.int64) * UNIT,
            tl.cast(stride_h, tl.int64) * UNIT,
            tl.cast(stride_n, tl.int64) * UNIT,
        )


@triton.jit
def locate_tile(pid, num_tiles_m, batch_heads, head_group, CAUSAL: tl.constexpr):
    """The (query tile, batch * num_heads + head) of a program.

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
def key_tiles(row_start, seqlen_k, causal_offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """(full, stop): key tiles 0..full-1 need no mask, full..stop-1 do, and no row sees a later one."""
    if CAUSAL:
        first_row_sees = tl.maximum(0, tl.minimum(seqlen_k, row_start + causal_offset + 1))
        last_row_sees = tl.maximum(0, tl.minimum(seqlen_k, row_start + causal_offset + BLOCK_M))
        return first_row_sees // BLOCK_N, tl.cdiv(last_row_sees, BLOCK_N)
    else:
        return seqlen_k // BLOCK_N, tl.cdiv(seqlen_k, BLOCK_N)


@triton.jit
def load_matrix(
    base, row, stride, num_rows, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CHECK_ROWS: tl.constexpr
):
    """Rows row..row+BLOCK-1 of a [num_rows, DIM] matrix as [BLOCK, WIDTH], zeros outside."""
    rows = row + tl.arange(0, BLOCK)
    columns = tl.arange(0, WIDTH)
    # [BLOCK, WIDTH]
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if CHECK_ROWS and DIM != WIDTH:
        return tl.load(pointers, mask=(rows[:, None] < num_rows) & (columns[None, :] < DIM), other=0.0)
    elif CHECK_ROWS:
        return tl.load(pointers, mask=rows[:, None] < num_rows, other=0.0)
    elif DIM != WIDTH:
        return tl.load(pointers, mask=columns[None, :] < DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_tile(
    source, batch, head, tile, stride, seqlen,
    BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CHECK_ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Tile `tile` of K or V: [BLOCK, WIDTH]. A descriptor fills with zeros outside the tensor by itself."""
    if TMA:
        return tl.reshape(source.load([batch, head, tile * BLOCK, 0]), [BLOCK, WIDTH])
    else:
        return load_matrix(source, tile * BLOCK, stride, seqlen, BLOCK, DIM, WIDTH, CHECK_ROWS)


@triton.jit
def mask_scores(scores, row_start, tile, seqlen_k, causal_offset, CAUSAL: tl.constexpr):
    """scores [BLOCK_M, BLOCK_N] with -inf where the key is past the end or invisible to the query."""
    columns = tile * scores.shape[1] + tl.arange(0, scores.shape[1])
    visible = columns[None, :] < seqlen_k
    if CAUSAL:
        rows = row_start + tl.arange(0, scores.shape[0])
        visible = visible & (columns[None, :] <= rows[:, None] + causal_offset)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def attend_in_order(
    q, k_source, v_source, acc, l_i, m_i, first, stop, row_start, batch, head, stride_kn, stride_vn, seqlen_k,
    causal_offset, scale_log2,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Tiles first..stop-1 one after another: scores, softmax, product with V. Returns acc, l_i, m_i (if EXACT, not
    scaled)."""
    for tile in tl.range(first, stop, num_stages=STAGES, disable_licm=EXACT):  # what is hoisted would be spilled
        # [BLOCK_N, WIDTH]
        k = load_tile(
            k_source, batch, head, tile, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, MASKED and RAGGED, TMA
        )
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            scores = mask_scores(scores, row_start, tile, seqlen_k, causal_offset, CAUSAL)
        if EXACT:
            p, m_i, l_i, factor = exact_step(scores, m_i, l_i, scale_log2)
        else:
            p, m_i, l_i, factor = online_step(scores, m_i, l_i, scale_log2, MASKED)
        # [BLOCK_N, WIDTH_V]
        v = load_tile(
            v_source, batch, head, tile, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, WIDTH_V, MASKED and RAGGED, TMA
        )
        # [BLOCK_M, WIDTH_V]
        acc = tl.dot(p.to(q.dtype), v, acc * factor[:, None], input_precision=PRECISION)
    return acc, l_i, m_i


@triton.jit
def pack(p, dtype: tl.constexpr):
    """Probabilities [BLOCK_M, BLOCK_N] in a 16-bit type, as integers to be carried from one iteration to the next.

    A loop-carried operand of a product would travel through shared memory; one that is cast on arrival stays in
    registers.
    """
    return p.to(dtype).to(tl.int16, bitcast=True)


@triton.jit
def unpack(carried, dtype: tl.constexpr):
    """The probabilities that `pack` made."""
    return carried.to(dtype, bitcast=True)


if triton.knobs.runtime.interpret:

    @triton.jit
    def await_product(acc):
        """acc itself: the interpreter leaves nothing in flight, and knows no inline assembly."""
        return acc
else:

    @triton.jit
    def await_product(acc):
        """acc, used in this iteration by no instruction at all.

        Without a use Triton leaves the product in flight while its operand registers are written again, and the result
        is wrong (seen with Triton 3.6 and ptxas 12.8 on sm_90).
        """
        return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def attend_ahead(
    q, k_source, v_source, acc, l_i, m_i, full, batch, head, stride_kn, stride_vn, seqlen_k, scale_log2,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    FIXED: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Tiles full-1 down to 0, none masked, with the scores of a tile computed ahead of the product of the one before.

    The softmax of a tile then depends on nothing that the product with V of the previous tile computes, so that the
    assembler places the exponentials between the tensor-core instructions (FlashAttention-3, arXiv 2407.08608, section
    3.2, reached here without a wait that Triton cannot express). full >= 1. Returns acc, l_i, m_i.
    """
    k = load_tile(k_source, batch, head, full - 1, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, False, TMA)
    scores = tl.dot(q, k.T)
    m_i = tl.maximum(no_maximum(scores.shape[0]), tl.max(scores, 1) * scale_log2)
    p, l_i = fixed_step(scores, m_i, l_i, scale_log2)
    carried = pack(p, q.dtype)
    for step in tl.range(1, full, num_stages=STAGES):
        tile = full - 1 - step
        k = load_tile(k_source, batch, head, tile, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, False, TMA)
        v = load_tile(v_source, batch, head, tile + 1, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, WIDTH_V, False, TMA)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, k.T)
        # [BLOCK_M, WIDTH_V]
        acc = tl.dot(unpack(carried, q.dtype), v, acc)
        if FIXED:
            acc = await_product(acc)
            p, l_i = fixed_step(scores, m_i, l_i, scale_log2)
        else:
            p, m_i, l_i, factor = online_step(scores, m_i, l_i, scale_log2, False)
            acc = acc * factor[:, None]
        carried = pack(p, q.dtype)
    v = load_tile(v_source, batch, head, 0, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, WIDTH_V, False, TMA)
    return tl.dot(unpack(carried, q.dtype), v, acc), l_i, m_i


@triton.jit
def attend(
    q, k_source, v_source, row_start, batch, head, stride_kn, stride_vn, seqlen_k, causal_offset, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, SCHEDULE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """All visible key tiles for q [BLOCK_M, WIDTH]: acc [BLOCK_M, WIDTH_V] not yet divided, l_i and m_i [BLOCK_M]."""
    full, stop = key_tiles(row_start, seqlen_k, causal_offset, BLOCK_M, BLOCK_N, CAUSAL)
    acc = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = no_maximum(BLOCK_M)
    if SCHEDULE == 0:
        acc, l_i, m_i = attend_in_order(
            q, k_source, v_source, acc, l_i, m_i, 0, full, row_start, batch, head, stride_kn, stride_vn, seqlen_k,
            causal_offset, scale_log2, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, False, CAUSAL, RAGGED, False,
            STAGES, PRECISION, TMA,
        )  # fmt: skip
    elif full > 0:
        acc, l_i, m_i = attend_ahead(
            q, k_source, v_source, acc, l_i, m_i, full, batch, head, stride_kn, stride_vn, seqlen_k, scale_log2,
            BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, SCHEDULE == 2, STAGES, TMA,
        )  # fmt: skip
    if CAUSAL or RAGGED:
        acc, l_i, m_i = attend_in_order(
            q, k_source, v_source, acc, l_i, m_i, full, stop, row_start, batch, head, stride_kn, stride_vn, seqlen_k,
            causal_offset, scale_log2, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, True, CAUSAL, RAGGED, False, 1,
            PRECISION, TMA,
        )  # fmt: skip
    sound = is_exact(m_i)
    if SCHEDULE == 2:
        sound = sound & is_sound(l_i, acc)
    if not sound:
        acc, l_i, m_i = attend_in_order(
            q, k_source, v_source, tl.zeros_like(acc), tl.zeros_like(l_i), no_maximum(BLOCK_M), 0, stop, row_start,
            batch, head, stride_kn, stride_vn, seqlen_k, causal_offset, scale_log2,
            BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, True, CAUSAL, RAGGED, True, 1, PRECISION, TMA,
        )  # fmt: skip
        m_i = m_i * scale_log2
    return acc, l_i, m_i


@triton.jit
def store_rows(
    acc, l_i, m_i, out_base, lse_base, row_start, stride_om, seqlen_q,
    HEAD_DIM_V: tl.constexpr, ADDITIVE: tl.constexpr = False,
):  # fmt: skip
    """Divide acc [BLOCK_M, WIDTH_V] by the row sums and write it, with the natural log-sum-exp unless lse_base is None.

    A row that saw no key has a sum of zero: its output is 0 and its log-sum-exp -inf. ADDITIVE: a mask may have hidden
    all keys of a row with finite numbers (masked_rows.py).
    """
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
