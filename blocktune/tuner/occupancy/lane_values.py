"""The values that a warp's 32 lanes have in integer registers of PTX, as far as they follow from the lane alone.

    LaneValues(ptx.splitlines()).addresses("%r5", 16)      # 32 byte addresses in shared memory, or None

A register that a loop changes has the value that it enters the loop with. What is the same in all lanes and not known,
such as a kernel's argument or the number of its block, is taken as 0: it moves all lanes alike, by buffers whose sizes
are multiples of what the banks repeat after. Of a block's warps it is the first.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence

WARP_SIZE = 32
MASK = 0xFFFFFFFF
MOST_STEPS = 400
"""From a register back to the lane; a longer way is given up."""

Lanes = tuple[int, ...]

_INSTRUCTION = re.compile(
    r"^(?:\{\s*)?(?:@!?%\w+\s+)?(?P<name>[a-z][\w.:]*)\s+(?P<target>%\w+)(?:\|%\w+)?\s*,\s*(?P<rest>[^;]*);"
)
_UNIFORM = ("ld.param", "mov.u64", "cvta", "elect", "activemask", "griddepcontrol")


def _shifted_right(value: int, places: int) -> int:
    return value >> places if places < 64 else 0


def _bits(value: int, start: int, length: int) -> int:
    return value >> start & ((1 << length) - 1)


def _with_bits(bits: int, value: int, start: int, length: int) -> int:
    mask = (1 << length) - 1 << start
    return value & ~mask | bits << start & mask


_TWO: Mapping[str, Callable[[int, int], int]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "shl": lambda value, places: value << min(places, 64),
    "shr": _shifted_right,
    "min": min,
    "max": max,
    "rem": lambda value, divisor: value % divisor if divisor else 0,
    "div": lambda value, divisor: value // divisor if divisor else 0,
}
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
}


class LaneValues:
    """The registers of one kernel; each is computed when it is first read."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._sources: dict[str, tuple[str, tuple[str, ...]]] = {}
        for line in lines:
            found = _INSTRUCTION.match(line.strip())
            if found and not found["name"].startswith("st"):
                arguments = tuple(part.strip() for part in found["rest"].split(","))
                self._sources.setdefault(found["target"], (found["name"], arguments))
        self._known: dict[str, Lanes | None] = {}

    def addresses(self, register: str, offset: int) -> Lanes | None:
        """Return the register's value plus an offset in every lane, as addresses of 32 bits; None if they depend on
        data."""
        values = self._value(register, MOST_STEPS)
        return None if values is None else tuple(value + offset & MASK for value in values)

    def _value(self, name: str, steps: int) -> Lanes | None:
        if not name.startswith("%"):
            return (_number(name),) * WARP_SIZE
        if name in ("%tid.x", "%laneid"):
            return tuple(range(WARP_SIZE))
        if "." in name or name == "%warpid":  # of the block or the grid, the same in all lanes
            return (0,) * WARP_SIZE
        if name not in self._known:
            self._known[name] = None  # what depends on itself is not known
            self._known[name] = self._computed(name, steps - 1)
        return self._known[name]

    def _computed(self, name: str, steps: int) -> Lanes | None:
        if name not in self._sources or steps <= 0:
            return None
        operation, arguments = self._sources[name]
        if operation.startswith(_UNIFORM) and not arguments[0].startswith("%r"):
            return (0,) * WARP_SIZE
        values = [self._value(argument, steps) for argument in arguments if argument]
        lanes = [value for value in values if value is not None]
        return _apply(operation.split("."), lanes) if len(lanes) == len(values) else None


def _apply(words: Sequence[str], values: Sequence[Lanes]) -> Lanes | None:
    """Return an instruction's result in every lane, or None where this does not know the instruction."""
    name = words[0]
    if name in ("mov", "cvt", "cvta") and len(values) == 1:
        return values[0]
    if name == "not":
        return tuple(~value & MASK for value in values[0])
    if name == "neg":
        return tuple(-value for value in values[0])
    if name in _TWO and len(values) == 2:
        return tuple(map(_TWO[name], *values))
    if name == "mad":
        return tuple(a * b + c for a, b, c in zip(*values, strict=True))
    if name == "bfe":
        return tuple(map(_bits, *values))
    if name == "bfi":
        return tuple(map(_with_bits, *values))
    if name == "selp":
        return tuple(a if chosen else b for a, b, chosen in zip(*values, strict=True))
    if name == "setp" and len(values) == 2:
        return tuple(map(int, map(_COMPARISONS[words[1]], *values)))
    if name == "shfl" and "idx" in words:
        return tuple(values[0][source % WARP_SIZE] for source in values[1])
    return None


def _number(text: str) -> int:
    """Return an integer, or 0 for a symbol: the place where a block's shared memory begins."""
    try:
        return int(text, 0)
    except ValueError:
        return 0
