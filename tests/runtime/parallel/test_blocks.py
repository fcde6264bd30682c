"""Blocks and steps of ranks: every visible pair of a sequence is computed once, and only keys that are seen travel."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.parallel.plan.blocks import AttentionBlock, Sight
from blocktune.runtime.parallel.plan.layout import Range, SequenceLayout
from blocktune.runtime.parallel.plan.steps import RankStep, steps_of

pytestmark = pytest.mark.triton_free
INF = float("inf")


def positions(ranges: tuple[Range, ...]) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


def visible(sight: Sight) -> Counter[tuple[int, int]]:
    """Return every (query, key) of the sequence that counts, by definition."""
    return Counter(
        (query, key)
        for start, stop in pairwise(sight.bounds)
        for query in range(start, stop)
        for key in range(start, stop)
        if -sight.left <= key - query <= sight.right
    )


def pairs(block: AttentionBlock) -> list[tuple[int, int]]:
    """Return the rows of queries and keys that a call with these arguments pairs, by the meaning of windows."""
    left, right = block.window
    right = 0 if block.causal is Causal.LOWER_RIGHT else right
    starts_q, starts_k = (bounds[:-1] or (0,) for bounds in (block.bounds_q, block.bounds_k))
    return [
        (block.queries[0] + start_q + query, block.keys[0] + start_k + key)
        for start_q, start_k, (seqlen_q, seqlen_k) in zip(starts_q, starts_k, block.sizes, strict=True)
        for query in range(seqlen_q)
        for key in range(seqlen_k)
        if (left == UNLIMITED or key - query - seqlen_k + seqlen_q >= -left)
        and (right == UNLIMITED or key - query - seqlen_k + seqlen_q <= right)
    ]


def arrived(layout: SequenceLayout, rank: int, number: int, plans: list[tuple[RankStep, ...]]) -> list[int]:
    """Return the positions of the keys in a rank's buffer: what the other ranks say that they send."""
    step = plans[rank][number]
    if number == 0:
        return positions(layout.ranges[rank])
    sent = {source: [t for t in plans[source][number].sent if t.rank == rank] for source in range(layout.num_ranks)}
    buffer = [-1] * step.num_rows
    for transfer in step.received:
        theirs = sent[transfer.rank].pop(0)
        buffer[slice(*transfer.rows)] = positions(layout.ranges[transfer.rank])[slice(*theirs.rows)]
    assert not any(sent.values())
    assert -1 not in buffer
    return buffer


def check(layout: SequenceLayout, sight: Sight, *, gathers: bool) -> None:
    plans = [steps_of(layout, sight, rank, gathers=gathers) for rank in range(layout.num_ranks)]
    computed: Counter[tuple[int, int]] = Counter()
    for rank, steps in enumerate(plans):
        queries = positions(layout.ranges[rank])
        for number, step in enumerate(steps):
            keys = arrived(layout, rank, number, plans)
            for block in step.blocks:
                computed.update((queries[query], keys[key]) for query, key in pairs(block))
    assert computed == visible(sight)


def any_sight(random_: random.Random, seqlen: int) -> Sight:
    left, right = (random_.choice([INF, INF, 0, 1, 3, 7, seqlen]) for _ in range(2))
    right = random_.choice([0, right])
    inner = sorted(random_.choices(range(seqlen + 1), k=random_.choice([0, 0, 1, 4])))
    return Sight(left, right, (0, *inner, random_.choice([seqlen, seqlen, seqlen - seqlen // 4])))


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_every_visible_pair_is_computed_once(seed: int, gathers: bool) -> None:
    random_ = random.Random(seed)
    for _ in range(40):
        seqlen, ranks = random_.randint(1, 40), random_.randint(1, 6)
        ends = sorted(random_.choices(range(seqlen + 1), k=ranks - 1))
        lengths = [after - before for before, after in pairwise((0, *ends, seqlen))]
        layouts = [SequenceLayout.zigzag(seqlen, ranks), SequenceLayout.contiguous(seqlen, ranks)]
        layout = random_.choice([*layouts, SequenceLayout.of_lengths(lengths), *(one.joined(2) for one in layouts)])
        sight = any_sight(random_, seqlen)
        if list(sight.bounds) == sorted(sight.bounds):
            check(layout, sight, gathers=gathers)


def test_causal_ranks_are_equally_busy_in_zigzag() -> None:
    layout, sight = SequenceLayout.zigzag(64, 4), Sight(INF, 0, (0, 64))
    work = [
        [sum(len(pairs(block)) for block in step.blocks) for step in steps_of(layout, sight, rank, gathers=False)]
        for rank in range(4)
    ]
    assert work == [work[0]] * 4
    assert work[0][1] == work[0][2] == work[0][3] == 16 * 8


@pytest.mark.parametrize("rank", range(4))
def test_causal_steps_are_single_calls_in_zigzag(rank: int) -> None:
    steps = steps_of(SequenceLayout.zigzag(64, 4), Sight(INF, 0, (0, 64)), rank, gathers=False)
    assert [len(step.blocks) for step in steps] == [1, 1, 1, 1]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_a_window_takes_keys_of_neighbours_only(ranks: int) -> None:
    layout, sight = SequenceLayout.contiguous(64 * ranks, ranks), Sight(10, 0, (0, 64 * ranks))
    for rank in range(ranks):
        steps = steps_of(layout, sight, rank, gathers=False)
        assert [t for step in steps for t in step.received] == [t for t in steps[1].received if rank > 0]
        assert sum(step.num_rows for step in steps[1:]) == (10 if rank else 0)


def test_packed_sequences_within_a_rank_are_one_call_and_nothing_travels() -> None:
    layout, sight = SequenceLayout.contiguous(32, 2), Sight(INF, 0, (0, 5, 16, 20, 32))
    steps = steps_of(layout, sight, 0, gathers=False)
    assert steps[0].blocks == (
        AttentionBlock((0, 16), (0, 16), Causal.LOWER_RIGHT, (UNLIMITED, UNLIMITED), (0, 5, 16), (0, 5, 16)),
    )
    assert steps[1] == RankStep(0, (), (), ())
