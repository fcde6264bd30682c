"""The unit in which portable kernels take strides, so that the compiler knows rows to begin at multiples of 16 bytes.

Of an integer argument Triton's compiler knows that 16 divides it, or nothing. Rows of 40, 72, 88, 104 or 120 elements
of 16 bits do begin at multiples of 16 bytes, but their strides have no such hint: loads of 2 bytes would follow, and no
asynchronous copies. So the host passes such strides in units of 8 elements, and the kernel multiplies them.
"""

from collections.abc import Mapping, Sequence

HINTED = 16
"""What an integer argument is known to be a multiple of, if it is one."""
ROW_UNIT = 8
"""Elements of the unit: of 16 bits they are the 16 bytes that a thread loads at once."""


def stride_unit(strides: Sequence[int]) -> int:
    """Return the elements of the unit of these strides: ROW_UNIT where it divides all and HINTED does not, else 1."""
    if all(stride % HINTED == 0 for stride in strides):
        return 1
    return 1 if any(stride % ROW_UNIT for stride in strides) else ROW_UNIT


def in_units(strides: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return strides in their unit, and the unit, which is the kernel's last argument."""
    unit = stride_unit(strides)
    return tuple(stride // unit for stride in strides), unit


def named_in_units(strides: Mapping[str, int]) -> dict[str, int]:
    """Return what `in_units` returns as arguments by name, UNIT among them."""
    values, unit = in_units(tuple(strides.values()))
    return dict(zip(strides, values, strict=True)) | {"UNIT": unit}
