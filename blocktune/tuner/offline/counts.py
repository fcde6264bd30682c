"""Bytes and operations of compiled code for each block, counted in its PTX: exact where the code has no loop.

Masks are taken to let everything pass, and a value that several threads load counts for each of them.
"""

import re
from dataclasses import dataclass

from blocktune.kernels.hardware.limits import WARP_SIZE

_LABEL = re.compile(r"^\s*(\$\w+):", re.MULTILINE)
_BRANCH = re.compile(r"\bbra(?:\.\w+)*\s+(\$\w+)")
_ACCESS = re.compile(r"\b(?:ld|st)\.global((?:\.[\w:]+)*)\.[bsuf](8|16|32|64)\b")
_VECTOR = re.compile(r"\.v([248])(?:\.|$)")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global(?:\.[\w:]+)*\s*\[[^\]]*\],\s*\[[^\]]*\],\s*(0x[0-9a-f]+|\d+)")
_PRODUCT = re.compile(r"\b(wgmma\.mma_async|mma)\.sync\.aligned(?:\.\w+)*?\.m(\d+)n(\d+)k(\d+)")
_UNCOUNTED = re.compile(r"\bcp\.async\.bulk|\btcgen05\.|\b(?:atom|red)\.global")

WARPS_OF_A_PRODUCT = {"wgmma.mma_async": 4, "mma": 1}


@dataclass(frozen=True, slots=True)
class CodeCounts:
    """Bytes to and from device memory, and floating-point operations of matrix products, of one block."""

    bytes: int
    flops: int


def counts_in(ptx: str, num_warps: int) -> CodeCounts | None:
    """Return what a block moves and computes; None where the text does not tell: a loop, bulk copies or atomics, or no
    text at all."""
    if not ptx or _has_loop(ptx) or _UNCOUNTED.search(ptx):
        return None
    per_thread = sum(_bytes_of(modifiers, int(bits)) for modifiers, bits in _ACCESS.findall(ptx))
    per_thread += sum(int(size, 0) for size in _COPY.findall(ptx))
    flops = sum(
        2 * int(m) * int(n) * int(k) * num_warps // WARPS_OF_A_PRODUCT[name] for name, m, n, k in _PRODUCT.findall(ptx)
    )
    return CodeCounts(bytes=per_thread * WARP_SIZE * num_warps, flops=flops)


def _has_loop(ptx: str) -> bool:
    """Return whether a branch leads back to a label before it."""
    labels = {match[1]: match.start() for match in _LABEL.finditer(ptx)}
    return any(labels.get(match[1], len(ptx)) < match.start() for match in _BRANCH.finditer(ptx))


def _bytes_of(modifiers: str, bits: int) -> int:
    vector = _VECTOR.search(modifiers)
    return (int(vector[1]) if vector else 1) * bits // 8
