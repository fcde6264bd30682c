"""Which tokens of a sequence each rank holds."""

import pytest

from blocktune import SequenceLayout, UsageError, split_sequence
from blocktune.runtime.parallel.head_trade import heads_of, tokens_of
from blocktune.runtime.parallel.plan.layout import find_layout

pytestmark = pytest.mark.triton_free


def test_zigzag_gives_each_rank_a_part_of_either_half() -> None:
    layout = SequenceLayout.zigzag(16, 4)
    assert layout.ranges == (((0, 2), (14, 16)), ((2, 4), (12, 14)), ((4, 6), (10, 12)), ((6, 10),))
    assert (layout.seqlen, layout.num_ranks, layout.length(3)) == (16, 4, 4)


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("ranks", range(1, 6))
def test_equal_parts_are_found_by_their_length(length: int, ranks: int) -> None:
    for make in (SequenceLayout.zigzag, SequenceLayout.contiguous):
        layout = make(length * ranks, ranks)
        assert {layout.length(rank) for rank in range(ranks)} == {length}


def test_ragged_and_missing_parts() -> None:
    assert SequenceLayout.contiguous(2, 3).ranges == ((), ((0, 1),), ((1, 2),))
    assert SequenceLayout.of_lengths([3, 0, 2]).ranges == (((0, 3),), (), ((3, 5),))
    assert SequenceLayout.zigzag(0, 2).ranges == ((), ())


@pytest.mark.parametrize(
    "ranges", [(), (((0, 2),), ((3, 4),)), (((0, 2),), ((1, 4),)), (((0, 0),),), (((2, 4), (0, 2)),), (((1, 4),),)]
)
def test_a_layout_that_is_none_is_refused(ranges: tuple[tuple[tuple[int, int], ...], ...]) -> None:
    with pytest.raises(UsageError, match="Every token must be held by one rank"):
        SequenceLayout(ranges)


def test_unknown_names_and_other_groups_are_refused() -> None:
    with pytest.raises(
        UsageError, match="`layout` must be 'zigzag', 'contiguous' or a SequenceLayout, but got 'spiral'"
    ):
        find_layout("spiral", 8, 2)
    with pytest.raises(UsageError, match="as many ranks as the group, but got 2 and 3"):
        find_layout(SequenceLayout.zigzag(8, 2), 8, 3)


def test_without_a_process_group_the_way_out_is_named() -> None:
    import torch

    with pytest.raises(UsageError, match=r"Call torch\.distributed\.init_process_group first"):
        split_sequence(torch.zeros(4), dim=0)


def test_ranks_that_trade_heads_have_their_parts_together() -> None:
    layout = SequenceLayout.zigzag(16, 4)
    assert layout.joined(2).ranges == (((0, 4), (12, 16)), ((4, 12),))
    assert tokens_of(layout, range(2)) == (
        (((0, 2), (0, 2)), ((2, 4), (6, 8))),
        (((0, 2), (2, 4)), ((2, 4), (4, 6))),
    )


@pytest.mark.parametrize(
    ("heads", "heads_kv", "size", "of_queries", "of_keys"),
    [
        (8, 4, 2, ((0, 4), (4, 8)), ((0, 2), (2, 4))),
        (8, 2, 4, ((0, 2), (2, 4), (4, 6), (6, 8)), ((0, 1), (0, 1), (1, 2), (1, 2))),
        (6, 1, 3, ((0, 2), (2, 4), (4, 6)), ((0, 1), (0, 1), (0, 1))),
    ],
)
def test_heads_of_ranks(heads: int, heads_kv: int, size: int, of_queries: object, of_keys: object) -> None:
    assert heads_of(heads, heads_kv, size) == (of_queries, of_keys)
