"""Whether machine code hands wgmma the descriptors that the assembler was given.

A descriptor of an operand in shared memory is a 14-bit address plus constants that say how the operand is laid out. PTX
adds both in 64 bits. The high word holds nothing but layout, so that in machine code, too, it must be one of PTX's
constants, whatever the path; and the low word must be bounded, since its address is. ptxas 12.8.93 breaks this: where
two operands of different layout share an address it may add the second layout to another register, written or not.
(https://github.com/fla-org/flash-linear-attention/pull/1262 has two more cases of wrong code.)
"""

import re
from collections.abc import Iterator, Sequence

from tests.support.machine_code.sass import Instruction, Operand
from tests.support.machine_code.sass_values import Bounds, states, words_written

CONSTANT = re.compile(r"\b(?:or|add|sub|mov)\.[bsu]64\s+%rd\d+,(?:\s+%rd\d+,)?\s+(-?\d+);")
DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
UNUSED_BITS = 0x3FFFC000
"""Of a high word: between the stride and the swizzle there are a base offset, which Triton leaves at zero, and gaps."""
MAX_LOW = (1 << 30) - 1
"""Two fields of 14 bits, the upper one from bit 16 on."""
JUMPS = ("BRA", "JMP", "EXIT", "RET", "CALL", "BRX", "WARPSYNC")
DESTINATIONS = ("R2UR", "S2UR", "LDCU", "REDUX", "CREDUX", "VOTE", "VOTEU")
SPILL = "MOV.SPILL"
"""Copies a uniform register that is needed for something else. ptxas places one where on some path nothing was written,
too: that copies garbage to where no instruction of the path reads it. What is not written stays so in the copy and in
what `R2UR.FILL` brings back (`sass_values`), so that a use of it is found where it happens."""


def layouts(ptx: str) -> set[int]:
    """The high words of the constants that PTX makes descriptors of."""
    words = {(int(number) & (1 << 64) - 1) >> 32 for number in CONSTANT.findall(ptx)}
    return {word for word in words if word >> 30 and not word & UNUSED_BITS}


def wrong_descriptors(code: Sequence[Instruction], ptx: str) -> list[str]:
    """What is wrong with the descriptors of the products, one line each."""
    allowed = layouts(ptx)
    found = []
    for instruction, state in states(code):
        for register in descriptor_registers(instruction):
            problem = _problem(state.get(f"UR{register}"), state.get(f"UR{register + 1}"), allowed)
            if problem:
                found.append(f"{instruction}: {problem}")
    return found


def descriptor_registers(instruction: Instruction) -> Iterator[int]:
    """The low registers of a product's descriptors: of both operands, or of the second where the first is in registers.

    The two stand in four registers that follow each other.
    """
    if not instruction.base.endswith("GMMA"):
        return
    for place, operand in enumerate(instruction.operands):
        match = DESCRIPTOR.match(operand.text)
        if match:
            first_in_registers = place > 1 and instruction.operands[place - 1].is_data
            yield from (int(match[1]) + offset for offset in ((2,) if first_in_registers else (0, 2)))


def _problem(low: Bounds | None, high: Bounds | None, allowed: set[int]) -> str:
    if low is None or high is None:
        return "the descriptor is in registers that were not written"
    if high[0] != high[1] or high[0] not in allowed:
        return f"the descriptor's layout is {_text(high)}, and PTX has {', '.join(map(hex, sorted(allowed)))}"
    return f"the descriptor's address is {_text(low)}, which no address is" if low[1] > MAX_LOW else ""


def _text(bounds: Bounds) -> str:
    return hex(bounds[0]) if bounds[0] == bounds[1] else f"anything in {bounds[0]:#x}..{bounds[1]:#x}"


def unwritten_reads(code: Sequence[Instruction]) -> list[str]:
    """Instructions that read a uniform register which no path has written, one line each.

    Those with a guard are left out: what they read may have been written under the same guard. So are `SPILL` and
    copies that are overwritten unread: ptxas copies both words of a pair where it needs one.
    """
    found = []
    unread = overwritten_copies(code)
    for instruction, state in states(code):
        if instruction.guard or instruction.name == SPILL or instruction.address in unread:
            continue
        missing = [name for name in _uniform_reads(instruction) if name not in state]
        if missing:
            found.append(f"{instruction}: {', '.join(missing)} was not written")
    return found


def overwritten_copies(code: Sequence[Instruction]) -> set[int]:
    """The addresses of UMOVs of whose register the next mention writes it, ahead of any jump and any bracket, which may
    read it as the second of a pair."""
    return {
        instruction.address
        for place, instruction in enumerate(code)
        if instruction.name == "UMOV" and _is_overwritten(code[place + 1 :], instruction.operands[0].text)
    }


def _is_overwritten(following: Sequence[Instruction], register: str) -> bool:
    """Whether what follows writes the register and surely has not read it until then."""
    for instruction in following:
        goal, *sources = [operand.text for operand in instruction.data] or [""]
        if instruction.guard or instruction.base in JUMPS or any("[UR" in text for text in (goal, *sources)):
            return False
        if any(register in text for text in sources):
            return False
        if goal == register:
            return True
    return False


def _uniform_reads(instruction: Instruction) -> Iterator[str]:
    """The uniform registers that stand as operands of their own; what brackets hold is left out."""
    data = instruction.data
    writes = instruction.base.startswith("U") or instruction.base in DESTINATIONS
    for operand in data[1:] if writes else data:
        if operand.file == "UR" and operand.number is not None:
            yield from (f"UR{operand.number + word}" for word in range(_words_read(instruction, operand)))


def _words_read(instruction: Instruction, operand: Operand) -> int:
    return words_written(instruction) if instruction.name == "UIADD3.64" or ".64" in operand.text else 1
