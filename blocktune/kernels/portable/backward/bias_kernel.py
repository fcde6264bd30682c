"""The gradient of an additive mask: a jitted function that owns tiles of it.

The gradient of a score is ds = p * (dout v^T - delta), as in gradients.py. That of an element of the mask is the sum of
ds over all pairs that read it. A program adds them up in registers, one after the other, and writes its tile once: no
other program writes there, and every run gives the same bits.
"""

import triton
import triton.language as tl

from blocktune.kernels.base.feature_arguments import RUN_TIME_INTEGERS
from blocktune.kernels.portable.backward.gradients import probabilities
from blocktune.kernels.portable.backward.sparse_gradients import load_row_values
from blocktune.kernels.portable.forward.arguments import Dropout, Matrix, Scoring, SequenceBounds
from blocktune.kernels.portable.forward.scores import keep_tile, tile_range
from blocktune.kernels.portable.forward.tiles import in_elements, load_matrix


@triton.jit(do_not_specialize=(*RUN_TIME_INTEGERS, "own_heads", "batches", "heads", "parts"))
def bias_kernel(
    Q, K, V, Dout, Lse, Delta, Dmask, Mask, Slopes, scale, softcap, kept_share, seed_lo, seed_hi, offset, threshold,
    stride_mb, stride_mh, stride_mm, stride_mn, stride_sb, stride_sh,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, diagonal,
    window_left, window_right, own_heads, batches, heads, parts, OPTIONS: tl.constexpr, ONE_ROW: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Compute one tile of Dmask [parts, slices, seqlen_q, seqlen_k] contiguous, or of its one row if ONE_ROW.

    A slice is what the mask has for some batch entry and head: own_heads of them belong to an entry. Each is read by
    `batches` entries and `heads` heads (one of the two numbers of either pair is 1), and if ONE_ROW by all query tiles.
    A part has a share of these. Other arguments are those of `queries_kernel`.
    """
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    PRECISION: tl.constexpr = OPTIONS.PRECISION
    q_strides = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    k_strides = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    v_strides = in_elements(stride_vb, stride_vh, stride_vn, UNIT)
    g_strides = in_elements(stride_gb, stride_gh, stride_gm, UNIT)
    tiles_n, tiles_m = tl.cdiv(seqlen_k, BLOCK_N), tl.cdiv(seqlen_q, BLOCK_M)
    own_tiles, read_tiles = (1, tiles_m) if ONE_ROW else (tiles_m, 1)
    tile_n = tl.program_id(0) % tiles_n
    own_tile = tl.program_id(0) // tiles_n % own_tiles
    part_slice = tl.program_id(0) // tiles_n // own_tiles
    part, own = part_slice % parts, part_slice // parts
    slices = tl.num_programs(0) // tiles_n // own_tiles // parts
    own_batch, own_head = own // own_heads, own % own_heads
    sequence = SequenceBounds(seqlen_q, seqlen_k, diagonal, window_left, window_right)
    steps = batches * heads * read_tiles
    begin, stop = (
        (steps.to(tl.int64) * part // parts).to(tl.int32),
        (steps.to(tl.int64) * (part + 1) // parts).to(tl.int32),
    )
    if not ONE_ROW:
        first_seen, stop_seen = tile_range(own_tile * BLOCK_M, sequence, OPTIONS)
        stop = tl.where((tile_n >= first_seen) & (tile_n < stop_seen), stop, begin)
    own_mask = Mask + own_batch.to(tl.int64) * stride_mb + own_head.to(tl.int64) * stride_mh
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(begin, stop, num_stages=OPTIONS.STAGES):
        row_start = (step % tiles_m if ONE_ROW else own_tile) * BLOCK_M
        pair = step // read_tiles
        batch, head = (own_batch + pair // heads).to(tl.int64), (own_head + pair % heads).to(tl.int64)
        head_kv = head // group_size
        rows = row_start + tl.arange(0, BLOCK_M)
        queries = Matrix(Q + batch * q_strides.batch + head * q_strides.head, q_strides.row, seqlen_q)
        keys = Matrix(K + batch * k_strides.batch + head_kv * k_strides.head, k_strides.row, seqlen_k)
        values = Matrix(V + batch * v_strides.batch + head_kv * v_strides.head, v_strides.row, seqlen_k)
        douts = Matrix(Dout + batch * g_strides.batch + head * g_strides.head, g_strides.row, seqlen_q)
        # [BLOCK_M, WIDTH], [BLOCK_N, WIDTH]
        q = load_matrix(queries, row_start, BLOCK_M, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, OPTIONS.RAGGED)
        k = load_matrix(keys, tile_n * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, OPTIONS.RAGGED)
        slope = tl.load(Slopes + batch * stride_sb + head * stride_sh) if OPTIONS.ALIBI else 0.0
        scoring = Scoring(scale, softcap, slope, own_mask, stride_mm, stride_mn)
        row_values = (batch * num_heads + head) * seqlen_q
        lse = load_row_values(Lse + row_values, rows, seqlen_q, float("inf"), OPTIONS.RAGGED)
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
        # [BLOCK_M, BLOCK_N]
        qk = tl.dot(q, k.T, input_precision=PRECISION)
        p, _ = probabilities(
            qk, lse[:, None], rows[:, None], columns[None, :], scoring, sequence, True, OPTIONS.RAGGED, False, OPTIONS
        )
        # [BLOCK_M, WIDTH_V], [BLOCK_N, WIDTH_V]
        dout = load_matrix(douts, row_start, BLOCK_M, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, OPTIONS.RAGGED)
        v = load_matrix(values, tile_n * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, OPTIONS.RAGGED)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        if OPTIONS.DROPOUT:
            dropout = Dropout(batch * num_heads + head, kept_share, seed_lo, seed_hi, offset, threshold)
            keep = keep_tile(rows[:, None], tile_n * BLOCK_N, dropout, BLOCK_N, False)
            dp = tl.where(keep, dp * (1.0 / kept_share), 0.0)
        delta = load_row_values(Delta + row_values, rows, seqlen_q, 0.0, OPTIONS.RAGGED)
        # a hidden pair adds nothing, whatever its value or a row past the end makes of dp
        total += tl.where(p == 0.0, 0.0, p * (dp - delta[:, None]))
    target = Dmask + (part.to(tl.int64) * slices + own) * (seqlen_k if ONE_ROW else seqlen_q.to(tl.int64) * seqlen_k)
    if ONE_ROW:
        tl.store(target + columns, tl.sum(total, 0).to(Dmask.dtype.element_ty), mask=columns < seqlen_k)
    else:
        rows = own_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        pointers = target + rows.to(tl.int64)[:, None] * seqlen_k + columns[None, :]
        inside = (rows[:, None] < seqlen_q) & (columns[None, :] < seqlen_k)
        tl.store(pointers, total.to(Dmask.dtype.element_ty), mask=inside)
