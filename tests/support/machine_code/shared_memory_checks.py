"""Illegal tiles in shared memory: what the copy engine, barriers and tensor cores cannot work with.

A tile's address must be a multiple of what its swizzle repeats after; a barrier must expect as many bytes as are copied
for it; a descriptor's block must fit the swizzle; and no two things that are alive at once may overlap.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.hardware.device import ComputeLimits
from tests.support.machine_code.shared_memory_ir import ELEMENT_BITS, Memory, Operation, Region, allocated, parsed

COPIES = ("ttng.async_tma_copy_global_to_local", "ttng.async_tma_gather")
STORES = ("ttng.async_tma_copy_local_to_global", "ttng.async_tma_reduce")
PRODUCTS = ("ttng.warp_group_dot", "ttng.tc_gen5_mma")
VIEWS = ("ttg.memdesc_index", "ttg.memdesc_subslice", "ttg.memdesc_trans", "ttg.memdesc_reinterpret")
BARRIER_BYTES = 8
MAX_BOX = 256
"""Elements of a copy along one dimension (CUDA driver API, cuTensorMapEncodeTiled)."""
SLICE = re.compile(r"memdesc_subslice %\w+\[([\d, ]+)\]")


@dataclass(frozen=True, slots=True)
class Buffer:
    """An allocation: its first byte, its type, and where it was made."""

    offset: int
    memory: Memory
    made_by: Operation

    @property
    def end(self) -> int:
        return self.offset + self.memory.bytes

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.memory.sizes))
        return f"{sizes} {self.memory.element} at {self.offset}..{self.end}"


@dataclass(frozen=True, slots=True)
class Place:
    """Part of a buffer: its address is `offset` plus any multiples of `steps`; path tells parts apart."""

    buffer: Buffer
    offset: int
    steps: tuple[int, ...] = ()
    path: str = ""


Places = dict[str, tuple[Place, ...]]
"""Where in shared memory the names of a region may be."""


def illegal_tiles(compiled: Any, limits: ComputeLimits) -> list[str]:
    """All that is illegal in what Triton compiled for this compute capability, one line each."""
    found = descriptor_problems(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    sizes = (
        (compiled.metadata.shared, limits.shared_per_block_optin_bytes, "B of shared memory"),
        (getattr(compiled.metadata, "tmem_size", 0) or 0, limits.tensor_memory_columns, "columns of tensor memory"),
    )
    found += [f"{used} {what} are more than the {most} that there are" for used, most, what in sizes if used > most]
    return found + memory_problems(parsed(allocated(compiled, limits.sm_arch)))


def memory_problems(regions: Sequence[Region]) -> list[str]:
    """What is illegal in the allocated IR."""
    found: list[str] = []
    places: dict[int, Places] = {}
    for region in regions:
        known = places.get(id(region.parent), {}) if region.parent is not None else {}
        outer = {inner: known[name] for inner, name in region.captured.items() if name in known}
        here = places[id(region)] = _places(region, outer if region.captured else known)
        found += [problem for operation in region.operations() for problem in _misplaced(operation, here)]
        found += _wrong_expectations(region, here)
        found += _overlaps(region, here)
    return list(dict.fromkeys(found))


def descriptor_problems(descriptors: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """What is illegal in the blocks of tensor descriptors, as the launcher encodes them."""
    found = []
    for number, descriptor in enumerate(each for each in descriptors if each is not None):
        block, element_bytes = descriptor["block_size"], descriptor["elem_size"]
        swizzle, inner = (0, 32, 64, 128)[descriptor["swizzle"]], block[-1] * element_bytes
        if any(not 0 < size <= MAX_BOX for size in block):
            found.append(f"descriptor {number}: a block of {block} is larger than {MAX_BOX} along a dimension")
        if swizzle and inner > swizzle:
            found.append(f"descriptor {number}: rows of {inner} B are wider than a swizzle of {swizzle} B")
        if inner % 16:
            found.append(f"descriptor {number}: rows of {inner} B are no multiple of 16 B")
    return found


def _places(region: Region, outer: Mapping[str, tuple[Place, ...]]) -> Places:
    """The places of all names of a region; a name that a block is given may stand for several."""
    here = dict(outer)
    known = -1
    while known != sum(map(len, here.values())):
        known = sum(map(len, here.values()))
        for block in region.blocks.values():
            for operation in block.operations:
                if operation.name == "ttg.local_alloc" and operation.offset is not None:
                    buffer = Buffer(operation.offset, operation.memories[-1], operation)
                    here[operation.results[0]] = (Place(buffer, buffer.offset),)
                elif operation.name in VIEWS and operation.operands[0] in here:
                    here[operation.results[0]] = tuple(_view(operation, base) for base in here[operation.operands[0]])
            for goal, given in block.goals:
                for name, argument in zip(given, region.blocks[goal].arguments, strict=False):
                    if name in here:
                        here[argument] = tuple(dict.fromkeys((*here.get(argument, ()), *here[name])))
    return here


def _view(operation: Operation, base: Place) -> Place:
    memory = operation.memories[-1]
    path = f"{base.path}/{operation.operands[1]}" if operation.name == "ttg.memdesc_index" else base.path
    if operation.name == "ttg.memdesc_index":
        return Place(base.buffer, base.offset, (*base.steps, memory.bytes), path)
    if (match := SLICE.search(operation.text)) is None:
        return Place(base.buffer, base.offset, base.steps, path)
    *rows, column = (int(number) for number in match[1].split(","))
    whole, row_bytes = operation.memories[0], memory.sizes[-1] * ELEMENT_BITS[memory.element] // 8
    shift = _slice_shift(whole, rows[-1] if rows else 0, column)
    return Place(base.buffer, base.offset + shift, base.steps, f"{path}[{match[1]}]{row_bytes}")


def _slice_shift(whole: Memory, row: int, column: int) -> int:
    """Bytes from a matrix's first element to another. Where a row is wider than the swizzle the matrix is cut into
    panels as wide as that, one after another."""
    column_bytes = column * ELEMENT_BITS[whole.element] // 8
    row_bytes = whole.sizes[-1] * ELEMENT_BITS[whole.element] // 8
    panel_bytes = min(whole.swizzle_bytes or row_bytes, row_bytes)
    panels, within = divmod(column_bytes, panel_bytes)
    return panels * whole.sizes[-2] * panel_bytes + row * panel_bytes + within if len(whole.sizes) > 1 else column_bytes


def _misplaced(operation: Operation, here: Mapping[str, tuple[Place, ...]]) -> Iterator[str]:
    """Addresses that an operation cannot work with."""
    used = [place for name in operation.operands for place in here.get(name, ())]
    if operation.name in (*COPIES, *STORES, *PRODUCTS):
        tiles = [memory for memory in operation.memories if memory.tensor_core]
        barriers = [memory for memory in operation.memories if memory.element == "i64"]
        if len(tiles) + len(barriers) > len(used):
            yield f"{operation.name}: it uses memory whose place is not known: {operation.text[:120]}"
    for place in used:
        memory = place.buffer.memory
        if memory.element == "i64" and (place.offset % BARRIER_BYTES or any(s % BARRIER_BYTES for s in place.steps)):
            yield f"{operation.name}: a barrier at {place.offset} is no multiple of {BARRIER_BYTES} B"
        elif memory.element != "i64" and operation.name in (*COPIES, *STORES, *PRODUCTS):
            yield from _unaligned(operation, place)


def _unaligned(operation: Operation, place: Place) -> Iterator[str]:
    memory = place.buffer.memory
    repeat, row = memory.repeat_bytes, memory.swizzle_bytes if operation.name in PRODUCTS else 0
    for address in (place.offset, *place.steps):
        if address % repeat >= max(1, row) or address % 16:
            yield (
                f"{operation.name}: {place.buffer} is used at {place.offset} plus multiples of {place.steps}, and a "
                f"swizzle of {memory.swizzle_bytes} B begins again every {repeat} B"
            )


def _wrong_expectations(region: Region, here: Mapping[str, tuple[Place, ...]]) -> Iterator[str]:
    """Arrays of barriers that expect other than what is copied for them.

    A barrier expects the copies that follow until it expects again. Where these stand in other blocks, or another name
    stands for the same barrier, what is expected must still be the sum of some copies for this array.
    """
    expected, copied = _transfers(region, here)
    for array in sorted({key[0] for key in (*expected, *copied)}):
        wanted = {key[1]: sizes for key, sizes in expected.items() if key[0] == array}
        given = {key[1]: sizes for key, sizes in copied.items() if key[0] == array}
        if wanted == {path: [sum(sizes) for sizes in groups] for path, groups in given.items()}:
            continue
        sizes = [size for groups in given.values() for group in groups for size in group]
        wrong = {size for group in wanted.values() for size in group} - _sums(sizes)
        if wrong or not wanted:
            yield f"the barriers at {array} expect {wrong or 'nothing'} B, and {sizes} B are copied for them"


def _transfers(
    region: Region, here: Mapping[str, tuple[Place, ...]]
) -> tuple[dict[tuple[int, str], list[int]], dict[tuple[int, str], list[list[int]]]]:
    """By barrier, what it expects every time, and the sizes of the copies that follow each of these."""
    expected: dict[tuple[int, str], list[int]] = {}
    copied: dict[tuple[int, str], list[list[int]]] = {}
    for operation in region.operations():
        if operation.name == "ttng.barrier_expect" and operation.operands[0] in here:
            key = _key(here[operation.operands[0]][0])
            number = re.search(r"barrier_expect %\w+, (\d+)", operation.text)
            expected.setdefault(key, []).append(int(number[1]) if number else 0)
            copied.setdefault(key, []).append([])
        elif operation.name in COPIES:
            for key in (_key(here[name][0]) for name in operation.operands if _is_barrier(here.get(name, ()))):
                copied.setdefault(key, [[]])[-1].append(operation.memories[-1].bytes)
    return expected, copied


def _sums(sizes: Sequence[int]) -> set[int]:
    """The sums of some of these sizes."""
    found = {0}
    for size in sizes:
        found |= {size + other for other in found}
    return found - {0}


def _is_barrier(places: Sequence[Place]) -> bool:
    return any(place.buffer.memory.element == "i64" for place in places)


def _key(place: Place) -> tuple[int, str]:
    return place.buffer.offset, place.path


def _overlaps(region: Region, here: Mapping[str, tuple[Place, ...]]) -> Iterator[str]:
    """Buffers that share bytes while both are alive, and scratch memory that begins in a live buffer."""
    for operation, living in _alive(region, here):
        made = here[operation.results[0]][0].buffer if operation.name == "ttg.local_alloc" else None
        start, end = (made.offset, made.end) if made else (operation.offset, (operation.offset or 0) + 1)
        if start is None or operation.name == "ttg.warp_specialize":
            continue
        for other in living:
            if other is not made and start < other.end and other.offset < (end or 0):
                yield f"{operation.name}: {made or f'scratch memory at {start}'} overlaps {other}, which is alive"


def _alive(region: Region, here: Mapping[str, tuple[Place, ...]]) -> Iterator[tuple[Operation, list[Buffer]]]:
    """Operations that get memory, with the buffers that are used later on some path and made before."""
    for label, ends in _live_ends(region, here).items():
        living = set(ends)
        for operation in reversed(region.blocks[label].operations):
            made = _made(operation, here)
            if operation.offset is not None:
                yield operation, [here[name][0].buffer for name in living]
            living -= made
            living |= _used(operation, here)


def _live_ends(region: Region, here: Mapping[str, tuple[Place, ...]]) -> dict[str, set[str]]:
    """For every block, the buffers by name that what follows it uses."""
    begins: dict[str, set[str]] = {label: set() for label in region.blocks}
    changed = True
    while changed:
        changed = False
        for label, block in region.blocks.items():
            living = set().union(*(begins[goal] for goal, _ in block.goals), set())
            for operation in reversed(block.operations):
                living -= _made(operation, here)
                living |= _used(operation, here)
            changed |= living != begins[label]
            begins[label] = living
    return {
        label: set().union(*(begins[goal] for goal, _ in block.goals), set()) for label, block in region.blocks.items()
    }


def _made(operation: Operation, here: Mapping[str, tuple[Place, ...]]) -> set[str]:
    return set(operation.results) if operation.name == "ttg.local_alloc" else set()


def _used(operation: Operation, here: Mapping[str, tuple[Place, ...]]) -> set[str]:
    """The names of the buffers that an operation uses, through views or not."""
    buffers = [place.buffer for name in operation.operands for place in here.get(name, ())]
    return {buffer.made_by.results[0] for buffer in buffers if here.get(buffer.made_by.results[0])}
