"""The model that ranks schedules: by hand where that is short, and which way it leans."""

from dataclasses import replace
from typing import Any

import pytest

from blocktune import SequenceLayout, UsageError
from blocktune.runtime.parallel.plan.blocks import Sight
from blocktune.runtime.parallel.plan.cost import LAUNCH_S, SUM_BYTES, Machine, fastest, time_s
from blocktune.runtime.parallel.plan.schedule import RankProblem, Schedule, possible, require_possible

pytestmark = pytest.mark.triton_free
INF = float("inf")
FAST_LINK = Machine(flops_per_s=7e14, memory_bytes_per_s=4e12, link_bytes_per_s=4e11, latency_s=1e-5)
SLOW_LINK = replace(FAST_LINK, link_bytes_per_s=2e9)


def problem(seqlen: int, ranks: int, *, causal: bool = True, window: float = INF, **changes: Any) -> RankProblem:
    """32 query heads of 128 over 8 key heads in 16 bits."""
    sizes: dict[str, Any] = {"batch": 1, "num_heads": 32, "num_heads_kv": 8, "head_dim": 128, "head_dim_v": 128}
    sizes |= {"element_bytes": 2, "layout": SequenceLayout.zigzag(seqlen, ranks)}
    return RankProblem(**sizes | {"sight": Sight(window, 0 if causal else INF, (0, seqlen))} | changes)


def test_a_ring_of_two_by_hand() -> None:
    """Two steps of 64 queries and 64 keys: the keys of the second are slower than the first's blocks."""
    machine = Machine(flops_per_s=1e12, memory_bytes_per_s=1e9, link_bytes_per_s=1e6, latency_s=1e-3)
    small = problem(128, 2, causal=False, num_heads=1, num_heads_kv=1, layout=SequenceLayout.contiguous(128, 2))
    keys_s = 1e-3 + 64 * 256 * 2 / 1e6
    blocks_s = LAUNCH_S + 4 * 64 * 64 * 128 / 1e12
    added_s = 64 * 128 * SUM_BYTES / 1e9
    assert time_s(small, Schedule.RING, machine) == pytest.approx(max(blocks_s, keys_s) + blocks_s + added_s)


def test_ulysses_of_two_by_hand() -> None:
    """One call of one head over all keys; half of queries, keys, values and output of 64 tokens and a head travel."""
    machine = Machine(flops_per_s=1e12, memory_bytes_per_s=1e9, link_bytes_per_s=1e6, latency_s=1e-3)
    small = problem(128, 2, causal=False, num_heads=2, num_heads_kv=2)
    call_s = LAUNCH_S + 4 * 128 * 128 * 128 / 1e12
    trade_s = 4e-3 + 64 * 4 * 128 * 2 / 1e6
    assert time_s(small, Schedule.ULYSSES, machine) == pytest.approx(call_s + trade_s)


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_long_causal_sequences_scale_with_the_ranks(ranks: int, schedule: Schedule) -> None:
    alone = time_s(problem(1 << 18, 1), Schedule.RING, FAST_LINK)
    assert 0.93 * ranks < alone / time_s(problem(1 << 18, ranks), schedule, FAST_LINK) <= ranks


def test_the_time_of_a_window_does_not_grow_with_the_ranks() -> None:
    times = [time_s(problem((1 << 16) * ranks, ranks, window=4096), Schedule.RING, FAST_LINK) for ranks in (2, 4, 8)]
    assert max(times) < 1.1 * min(times)


def test_a_slow_link_prefers_what_moves_less() -> None:
    """Of many key heads each rank would get all others' keys, but a share of the heads only once."""
    many = problem(1 << 14, 8, num_heads_kv=32)
    assert fastest(many, SLOW_LINK) is Schedule.ULYSSES
    one = problem(1 << 14, 8, num_heads_kv=1)
    assert fastest(one, SLOW_LINK) is not Schedule.ULYSSES


def test_long_sequences_hide_the_keys() -> None:
    long = problem(1 << 20, 4)
    unlimited = replace(FAST_LINK, link_bytes_per_s=INF, latency_s=0.0)
    hidden = time_s(long, Schedule.RING, FAST_LINK)
    assert time_s(long, Schedule.RING, unlimited) == pytest.approx(hidden, rel=1e-3)


def test_of_equally_fast_schedules_the_one_with_less_memory_is_taken() -> None:
    times = {seqlen: [time_s(problem(seqlen, 8), one, FAST_LINK) for one in Schedule] for seqlen in (1 << 15, 1 << 20)}
    (ring, _, gather), (long_ring, _, long_gather) = times.values()
    assert ring > 1.05 * gather
    assert long_gather < long_ring < 1.01 * long_gather
    assert fastest(problem(1 << 15, 8), FAST_LINK) is Schedule.ALL_GATHER
    assert fastest(problem(1 << 20, 8), FAST_LINK) is Schedule.RING


def test_zigzag_is_faster_than_contiguous_for_causal_masks() -> None:
    zigzag, contiguous = problem(1 << 17, 4), problem(1 << 17, 4, layout=SequenceLayout.contiguous(1 << 17, 4))
    slow, fast = (time_s(one, Schedule.RING, FAST_LINK) for one in (contiguous, zigzag))
    assert slow > 1.6 * fast


@pytest.mark.parametrize(
    ("heads", "heads_kv", "ranks", "served"), [(32, 8, 4, True), (32, 2, 4, True), (6, 6, 4, False), (12, 3, 4, False)]
)
def test_ulysses_needs_whole_heads(heads: int, heads_kv: int, ranks: int, served: bool) -> None:
    own = problem(64, ranks, num_heads=heads, num_heads_kv=heads_kv)
    assert (Schedule.ULYSSES in possible(own)) is served
    if not served:
        with pytest.raises(UsageError, match="cannot be divided among the 4 ranks that trade heads"):
            require_possible(own, Schedule.ULYSSES)


def test_a_mesh_trades_heads_whatever_the_schedule() -> None:
    mesh = problem(1 << 16, 8, num_columns=2)
    assert possible(mesh) == (Schedule.RING, Schedule.ALL_GATHER)
    with pytest.raises(UsageError, match="needs ranks in a row, but got a mesh with 2 columns"):
        require_possible(mesh, Schedule.ULYSSES)
    with pytest.raises(UsageError, match="among the 3 ranks that trade heads"):
        fastest(problem(1 << 16, 6, num_columns=3), FAST_LINK)


def test_packed_sequences_count_their_own_pairs() -> None:
    packed = problem(1 << 16, 4, sight=Sight(INF, 0, tuple(range(0, (1 << 16) + 1, 1 << 12))))
    assert time_s(packed, Schedule.RING, FAST_LINK) < 0.3 * time_s(problem(1 << 16, 4), Schedule.RING, FAST_LINK)
