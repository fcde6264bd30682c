"""Into how many shares the keys of a decoding are split."""

from collections.abc import Iterable

START_KEYS = 256
"""Keys that a program would read in the time in which it starts, about."""

MERGED_ROWS, MOST_MERGED_ROWS = 16, 1024
"""Rows of shares that another kernel merges in the time in which a program reads a key, about; and rows from which on
it merges more of them at one time."""


def fastest_splits(
    allowed: Iterable[int], programs: int, resident: int, keys: int, block_n: int, merged_rows: int = 0
) -> int:
    """Return the splits that end first where a program takes the time of its keys and programs come in turns, the
    fewest of equals.

    Args:
        allowed: numbers of splits, ascending.
        programs: those of one split.
        resident: programs that the multiprocessors hold at one time.
        keys: what one row reads.
        block_n: keys of a tile, which is not split.
        merged_rows: rows of one share, where another kernel merges them.
    """
    tiles = -(-keys // block_n)

    def keys_of_time(splits: int) -> int:
        turns = -(-programs * splits // resident)
        merged = min(merged_rows, MOST_MERGED_ROWS) * splits // MERGED_ROWS if splits > 1 else 0
        return turns * (-(-tiles // splits) * block_n + START_KEYS) + merged

    return min((splits for splits in allowed if splits <= tiles), key=keys_of_time)
