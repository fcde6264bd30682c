"""The unit in which kernels take strides, so that the compiler knows rows to begin at multiples of 16 bytes.

Of an integer argument Triton's compiler knows that 16 divides it, or nothing. Rows of 40, 72, 88, 104 or 120 elements
of 16 bits do begin at multiples of 16 bytes, but their strides have no such hint: loads of 2 bytes would follow, and no
asynchronous copies. So the host passes such strides in units of 8 elements, and the kernel multiplies them.
"""

from collections.abc import Mapping, Sequence

HINTED = 16
"""What an integer argument is known to be a multiple of, if it is one."""
ROW_UNIT = 8
"""Elements of 16 bits that a thread loads at once."""


def in_units(strides: Sequence[int], row_unit: int = ROW_UNIT) -> tuple[tuple[int, ...], int]:
    """Return strides in their unit, and the unit: row_unit where it divides all strides and HINTED does not, else 1."""
    hinted = all(stride % HINTED == 0 for stride in strides)
    unit = 1 if hinted or any(stride % row_unit for stride in strides) else row_unit
    return tuple(stride // unit for stride in strides), unit


def named_in_units(strides: Mapping[str, int], row_unit: int = ROW_UNIT, name: str = "UNIT") -> dict[str, int]:
    """Return what `in_units` returns as arguments, the unit by this name."""
    values, unit = in_units(tuple(strides.values()), row_unit)
    return dict(zip(strides, values, strict=True)) | {name: unit}
