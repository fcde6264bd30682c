"""Numbers as flash-attention's callers pass them: Python's, NumPy's, or tensors of one number."""

from operator import index
from typing import Any

from torch import SymInt, Tensor

from blocktune.kernels.values.errors import UsageError, WrongTypeError
from blocktune.kernels.values.features import MAX_SIZE, UNLIMITED, bounded_side

MAX_SPLITS = 128
"""Of the keys of a call over a cache, as in flash-attention."""


def whole_number(name: str, given: Any) -> int:
    """Return the number as an int.

    Raises:
        WrongTypeError: it is no whole number.
    """
    if type(given) is int or isinstance(given, SymInt):  # a size of an exported graph stays open
        return given
    try:
        return index(given)
    except TypeError as error:
        raise WrongTypeError(f"`{name}` takes whole numbers, but got {given!r:.100}. Give it an int.") from error


def real_number(name: str, given: Any) -> float:
    """Return the number as a float.

    Raises:
        WrongTypeError: the value is not a number. Text that spells a number is refused too.
    """
    if type(given) is float:
        return given
    if not hasattr(given, "__float__") and not hasattr(given, "__index__"):
        raise WrongTypeError(f"`{name}` takes a number, but got {given!r:.100}. Give it a float.")
    return float(given)


def length_of(name: str, given: Any) -> int:
    """Return the length of the longest sequence as an int, at most `MAX_SIZE`: none is longer.

    Raises:
        WrongTypeError: it is no whole number.
        UsageError: it is negative.
    """
    length = whole_number(name, given)
    if length < 0:
        raise UsageError(f"`{name} >= 0` must hold, but got {length}. Give the length of the longest sequence.")
    return min(length, MAX_SIZE)


def sides(window: Any) -> Any:
    """Return the window as a part of a key; what is no list stays what it is."""
    return tuple(window) if type(window) is list else window


def window_of(given: Any, name: str = "window_size") -> tuple[int, int]:
    """Return (left, right) of a window, `UNLIMITED` for a side that no sequence is as long as. Sides that the sequences
    of a call are too short for are left to `Call.over`.

    Raises:
        WrongTypeError: it is no pair, or a side is no whole number.
        UsageError: it has more or fewer sides than two, or a side is below -1.
    """
    try:
        sides = tuple(given)
    except TypeError as error:
        raise WrongTypeError(
            f"`{name}` must be (left, right), but got {given!r:.100}. (-1, -1) means no window."
        ) from error
    if len(sides) != 2:
        raise UsageError(f"`{name}` must be (left, right), but got {len(sides)} numbers. (-1, -1) means no window.")
    left, right = whole_number(name, sides[0]), whole_number(name, sides[1])
    if left < UNLIMITED or right < UNLIMITED:
        raise UsageError(
            f"`{name}` must be (left, right) with keys >= 0, or {UNLIMITED} for no bound, but got ({left}, {right}). "
            "(-1, -1) means no window."
        )
    return bounded_side(left), bounded_side(right)


def splits_of(given: Any) -> int:
    """Return a `num_splits` as a kernel can have it: 0, or the next power of two.

    Raises:
        WrongTypeError: it is no whole number.
        UsageError: it is negative or above `MAX_SPLITS`.
    """
    splits = whole_number("num_splits", given)
    if not 0 <= splits <= MAX_SPLITS:
        raise UsageError(f"`0 <= num_splits <= {MAX_SPLITS}` must hold, but got {splits}. Give 0 for the tuned number.")
    return 0 if splits == 0 else 1 << (splits - 1).bit_length()


def with_dense_rows(given: Any) -> Any:
    """Return a tensor with the numbers of its last dimension next to each other, as kernels read those of lengths,
    tables and slopes; what is no tensor stays what it is."""
    if not isinstance(given, Tensor) or given.dim() == 0 or given.stride(-1) == 1 or given.shape[-1] < 2:
        return given
    return given.contiguous()
