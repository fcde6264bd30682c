"""Inline assembly of integers, run by a warp of 32 lanes in PyTorch.

It knows what the assembly of kernels/hopper/biases/philox.py consists of. Registers are int64 with 32 or 64 bits of an
unsigned number, and predicates are booleans.
"""

import operator
import re
from collections.abc import Callable

import torch

Tensor = torch.Tensor
LANES = torch.arange(32)
WORD = (1 << 32) - 1
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "add": operator.add,
    "sub": operator.sub,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "mul.lo": operator.mul,
}
COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"lt": operator.lt, "ne": operator.ne, "ge": operator.ge}


class Warp:
    """The registers of a warp by their names, [32] each."""

    def __init__(self, operands: dict[int, Tensor]) -> None:
        self.registers = {f"${number}": value.long() & WORD for number, value in operands.items()}

    def value(self, name: str) -> Tensor:
        """Return a register, or a constant in every lane."""
        if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", name):
            return torch.full((32,), int(name, 0) & WORD)
        return self.registers[name]

    def run(self, assembly: str) -> None:
        """Execute what stands between the outer braces, declarations left out."""
        for text in assembly.strip().removeprefix("{").removesuffix("}").split(";"):
            line = text.strip()
            if line and not line.startswith(".reg"):
                self._execute(line)

    def _execute(self, line: str) -> None:
        guard, line = re.fullmatch(r"(?:@(!?\w+) )?(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
        name, rest = line.split(" ", 1)
        operands = [operand.strip() for operand in re.findall(r"\{[^}]*\}|[^,]+", rest)]
        target, sources = operands[0], operands[1:]
        if target.startswith("{"):
            low, high = target.strip("{}").split(",")
            wide = self.value(sources[0])
            self.registers |= {low.strip(): wide & WORD, high.strip(): wide >> 32 & WORD}
            return
        result = self._result(name, sources)
        if guard is not None:
            chosen = self.registers[guard.lstrip("!")] ^ guard.startswith("!")
            result = torch.where(chosen, result, self.registers[target])
        self.registers[target] = result

    def _result(self, name: str, sources: list[str]) -> Tensor:
        values = [self.value(source) for source in sources]
        stem = name.rsplit(".", 1)[0]
        if stem == "mov":
            return values[0]
        if stem == "mul.wide":
            return _product(*values)
        if stem == "selp":
            return torch.where(values[2], values[0], values[1])
        if stem == "shfl.sync.bfly":
            return values[0][LANES ^ values[1]]
        if stem == "lop3":
            return _by_table(values[:3], int(sources[3], 0))
        if stem.startswith("setp"):
            return COMPARISONS[stem.split(".")[1]](values[0], values[1])
        return OPERATIONS[stem](values[0], values[1]) & WORD


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return all 64 bits of a product; the sign of int64 is its highest bit."""
    return a * (b & 0xFFFF) + (a * (b >> 16) << 16)


def _by_table(values: list[Tensor], table: int) -> Tensor:
    """Return the bits that a table of eight gives for the bits of three words."""
    a, b, c = values
    result = torch.zeros_like(a)
    for place in range(8):
        if table >> place & 1:
            parts = (word if place >> bit & 1 else word ^ WORD for word, bit in ((a, 2), (b, 1), (c, 0)))
            first, second, third = parts
            result |= first & second & third
    return result
