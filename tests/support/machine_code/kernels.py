"""What the compiler made of a kernel for Hopper, as tests of its instructions read it."""

import re
from bisect import bisect_left
from pathlib import Path
from typing import Any

import triton

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.compiler import options_of, source_of
from tests.support.machine_code.sass import listed


def machine_code(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, folder: Path
) -> list[tuple[int, str]]:
    """(address, instruction) of all that a kernel is for compute capability 9.0.

    The folder is written to.
    """
    from triton.backends.compiler import GPUTarget

    spec = kernel.compile_spec(config, shape)
    compiled: Any = triton.compile(source_of(spec), target=GPUTarget("cuda", 90, 32), options=options_of(spec))
    cubin = folder / "listed.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return listed(cubin)


def loops(code: list[tuple[int, str]]) -> list[list[tuple[int, str]]]:
    """From the goal of every jump back to the jump, in the order of the jumps; inner loops are parts of outer ones."""
    found, addresses = [], [address for address, _ in code]
    for place, (address, text) in enumerate(code):
        jump = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < address:
            found.append(code[bisect_left(addresses, int(jump[1], 16)) : place + 1])
    return found


def mnemonic(instruction: str) -> str:
    """Without its predicate and operands."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]
