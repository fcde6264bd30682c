"""Accesses of a kernel's compiled loop to shared memory: how many accesses, and how many wavefronts they take.

    found = shared_accesses(compiled.asm["ptx"])
    found.loads, found.load_wavefronts       # of a warp in a round of its loop: 112 and 704 on a card of 2018
    found.ways, found.conflict_share         # 6.3 wavefronts per load, 64 % of them by bank conflicts

The addresses of a warp's 32 lanes are computed from the assembly (`tuner/occupancy/lane_values.py`) and counted by
`tuner/occupancy/bank_conflicts.py`. ptxas joins neighbouring words of a lane into accesses of 8 and 16 bytes, and so
does this. Products of wgmma and tcgen05 read shared memory through descriptors, in which there is nothing to count.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from blocktune.tuner.occupancy.bank_conflicts import Wavefronts, wavefronts
from blocktune.tuner.occupancy.lane_values import LaneValues

_ACCESS = re.compile(
    r"\b(?P<what>ld|st)(?:\.\w+)*?\.shared(?:::cta)?(?:\.\w+)*?(?:\.v(?P<vector>[24]))?\.[busf](?P<bits>8|16|32|64)\s"
)
_MATRICES = re.compile(r"\b(?P<what>ld|st)matrix\.\S*\.x(?P<count>[124])\b")
_ASYNCHRONOUS = re.compile(r"\bcp\.async\.c[ag]\.shared\S*\s+\[[^]]*\],\s*\[[^]]*\],\s*(?P<bytes>\w+)")
_ADDRESS = re.compile(r"\[\s*(%\w+|\w+)\s*(?:\+\s*(-?\w+)\s*)?\]")
_LABEL = re.compile(r"^(\$\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
_PRODUCT = re.compile(r"\b(?:fma\.rn|mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
_BARRIER = re.compile(r"\b(?:bar|barrier)\.")
MATRIX_ROW_BYTES, MATRIX_ROWS = 16, 8
JOINED_BYTES = (16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAccesses:
    """One warp's accesses in one round of the loop that computes the products.

    loads and stores count instructions. Their excess is what conflicts of banks add to the wavefronts that the widths
    of the accesses need.
    """

    loads: int = 0
    load_wavefronts: int = 0
    load_excess: int = 0
    stores: int = 0
    store_wavefronts: int = 0
    store_excess: int = 0

    @property
    def wavefronts(self) -> int:
        """Of loads and stores."""
        return self.load_wavefronts + self.store_wavefronts

    @property
    def ways(self) -> float:
        """Return the wavefronts per load, the mean n of an n-way conflict; 0 without loads."""
        return self.load_wavefronts / self.loads if self.loads else 0.0

    @property
    def conflict_share(self) -> float:
        """The share of the loads' wavefronts that conflicts add."""
        return self.load_excess / self.load_wavefronts if self.load_wavefronts else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def report(self) -> dict[str, Any]:
        """Return the counts, with what follows from them."""
        return self.to_json() | {"ways": self.ways, "conflict_share": self.conflict_share}

    @classmethod
    def of(cls, loads: Sequence[Wavefronts], stores: Sequence[Wavefronts]) -> Self:
        return cls(
            loads=len(loads),
            load_wavefronts=sum(one.total for one in loads),
            load_excess=sum(one.excess for one in loads),
            stores=len(stores),
            store_wavefronts=sum(one.total for one in stores),
            store_excess=sum(one.excess for one in stores),
        )


@dataclass(frozen=True, slots=True)
class _Access:
    """An instruction: which register and offset it takes its address from, and what every lane moves."""

    loads: bool
    base: str
    offset: int
    lane_bytes: int
    lanes: int = 32
    joins: bool = True


def shared_accesses(ptx: str) -> SharedAccesses:
    """Return what the loop of a kernel's products asks of shared memory; accesses whose addresses depend on data, or on
    what this does not understand, are left out."""
    lines = ptx.splitlines()
    values = LaneValues(lines)
    first, last = _hot_loop(lines)
    counted: dict[bool, list[Wavefronts]] = {True: [], False: []}
    for block in _basic_blocks(lines[first:last]):
        for access in _joined(block, values):
            addresses = values.addresses(access.base, access.offset)
            if addresses is not None:
                counted[access.loads].append(wavefronts(addresses[: access.lanes], access.lane_bytes))
    return SharedAccesses.of(counted[True], counted[False])


def _hot_loop(lines: Sequence[str]) -> tuple[int, int]:
    """Return the lines of the innermost loop with the most products; all lines where nothing loops."""
    labels = {found[1]: place for place, line in enumerate(lines) if (found := _LABEL.match(line.strip()))}
    branches = ((labels.get(found[1]), place) for place, line in enumerate(lines) if (found := _BRANCH.search(line)))
    loops = [(start, end + 1) for start, end in branches if start is not None and start < end]
    innermost = [
        (start, end)
        for start, end in loops
        if not any(start <= a and b < end and (a, b) != (start, end) for a, b in loops)
    ]
    products = [place for place, line in enumerate(lines) if _PRODUCT.search(line)]
    return max(
        innermost, key=lambda loop: sum(loop[0] <= place < loop[1] for place in products), default=(0, len(lines))
    )


def _basic_blocks(lines: Iterable[str]) -> Iterator[list[_Access]]:
    """Yield the accesses between two lines that nothing is moved across: labels of branches, branches and barriers."""
    block: list[_Access] = []
    for line in lines:
        text = line.strip()
        if (_LABEL.match(text) and "__BB" not in text) or text.startswith("//"):
            continue  # of debug information
        if _LABEL.match(text) or _BRANCH.search(text) or _BARRIER.search(text):
            yield block
            block = []
        access = _access(text)
        if access is not None:
            block.append(access)
    yield block


def _access(text: str) -> _Access | None:
    """Return the access to shared memory that an instruction is, or None."""
    address = _ADDRESS.search(text)
    if address is None:
        return None
    base, offset = address[1], int(address[2] or "0", 0)
    if found := _ACCESS.search(text):
        width = int(found["bits"]) // 8 * int(found["vector"] or 1)
        return _Access(found["what"] == "ld", base, offset, width)
    if found := _MATRICES.search(text):
        lanes = MATRIX_ROWS * int(found["count"])
        return _Access(found["what"] == "ld", base, offset, MATRIX_ROW_BYTES, lanes, joins=False)
    if found := _ASYNCHRONOUS.search(text):
        return _Access(False, base, offset, int(found["bytes"], 0), joins=False)
    return None


def _joined(block: Sequence[_Access], values: LaneValues) -> Iterator[_Access]:
    """Yield the accesses of a block as the assembler makes them: neighbouring bytes of a lane together."""
    apart: dict[tuple[bool, str], set[int]] = {}
    for access in block:
        if not access.joins:
            yield access
            continue
        bytes_ = range(access.offset, access.offset + access.lane_bytes)
        apart.setdefault((access.loads, access.base), set()).update(bytes_)
    for (loads, base), wanted in apart.items():
        yield from _widest(loads, base, wanted, values)


def _widest(loads: bool, base: str, wanted: set[int], values: LaneValues) -> Iterator[_Access]:
    """Yield the fewest accesses that move these bytes, each aligned to its width in every lane."""
    addresses = values.addresses(base, 0)
    if addresses is None:
        return
    left = set(wanted)
    while left:
        offset = min(left)
        width = next(
            width
            for width in JOINED_BYTES
            if all((address + offset) % width == 0 for address in addresses)
            and left.issuperset(range(offset, offset + width))
        )
        left.difference_update(range(offset, offset + width))
        yield _Access(loads, base, offset, width)
