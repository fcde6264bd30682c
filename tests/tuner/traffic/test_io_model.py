"""Bytes of device memory: counted pair by pair, growing as Theorem 2 says, and refusing what does not fit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.traffic.model import (
    Traffic,
    score_matrix_bytes,
    standard_memory_bytes,
    standard_memory_problem,
    standard_traffic,
    v1_traffic,
    v2_traffic,
)

pytestmark = pytest.mark.triton_free

MIB, GIB = 1 << 20, 1 << 30


def shape(seqlen: int = 4096, head_dim: int = 64, causal: Causal = Causal.NONE, **sizes: int) -> AttentionShape:
    """One head of bfloat16 unless sizes say otherwise."""
    return replace(complete_shape(seqlen, head_dim, batch=1, heads=1, causal=causal), **sizes)


SHAPES = st.builds(
    lambda queries, keys, causal, group: AttentionShape(
        batch=2,
        num_heads=2 * group,
        num_heads_kv=2,
        seqlen_q=queries,
        seqlen_k=keys,
        head_dim=64,
        head_dim_v=32,
        causal=causal,
    ),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from(Causal),
    st.integers(1, 4),
)
BLOCKS = st.sampled_from([16, 32, 64, 128])


def visible_tiles(problem: AttentionShape, block_m: int, block_n: int) -> list[tuple[range, range]]:
    """The (query rows, key rows) of every tile of one head that a kernel must load, found by looking at the mask. Rows
    past the last query are computed too, as the kernels do."""
    found = []
    for row in range(0, problem.seqlen_q, block_m):
        for column in range(0, problem.seqlen_k, block_n):
            if problem.causal is Causal.NONE or column <= row + block_m - 1 + problem.causal_offset:
                rows = range(row, min(row + block_m, problem.seqlen_q))
                found.append((rows, range(column, min(column + block_n, problem.seqlen_k))))
    return found


@settings(max_examples=60, deadline=None)
@given(SHAPES, BLOCKS, BLOCKS)
def test_v2_reads_the_keys_of_every_tile_it_visits(problem: AttentionShape, block_m: int, block_n: int) -> None:
    tiles = visible_tiles(problem, block_m, block_n)
    traffic = v2_traffic(problem, block_m, block_n, lse=True)
    heads = problem.batch * problem.num_heads
    assert traffic.k_read == heads * sum(len(keys) for _, keys in tiles) * 64 * 2
    assert traffic.v_read == traffic.k_read // 2
    assert traffic.q_read == heads * problem.seqlen_q * 64 * 2
    assert traffic.o_written == traffic.q_read // 2
    assert traffic.lse_written == heads * problem.seqlen_q * 4


@settings(max_examples=60, deadline=None)
@given(SHAPES, BLOCKS, BLOCKS)
def test_perfect_l2_reads_every_visible_key_of_a_group_once(
    problem: AttentionShape, block_m: int, block_n: int
) -> None:
    keys = {key for _, columns in visible_tiles(problem, block_m, block_n) for key in columns}
    cached = v2_traffic(problem, block_m, block_n, perfect_l2=True)
    assert cached.k_read == problem.batch * problem.num_heads_kv * len(keys) * 64 * 2
    assert cached.total_bytes <= v2_traffic(problem, block_m, block_n).total_bytes


@settings(max_examples=60, deadline=None)
@given(SHAPES, BLOCKS, BLOCKS)
def test_v1_updates_the_output_in_every_tile_it_visits(problem: AttentionShape, block_m: int, block_n: int) -> None:
    tiles = visible_tiles(problem, block_m, block_n)
    heads, rows = problem.batch * problem.num_heads, sum(len(queries) for queries, _ in tiles)
    traffic = v1_traffic(problem, block_m, block_n)
    assert traffic.q_read == heads * rows * 64 * 2
    assert traffic.o_read == traffic.o_written == heads * rows * 32 * 4
    assert traffic.statistics_read == traffic.statistics_written == heads * rows * 2 * 4
    assert traffic.initial_written == heads * problem.seqlen_q * (32 * 4 + 8)
    assert traffic.k_read == heads * len({key for _, columns in tiles for key in columns}) * 64 * 2


def test_standard_attention_moves_four_score_matrices() -> None:
    traffic = standard_traffic(shape(4096))
    assert traffic.s_written == traffic.s_read == traffic.p_written == traffic.p_read == 64 * MIB
    assert traffic.total_bytes == 256 * MIB + 4 * 4096 * 64 * 2
    assert traffic.written_bytes == 128 * MIB + 4096 * 64 * 2
    assert standard_traffic(shape(4096, causal=Causal.UPPER_LEFT)) == traffic
    assert traffic.to_json()["total_bytes"] == traffic.total_bytes


def test_one_head_s_scores_are_four_bytes_a_pair() -> None:
    assert score_matrix_bytes(shape(4096)) == 64 * MIB
    assert score_matrix_bytes(shape(32768)) == 4 * GIB
    problem = shape(4096, num_heads=32, num_heads_kv=8)
    assert standard_memory_bytes(problem) == 32 * 64 * MIB + problem.tensor_bytes


def test_standard_attention_that_does_not_fit_says_so() -> None:
    h200 = device_named("h200")
    problem = standard_memory_problem(shape(32768, num_heads=64, num_heads_kv=64), h200)
    assert problem is not None
    for part in ("4 GiB per head", "257 GiB in all", "NVIDIA H200 has 14", "shorter sequence"):
        assert part in problem
    small = standard_memory_problem(shape(4096, num_heads=128, num_heads_kv=128), device_named("rtx2070"))
    assert small is not None
    assert "64 MiB per head and 8.25 GiB in all" in small
    assert standard_memory_problem(shape(32768), h200) is None
    assert (
        standard_memory_problem(shape(32768, num_heads=64, num_heads_kv=64), replace(h200, memory_bytes=None)) is None
    )


# ---- Theorem 2: Θ(Nd + N²) against Θ(N²d²/M). M elements on the chip are tiles of M/4d keys (Algorithm 1, line 1).


def paper_v1(seqlen: int, head_dim: int, memory_elements: int) -> Traffic:
    keys = memory_elements // (4 * head_dim)
    return v1_traffic(shape(seqlen, head_dim), min(keys, head_dim), keys)


def growth(more: Traffic, less: Traffic) -> float:
    return more.total_bytes / less.total_bytes


def test_standard_traffic_grows_with_the_square_of_n_and_hardly_with_d() -> None:
    base = standard_traffic(shape(16384, 64))
    assert growth(standard_traffic(shape(32768, 64)), base) == pytest.approx(4, rel=0.01)
    assert growth(standard_traffic(shape(16384, 128)), base) == pytest.approx(1, rel=0.01)
    # Θ(Nd) is what is left where d is far above N.
    assert growth(standard_traffic(shape(16, 4096)), standard_traffic(shape(16, 2048))) == pytest.approx(2, rel=0.02)


def test_v1_traffic_grows_with_n_squared_d_squared_over_m() -> None:
    base = paper_v1(16384, 64, 32768)
    assert growth(paper_v1(32768, 64, 32768), base) == pytest.approx(4, rel=0.03)
    assert growth(paper_v1(16384, 128, 32768), base) == pytest.approx(4, rel=0.05)
    assert growth(base, paper_v1(16384, 64, 65536)) == pytest.approx(2, rel=0.05)


def test_v2_traffic_falls_with_block_m_and_is_blind_to_block_n() -> None:
    base = v2_traffic(shape(16384), 64, 64)
    assert growth(base, v2_traffic(shape(16384), 128, 64)) == pytest.approx(2, rel=0.01)
    assert v2_traffic(shape(16384), 64, 128) == base
    assert growth(v2_traffic(shape(32768), 64, 64), base) == pytest.approx(4, rel=0.01)


def test_causal_tiles_halve_the_traffic_of_keys() -> None:
    full, causal = (v2_traffic(shape(8192, causal=mask), 64, 64) for mask in (Causal.NONE, Causal.UPPER_LEFT))
    tiles = 8192 // 64
    assert causal.k_read / full.k_read == (tiles + 1) / (2 * tiles)
    assert causal.q_read == full.q_read
