"""Into how many shares keys are split: what ends first, by programs that come in turns."""

import pytest

from blocktune.kernels.portable.decode.shares import fastest_splits

ALLOWED = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize(
    ("programs", "keys", "splits"),
    [
        (8, 131072, 16),  # 128 programs in one turn
        (64, 65536, 2),
        (128, 16384, 1),
        (68, 61373, 16),  # 136 programs would need a second turn for four of them
        (88, 88855, 16),
        (100, 3000, 1),  # short turns cost more than a multiprocessor that waits
        (4, 700, 4),  # as many shares as there are tiles at most
        (1, 1, 1),
    ],
)
def test_as_many_as_keep_all_multiprocessors_busy(programs: int, keys: int, splits: int) -> None:
    assert fastest_splits(ALLOWED, programs, 132, keys, 128) == splits


def test_many_rows_that_another_kernel_merges_ask_for_fewer() -> None:
    assert fastest_splits(ALLOWED, 16, 132, 1500, 64) == 8
    assert fastest_splits(ALLOWED, 16, 132, 1500, 64, merged_rows=1024) == 4
