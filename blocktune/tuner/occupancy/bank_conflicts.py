"""Bank conflicts of shared memory: how often banks are read for one access of a warp, and what removes the conflicts.

    walk = column_walk(rows=16, row_bytes=256)               # the lanes read down a column of a tile
    wavefronts(walk).degree                                  # 16: a 16-way conflict
    wavefronts(column_walk(16, padded(256))).degree          # 1
    wavefronts(xor_swizzled(walk, row_bytes=256)).degree     # 2

Shared memory has 32 banks; bank = (byte address / 4) mod 32, and each delivers one 4-byte word a cycle to any number of
lanes (CUDA C++ Programming Guide, "Shared Memory" of compute capability 5.x; later ones behave alike). A warp whose
lanes access 8 or 16 bytes each is served in phases of half or a quarter of its lanes; of twice as many, where all lanes
agree in pairs (each with its neighbour, or with the one beyond), so that the words of a phase fit the 128 bytes that
come back (NVIDIA on its developer forum, "Unexpected shared memory bank conflict", for compute capability 7.x). A phase
takes as many **wavefronts** as its busiest bank has distinct words to deliver: the degree of the conflict.

Triton's own layouts for operands of matrix instructions are swizzled and rarely conflict; those of plain multiply-adds
are not (`tuner/occupancy/shared_accesses.py` counts compiled code). `tests/tuner/occupancy/test_bank_conflicts.py`
compares the degrees with the compiler's own count, and the wavefronts with a profiler's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.hardware.limits import WARP_SIZE
from blocktune.kernels.values.errors import UsageError

BANKS = 32
WORD_BYTES = 4
PHASE_BYTES = BANKS * WORD_BYTES
ACCESS_BYTES = (1, 2, 4, 8, 16)
"""Of one lane: what a load or store instruction can move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wavefronts:
    """The wavefronts of one warp access. phases: the wavefronts of each phase in turn."""

    phases: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.phases)

    @property
    def degree(self) -> int:
        """Return n of an n-way conflict; 1 means that there is no conflict."""
        return max(self.phases)

    @property
    def excess(self) -> int:
        """Wavefronts beyond the one that every phase needs."""
        return self.total - len(self.phases)

    @property
    def efficiency(self) -> float:
        """The fewest wavefronts that this width needs over those it takes, 1.0 without conflicts."""
        return len(self.phases) / self.total

    def to_json(self) -> dict[str, Any]:
        return {
            "phases": list(self.phases),
            "total": self.total,
            "degree": self.degree,
            "efficiency": self.efficiency,
        }


def wavefronts(addresses: Sequence[int], access_bytes: int = WORD_BYTES) -> Wavefronts:
    """Return the wavefronts of one load or store of a warp.

    Args:
        addresses: byte address of every lane that takes part, in lane order, 1 to 32 of them.
        access_bytes: of one lane; addresses are multiples of it, as the hardware requires.

    Raises:
        UsageError: no instruction has this width, an address is not aligned to it, or there are too few or too many
            lanes.
    """
    _check(addresses, access_bytes)
    lanes = min(WARP_SIZE, PHASE_BYTES // access_bytes * (2 if _agree_in_pairs(addresses) else 1))
    phases = (addresses[first : first + lanes] for first in range(0, len(addresses), lanes))
    return Wavefronts(phases=tuple(_degree(phase, access_bytes) for phase in phases))


def column_walk(rows: int, row_bytes: int, *, column_bytes: int = 0) -> tuple[int, ...]:
    """Return the addresses of 32 lanes that go down a column: lane i reads row i mod `rows`, so that lanes of equal
    rows ask for the same word, which the bank broadcasts.

    Args:
        rows: distinct rows, 1 to 32.
        row_bytes: stride from one row to the next.
        column_bytes: where in the row.
    """
    return tuple(lane % rows * row_bytes + column_bytes for lane in range(WARP_SIZE))


def padded(row_bytes: int, access_bytes: int = WORD_BYTES) -> int:
    """Return the row stride with one access more: rows then start in different banks, at the price of unused memory."""
    return row_bytes + access_bytes


def xor_swizzled(addresses: Sequence[int], row_bytes: int, *, unit_bytes: int = 16, phases: int = 8) -> tuple[int, ...]:
    """Return where the same elements are in a tile whose units are permuted within each row: unit u of row r is kept in
    unit u xor (r mod `phases`). It takes no memory.

    Args:
        addresses: in the tile without swizzle, from its start.
        row_bytes: of the tile; a power of two.
        unit_bytes: what stays together, the width of the widest access.
        phases: rows until the permutation repeats; a power of two.

    Raises:
        UsageError: a row has fewer units than the permutation needs, or a size is not a power of two.
    """
    if any(size < 1 or size & (size - 1) for size in (row_bytes, unit_bytes, phases)):
        raise UsageError(
            f"The sizes of a swizzle must be powers of two, but got row_bytes={row_bytes}, unit_bytes={unit_bytes}, "
            f"phases={phases}."
        )
    if row_bytes < unit_bytes * phases:
        raise UsageError(
            f"`row_bytes >= unit_bytes * phases` must hold, but got {row_bytes} < {unit_bytes} * {phases}: the "
            "permutation would leave the row. Use fewer phases."
        )
    return tuple(address ^ (address // row_bytes % phases * unit_bytes) for address in addresses)


def _agree_in_pairs(addresses: Sequence[int]) -> bool:
    """Return whether every lane has the address of lane i xor 1, or every lane that of lane i xor 2."""
    return any(
        all(
            addresses[lane] == addresses[lane ^ apart]
            for lane in range(len(addresses))
            if lane ^ apart < len(addresses)
        )
        for apart in (1, 2)
        if len(addresses) > apart
    )


def _check(addresses: Sequence[int], access_bytes: int) -> None:
    if access_bytes not in ACCESS_BYTES:
        raise UsageError(f"`access_bytes` must be one of {', '.join(map(str, ACCESS_BYTES))}, but got {access_bytes}.")
    if not 1 <= len(addresses) <= WARP_SIZE:
        raise UsageError(f"A warp must have 1 to {WARP_SIZE} active lanes, but got {len(addresses)} addresses.")
    wrong = [address for address in addresses if address < 0 or address % access_bytes]
    if wrong:
        raise UsageError(f"Addresses must be multiples of the {access_bytes} bytes of an access, but got {wrong[0]}.")


def _degree(addresses: Sequence[int], access_bytes: int) -> int:
    """Return distinct words in the busiest bank."""
    words = {
        word
        for address in addresses
        for word in range(address // WORD_BYTES, -(-(address + access_bytes) // WORD_BYTES))
    }
    banks = [word % BANKS for word in words]
    return max(banks.count(bank) for bank in set(banks))
