"""The machine code of a cubin as nvdisasm lists it: instructions with their source lines, and the loops among them.

code = disassembled(compiled.asm["cubin"], nvdisasm)
loop = product_loop(code)           # the instructions of the innermost loop with the most matrix products
"""

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^(\.[\w$.]+):")
_GOAL = re.compile(r"\.[\w$.]+\b")
_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
_PREDICATE = re.compile(r"!?U?P\d")
_BRANCHES, _ENDS = frozenset(("BRA", "JMP", "BRX")), frozenset(("EXIT", "RET"))
_KNOWN_ROOTS = re.compile(r".*/(?=(?:blocktune|triton)/)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. guard: its predicate, empty without one; goals: the addresses that it may jump to; line: its
    source as `file:number`, empty where the code has no lines."""

    address: int
    guard: str
    name: str
    operands: str
    goals: tuple[int, ...]
    line: str

    @property
    def base(self) -> str:
        """The name without what qualifies it, such as `HGMMA`."""
        return self.name.partition(".")[0]

    @property
    def multiplies(self) -> bool:
        """Whether it is a product on tensor cores."""
        return self.base.endswith("MMA")

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may follow."""
        conditional = bool(self.guard) or _PREDICATE.match(self.operands) is not None
        return conditional or self.base not in _BRANCHES | _ENDS


def disassemble(cubin: bytes, nvdisasm: str) -> tuple[Instruction, ...]:
    """Return the instructions of a cubin, in order.

    Args:
        cubin: the binary.
        nvdisasm: path of NVIDIA's tool; Triton's wheel brings one.

    Raises:
        RuntimeError: the tool failed.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        found = subprocess.run([nvdisasm, "-g", "-c", file.name], capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"nvdisasm did not list the code: {found.stderr[:500]!r}")
    return parse_listing(found.stdout)


def parse_listing(listing: str) -> tuple[Instruction, ...]:
    """Return the instructions of a listing, in order."""
    rows: list[tuple[re.Match[str], str]] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    line = ""
    for text in listing.splitlines():
        if label := _LABEL.match(text):
            waiting.append(label[1])
        elif source := _LINE.search(text):
            line = f"{_KNOWN_ROOTS.sub('', source[1])}:{source[2]}"
        elif found := _INSTRUCTION.search(text):
            labels |= dict.fromkeys(waiting, int(found[1], 16))
            waiting = []
            rows.append((found, line))
    return tuple(_instruction(found, line, labels) for found, line in rows)


def _instruction(found: re.Match[str], line: str, labels: Mapping[str, int]) -> Instruction:
    name, operands = found[3], found[4].strip()
    jumps = name.partition(".")[0] in _BRANCHES
    goals = tuple(labels[label] for label in _GOAL.findall(operands) if label in labels) if jumps else ()
    return Instruction(int(found[1], 16), found[2] or "", name, operands, goals, line)


def product_loop(code: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Return the innermost loop with the most products on tensor cores; the one with the most instructions where there
    are none, and all of the code where nothing loops."""
    loops = list(loops_of(code))
    multiplying = [loop for loop in loops if any(one.multiplies for one in loop)] or loops
    innermost = [
        loop for loop in multiplying if not any(set(other) < set(loop) for other in multiplying)
    ]  # fmt: skip
    return max(innermost, key=lambda loop: (sum(one.multiplies for one in loop), len(loop)), default=tuple(code))


def loops_of(code: Sequence[Instruction]) -> Iterator[tuple[Instruction, ...]]:
    """Yield the loops: for every jump back to a place that all ways to it pass, what lies on a way between the two.

    Where a wait is written far from its loop, as ptxas does with those that rarely spin, it still belongs to the loop.
    """
    blocks, following = _blocks(code)
    before: dict[int, set[int]] = defaultdict(set)
    for number, after in enumerate(following):
        for goal in after:
            before[goal].add(number)
    dominators = _dominators(_reachable_blocks(following), before)
    loops: dict[int, set[int]] = defaultdict(set)
    for number, dominating in dominators.items():
        for head in following[number] & dominating:
            loops[head] |= _between(head, number, before)
    for inside in loops.values():
        yield tuple(one for block in sorted(inside) for one in blocks[block])


def _blocks(code: Sequence[Instruction]) -> tuple[list[Sequence[Instruction]], list[set[int]]]:
    """Return the code cut where something jumps or is jumped to, and for each block those that may follow."""
    place = {one.address: index for index, one in enumerate(code)}
    starts = {0} | {place[goal] for one in code for goal in one.goals if goal in place}
    starts |= {index + 1 for index, one in enumerate(code) if one.base in _BRANCHES | _ENDS}
    edges = sorted(start for start in starts if start < len(code))
    number = {start: count for count, start in enumerate(edges)}
    blocks = [code[start:stop] for start, stop in zip(edges, [*edges[1:], len(code)], strict=True)]
    following: list[set[int]] = []
    for count, block in enumerate(blocks):
        last = block[-1]
        after = {number[place[goal]] for goal in last.goals if goal in place}
        following.append(after | ({count + 1} if last.goes_on and count + 1 < len(blocks) else set()))
    return blocks, following


def _reachable_blocks(following: Sequence[set[int]]) -> list[int]:
    """Return the blocks that the first one leads to, in their order."""
    found, waiting = {0}, [0]
    while waiting:
        fresh = following[waiting.pop()] - found
        found |= fresh
        waiting += fresh
    return sorted(found)


def _dominators(reached: Sequence[int], before: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """Return for every block those that all ways from the first one to it pass, itself included."""
    found = {number: set(reached) for number in reached} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for number in reached[1:]:
            now = {number} | set.intersection(*(found[one] for one in before[number] if one in found))
            changed, found[number] = changed or now != found[number], now
    return found


def _between(head: int, last: int, before: Mapping[int, set[int]]) -> set[int]:
    """Return the blocks on a way from the head to the last one that does not pass the head again."""
    found, waiting = {head, last}, [last]
    while waiting:
        number = waiting.pop()
        fresh = before.get(number, set()) - found if number != head else set()
        found |= fresh
        waiting += fresh
    return found
