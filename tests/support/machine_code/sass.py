"""Machine code as nvdisasm lists it: instructions, their operands, and which may follow which."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+([^;]*);")
SCHEDULE = re.compile(r"\s+[&?]\w.*", re.DOTALL)
"""What newer listings say of waits and stalls after the operands."""
GUARD = re.compile(r"@(!?U?P\w+)\s+(.*)", re.DOTALL)
REGISTER = re.compile(r"([-~!]?)\|?(UR|R|UP|P)(\d+|[ZT])(?:\.\w+)*\|?")
NUMBER = re.compile(r"(-?)(0x[0-9a-f]+|\d+)")
COMMA = re.compile(r",(?![^\[]*\])")
BRANCHES, ENDS = frozenset(("BRA", "JMP")), frozenset(("EXIT", "RET"))


@dataclass(frozen=True)
class Operand:
    """A register, a number or, with neither, anything else. number: of the register, None for RZ, PT and their like.

    prefix: `-`, `~` or `!` of a register.
    """

    text: str
    file: str = ""
    number: int | None = None
    prefix: str = ""
    value: int | None = None

    @cached_property
    def is_data(self) -> bool:
        """Whether it is a register that holds data, not a predicate."""
        return self.file in ("R", "UR")

    @cached_property
    def is_predicate(self) -> bool:
        return self.file in ("P", "UP")


@dataclass(frozen=True)
class Instruction:
    """One line of the listing. name: such as `UIADD3.X`; guard: such as `!UP1`, empty without one."""

    address: int
    guard: str
    name: str
    operands: tuple[Operand, ...]

    @cached_property
    def base(self) -> str:
        return self.name.partition(".")[0]

    @cached_property
    def data(self) -> tuple[Operand, ...]:
        """The operands without predicates."""
        return tuple(operand for operand in self.operands if not operand.is_predicate)

    def __str__(self) -> str:
        return f"{self.address:#06x} {self.name} {', '.join(operand.text for operand in self.operands)}"


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions that run one after another, and the numbers of the blocks that may follow."""

    code: tuple[Instruction, ...]
    following: tuple[int, ...]


def disassembled(cubin: bytes) -> list[Instruction]:
    """The instructions of a cubin, in order."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return [_instruction(address, text) for address, text in listed(Path(file.name))]


def parsed(listing: str) -> list[Instruction]:
    """The instructions of a listing, in order."""
    return [_instruction(address, text) for address, text in _lines(listing)]


def listed(cubin: Path) -> list[tuple[int, str]]:
    """Return (address, instruction) of everything in the file of a cubin.

    `cuobjdump -sass` starts nvdisasm too, with an analysis of the flow of data that is not shown and takes a quarter of
    the time. -pb: a jump shows the address of its goal.
    """
    from triton import knobs

    command = [knobs.nvidia.nvdisasm.path, "-pb", "-c", "-ndf", str(cubin)]
    return _lines(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _lines(listing: str) -> list[tuple[int, str]]:
    return [(int(address, 16), SCHEDULE.sub("", text).strip()) for address, text in LINE.findall(listing)]


def _instruction(address: int, text: str) -> Instruction:
    guarded = GUARD.fullmatch(text)
    guard, rest = (guarded[1], guarded[2]) if guarded else ("", text)
    name, _, operands = rest.partition(" ")
    return Instruction(address, guard, name, tuple(_operand(each.strip()) for each in COMMA.split(operands) if each))


@cache
def _operand(text: str) -> Operand:
    if register := REGISTER.fullmatch(text):
        number = int(register[3]) if register[3].isdigit() else None
        return Operand(text, register[2], number, register[1])
    if number := NUMBER.fullmatch(text):
        return Operand(text, value=int(number[2], 0) * (-1 if number[1] else 1))
    return Operand(text)


def blocks_of(code: Sequence[Instruction]) -> list[Block]:
    """The code cut where something jumps or is jumped to; the first block is the entry."""
    place = {instruction.address: index for index, instruction in enumerate(code)}
    starts = {0}
    for index, instruction in enumerate(code):
        goal = _goal(instruction)
        starts |= {place[goal]} if goal in place else set()
        starts |= {index + 1} if instruction.base in BRANCHES | ENDS | {"CALL"} else set()
    edges = sorted(start for start in starts if start < len(code))
    number = {start: count for count, start in enumerate(edges)}
    found = []
    for start, stop in zip(edges, [*edges[1:], len(code)], strict=True):
        after = [place[goal] for goal in _goals(code[stop - 1]) if goal in place]
        after += [stop] if _goes_on(code[stop - 1]) and stop < len(code) else []
        found.append(Block(tuple(code[start:stop]), tuple(number[index] for index in after)))
    return found


def _goal(instruction: Instruction) -> int | None:
    """Where a jump or call goes."""
    if instruction.base not in BRANCHES | {"CALL"}:
        return None
    return next((operand.value for operand in instruction.operands if operand.value is not None), None)


def _goals(instruction: Instruction) -> list[int]:
    goal = _goal(instruction)
    return [] if goal is None else [goal]


def _goes_on(instruction: Instruction) -> bool:
    """Whether the next instruction may follow."""
    conditional = bool(instruction.guard) or any(operand.is_predicate for operand in instruction.operands)
    return conditional or instruction.base not in BRANCHES | ENDS
