"""How large a case may be, and integers at the limits of their types."""

import sys

MAX_PAIRS = 1 << 20
"""(query, key) pairs of all heads of a case: the truth holds about ten float64 of each."""

MAX_ELEMENTS = 1 << 22
"""Of query, or of key, or of value."""

INT32 = 2**31 - 1

EXTRA_LENGTHS = {0: 4, 1: 1, 100: 1, 1 << 17: 0.5}
"""How much longer than they are the longest sequences are said to be, with weights."""


def sides_near(length: int) -> list[int]:
    """Sides of a window around so many keys at which arithmetic may go wrong."""
    near = [0, 1, length - 1, length, length + 1]
    near += [INT32 - length - 1, INT32 - length, INT32 + 1 - length, INT32 - 1, INT32]
    often = [INT32, INT32, sys.maxsize]  # what callers write for no bound
    return [*(side for side in near if side >= 0), INT32 + 1, 2**32 - 1, 2**40, *often]
