"""What registers can hold: bounds of their values, found by following machine code along all of its paths.

Integer instructions that compute addresses and descriptors are followed; what any other writes may be anything. A
register that no path has written is absent. Where a loop makes bounds grow they are given up.
"""

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache

from tests.support.machine_code.sass import Block, Instruction, Operand, blocks_of

Bounds = tuple[int, int]
"""Least and greatest value, both included."""
State = dict[str, Bounds]
"""The bounds of registers such as `UR4` and `P0`, and of stack slots such as `[0x10]`."""

WORD = 1 << 32
MASK = WORD - 1
ANY, BIT, ZERO = (0, MASK), (0, 1), (0, 0)
MAX_VISITS = 6
"""So often a block's entry may widen before its bounds are given up."""
SLOT = re.compile(r"\[R1(?:\+(-?0x[0-9a-f]+))?\]")
AND, OR, XOR = 0xC0, 0xFC, 0x3C
"""Tables of LOP3 that ignore the third operand."""


def states(code: Sequence[Instruction]) -> Iterator[tuple[Instruction, State]]:
    """Every instruction that can be reached, with what is known ahead of it. The state is changed afterwards."""
    blocks = blocks_of(with_exchanges(code))
    for block, entry in zip(blocks, _entries(blocks), strict=True):
        if entry is None:
            continue
        state = dict(entry)
        for instruction in block.code:
            yield instruction, state
            step(instruction, state)


def _entries(blocks: Sequence[Block]) -> list[State | None]:
    """What holds whenever a block begins; None where nothing reaches it."""
    entries: list[State | None] = [None] * len(blocks)
    entries[0], visits, waiting = {}, [0] * len(blocks), {0}
    while waiting:
        number = min(waiting)  # what comes earlier in the code mostly decides what holds later
        waiting.remove(number)
        state = dict(entries[number] or {})
        for instruction in blocks[number].code:
            step(instruction, state)
        for after in blocks[number].following:
            known = entries[after]
            joined = state if known is None else _joined(known, state, visits[after] >= MAX_VISITS)
            if joined != known:
                entries[after] = dict(joined)
                visits[after] += 1
                waiting.add(after)
    return entries


def _joined(one: Mapping[str, Bounds], other: Mapping[str, Bounds], give_up: bool) -> State:
    """What holds after either; a register that one of them has not written counts as not written."""
    joined = {}
    for name in one.keys() & other.keys():
        bounds = _hull(one[name], other[name])
        joined[name] = ANY if give_up and bounds != one[name] else bounds
    return joined


def _hull(one: Bounds, other: Bounds) -> Bounds:
    return min(one[0], other[0]), max(one[1], other[1])


def with_exchanges(code: Sequence[Instruction]) -> list[Instruction]:
    """The code with three exclusive ors that exchange two registers, as the assembler writes it, as one SWAP."""
    result = list(code)
    for index, instruction in enumerate(code):
        if result[index].name == "NOP" or (pair := _exclusive_or(instruction)) is None:
            continue
        places = _exchange(code, index, *pair)
        for place in places:
            result[place] = Instruction(code[place].address, "", "NOP", ())
        if places:
            last = code[places[-1]]
            result[places[-1]] = Instruction(last.address, "", "SWAP", last.operands[:1] + instruction.operands[2:3])
    return result


def _exclusive_or(instruction: Instruction) -> tuple[str, str] | None:
    """(a, b) of an unguarded `a = a ^ b`."""
    if instruction.base not in ("LOP3", "ULOP3") or instruction.guard or len(instruction.data) != 5:
        return None
    names = [name_of(operand) for operand in instruction.data[:3]]
    if instruction.data[4].value != XOR or names[0] not in names[1:] or None in names:
        return None
    first, second = names[0], names[2] if names[1] == names[0] else names[1]
    return (str(first), str(second)) if first != second else None


def _exchange(code: Sequence[Instruction], start: int, one: str, other: str) -> tuple[int, ...]:
    """The places of `a ^= b`, `b ^= a`, `a ^= b`, if nothing else touches the two between; else none."""
    places = [start]
    for index in range(start + 1, len(code)):
        instruction = code[index]
        if instruction.base in ("BRA", "EXIT", "RET", "CALL", "JMP"):
            return ()
        if not any(re.search(rf"\b(?:{one}|{other})\b", operand.text) for operand in instruction.operands):
            continue
        wanted = (other, one) if len(places) == 1 else (one, other)
        if _exclusive_or(instruction) != wanted:
            return ()
        places.append(index)
        if len(places) == 3:
            return tuple(places)
    return ()


def name_of(operand: Operand, word: int = 0) -> str | None:
    """The name of a register, or of one that follows it; None for RZ, PT and what is no register."""
    return f"{operand.file}{operand.number + word}" if operand.number is not None else None


def value(operand: Operand, state: Mapping[str, Bounds], word: int = 0) -> Bounds | None:
    """The bounds of a word of an operand, None if it is a register that nothing has written.

    A negated one is counted from 2^32, so that a sum with it carries as the hardware's does.
    """
    if operand.value is not None:
        number = operand.value >> 32 * word & MASK
        return number, number
    if not (operand.is_data or operand.is_predicate):
        return ANY
    name = name_of(operand, word)
    known = ((1, 1) if operand.text.endswith("T") else ZERO) if name is None else state.get(name)
    if known is None or not operand.prefix:
        return known
    if operand.prefix == "!":
        return 1 - known[1], 1 - known[0]
    top = MASK if operand.prefix == "~" or word else WORD
    return top - known[1], top - known[0]


def step(instruction: Instruction, state: MutableMapping[str, Bounds]) -> None:
    """Change what is known to what is known after the instruction. A guarded one may have done nothing."""
    written = _written(instruction, state)
    for name, bounds in written.items():
        if bounds is None:
            state.pop(name, None)
        elif instruction.guard and name in state:
            state[name] = _hull(state[name], bounds)
        else:
            state[name] = bounds


def _written(instruction: Instruction, state: Mapping[str, Bounds]) -> dict[str, Bounds | None]:
    if instruction.base == "SWAP":
        one, other = (str(name_of(operand)) for operand in instruction.operands)
        return {one: state.get(other), other: state.get(one)}
    if instruction.base == "STL":
        return _stored(instruction, state)
    found: dict[str, Bounds | None] = {}
    for operand in instruction.operands[:2]:
        if operand.is_predicate and operand.number is not None and not operand.prefix:
            found[str(name_of(operand))] = BIT  # or it is read, which loses what was known
    goal = next(iter(instruction.data), None)
    if goal is None or not goal.is_data:
        return found
    results = list(_results(instruction, state))
    for word in range(words_written(instruction)):
        name = name_of(goal, word)
        if name is not None:
            found[name] = results[word] if word < len(results) else ANY
    if instruction.name in ("UIADD3", "IADD3") and len(found) > 1:
        carry = next(name for name in found if "P" in name)
        found[carry] = _sum(instruction.data[1:4], state)[1]
    return found


def _stored(instruction: Instruction, state: Mapping[str, Bounds]) -> dict[str, Bounds | None]:
    slot = SLOT.fullmatch(instruction.operands[0].text)
    if slot is None:  # anywhere on the stack
        return {name: ANY for name in state if name.startswith("[")}
    start = int(slot[1] or "0", 0)
    words = words_written(instruction)
    return {f"[{start + 4 * word:#x}]": value(instruction.operands[1], state, word) for word in range(words)}


def words_written(instruction: Instruction) -> int:
    """Registers that an instruction writes from its first on, from above."""
    return _words_written(instruction.name)


@cache
def _words_written(name: str) -> int:
    base, *suffixes = name.split(".")
    if base.endswith("GMMA"):
        return int(name.split("x")[1]) // 2
    if base.endswith("MMA"):
        return 4
    if base == "LDSM":
        return int(suffixes[-1]) if suffixes[-1].isdigit() else 1
    if "128" in suffixes:
        return 4
    wide = {"64", "S64", "WIDE"} & set(suffixes) or ("U64" in suffixes and "HI" not in suffixes)
    return 2 if wide or (base == "CS2R" and "32" not in suffixes) else 1


def _results(instruction: Instruction, state: Mapping[str, Bounds]) -> Sequence[Bounds | None]:
    """What is written, word by word; nothing for an instruction that is not followed."""
    sources = instruction.data[1:]
    if instruction.name == "UIADD3.64":
        return _wide_sum(sources, state)
    if instruction.base == "LDL":
        slot = SLOT.fullmatch(sources[0].text)
        words = range(words_written(instruction))
        start = int(slot[1] or "0", 0) if slot else 0
        return [state.get(f"[{start + 4 * word:#x}]", ANY) for word in words] if slot else ()
    if instruction.base == "CS2R":
        return [ZERO, ZERO] if sources[0].text == "SRZ" else ()
    follow = FOLLOWED.get(instruction.base)
    if follow is None or len(sources) < follow[0] or "WIDE" in instruction.name:
        return ()
    if instruction.base.endswith("IMAD") and "HI" in instruction.name:
        return ()
    values = [value(operand, state) for operand in sources]
    if any(each is None for each in values[: follow[0]]):
        return [None]
    known = [each for each in values if each is not None]
    carry = _carry(instruction, state) if instruction.name.endswith(".X") else ZERO
    return [follow[1](instruction, known, carry)]


def _carry(instruction: Instruction, state: Mapping[str, Bounds]) -> Bounds:
    """The carry into an instruction: its first predicate after the sources."""
    last = max(index for index, operand in enumerate(instruction.operands) if not operand.is_predicate)
    carries = instruction.operands[last + 1 :]
    return (value(carries[0], state) or BIT) if carries else ZERO


def _sum(operands: Sequence[Operand], state: Mapping[str, Bounds], word: int = 0) -> tuple[Bounds | None, Bounds]:
    """The sum of operands and its carry; None if something in it was not written."""
    values = [value(operand, state, word) for operand in operands]
    known = [each for each in values if each is not None]
    return _added(known) if len(known) == len(values) else (None, BIT)


def _added(values: Sequence[Bounds]) -> tuple[Bounds, Bounds]:
    low, high = sum(each[0] for each in values), sum(each[1] for each in values)
    carry = low >> 32, high >> 32
    return ((low & MASK, high & MASK) if carry[0] == carry[1] else ANY), carry


def _wide_sum(operands: Sequence[Operand], state: Mapping[str, Bounds]) -> list[Bounds | None]:
    """The 64-bit sum: low word, high word."""
    low, carry = _sum(operands, state)
    high, _ = _sum(operands, state, word=1)
    return [low, None if high is None else _added([high, carry])[0]]


Follow = Callable[[Instruction, Sequence[Bounds], Bounds], Bounds]


def _copy(instruction: Instruction, values: Sequence[Bounds], carry: Bounds) -> Bounds:
    return values[0]


def _add(instruction: Instruction, values: Sequence[Bounds], carry: Bounds) -> Bounds:
    return _added([*values[:3], carry])[0]


def _multiply_add(instruction: Instruction, values: Sequence[Bounds], carry: Bounds) -> Bounds:
    one, other, rest = values[:3]
    product = one[0] * other[0], one[1] * other[1]
    return _added([product, rest, carry])[0]


def _shift(instruction: Instruction, values: Sequence[Bounds], carry: Bounds) -> Bounds:
    """One word shifted: the other of the two that the funnel has must be zero."""
    low, by, high = values[:3]
    right, left = ".R." in instruction.name, ".L." in instruction.name
    if by[0] != by[1] or "64" in instruction.name or (high if left else low) != ZERO:
        return ANY
    if right and (".U32" in instruction.name or high[1] < WORD >> 1):
        return high[0] >> by[0], high[1] >> by[0]
    return _multiply_add(instruction, [low, (1 << by[0], 1 << by[0]), ZERO], ZERO) if left else ANY


def _shift_add(instruction: Instruction, values: Sequence[Bounds], carry: Bounds) -> Bounds:
    one, rest, by = values[:3]
    if instruction.name not in ("LEA", "ULEA") or by[0] != by[1]:
        return ANY
    return _multiply_add(instruction, [one, (1 << by[0], 1 << by[0]), rest], ZERO)


def _extend(instruction: Instruction, values: Sequence[Bounds], carry: Bounds) -> Bounds:
    most = (1 << values[1][0]) - 1
    if ".U32" not in instruction.name or values[1][0] != values[1][1]:
        return ANY
    return values[0] if values[0][1] <= most else (0, most)


def _logic(instruction: Instruction, values: Sequence[Bounds], carry: Bounds) -> Bounds:
    one, other, third, table = values[:4]
    if third != ZERO or table[0] not in (AND, OR, XOR):
        return ANY
    if one[0] == one[1] and other[0] == other[1]:
        exact = {AND: one[0] & other[0], OR: one[0] | other[0], XOR: one[0] ^ other[0]}[table[0]]
        return exact, exact
    if table[0] == AND:
        return 0, min(one[1], other[1])
    least = max(one[0], other[0]) if table[0] == OR else 0
    return least, (1 << max(one[1], other[1]).bit_length()) - 1


def _choose(instruction: Instruction, values: Sequence[Bounds], carry: Bounds) -> Bounds:
    return _hull(values[0], values[1])


FOLLOWED: dict[str, tuple[int, Follow]] = {
    **dict.fromkeys(("MOV", "UMOV", "R2UR"), (1, _copy)),
    **dict.fromkeys(("VIADD", "IADD3", "UIADD3"), (2, _add)),
    **dict.fromkeys(("IMAD", "UIMAD"), (3, _multiply_add)),
    **dict.fromkeys(("SHF", "USHF"), (3, _shift)),
    **dict.fromkeys(("LEA", "ULEA"), (3, _shift_add)),
    **dict.fromkeys(("SGXT", "USGXT"), (2, _extend)),
    **dict.fromkeys(("LOP3", "ULOP3"), (4, _logic)),
    **dict.fromkeys(("SEL", "USEL", "VIMNMX", "UIMNMX"), (2, _choose)),
}
"""How many sources an instruction has at least, and what it makes of them."""
