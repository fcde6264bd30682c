"""What Triton places where in shared memory: its IR after the allocation, read as buffers and the operations on them.

The operations stand in blocks; those of a warp specialisation stand in regions of their own, whose arguments are what
the specialisation captures.
"""

import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ALIAS = re.compile(r"^(#\w+) = #ttg\.(\w+)<\{(.*)\}>$", re.MULTILINE)
SWIZZLE = re.compile(r"swizzlingByteWidth = (\d+)")
MEMORY = re.compile(r"!ttg\.memdesc<((?:\d+x)+)(\w+), (#\w+), #smem[^>]*>")
OPERATION = re.compile(r"^(?:(%[\w:#, %]+?) = )?\"?([a-z_]+\.[\w.]+)\"?(.*)$")
NAME = re.compile(r"%\w+(?:#\d+)?")
OFFSET = re.compile(r"allocation\.offset = (\d+)")
LABEL = re.compile(r"^\^(bb\d+)(?:\((.*)\))?:")
GOAL = re.compile(r"\^(bb\d+)(?:\(([^:)]*))?")
PARTITION = re.compile(r"^(default|partition\d+\((.*)\) num_warps\(\d+\)) \{$")
ELEMENT_BITS = {"bf16": 16, "f16": 16, "f32": 32, "i64": 64, "i32": 32, "i8": 8, "i1": 8, "f8E4M3FN": 8, "i16": 16}


@dataclass(frozen=True, slots=True)
class Memory:
    """A type: rows and columns of elements in shared memory. swizzle_bytes: 0 without one; tensor_core: whether it is a
    layout of the copy engine and wgmma."""

    sizes: tuple[int, ...]
    element: str
    swizzle_bytes: int
    tensor_core: bool

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * ELEMENT_BITS[self.element] // 8

    @property
    def repeat_bytes(self) -> int:
        """After so many bytes the swizzle begins again: what an address of it must be a multiple of."""
        return max(128, 8 * self.swizzle_bytes)


@dataclass(frozen=True, slots=True)
class Operation:
    """One line. operands: names in order; memories: the types in shared memory that it lists, results last."""

    name: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    memories: tuple[Memory, ...]
    offset: int | None
    text: str


@dataclass(slots=True)
class BasicBlock:
    arguments: tuple[str, ...]
    operations: list[Operation] = field(default_factory=list)
    goals: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """Which blocks may follow, and what their arguments are then."""


@dataclass(slots=True)
class Region:
    """Blocks by label, the entry first. captured: outer names by the names that stand for them here; parent: the region
    around it, whose names can be used as well unless there are captured ones."""

    parent: "Region | None" = None
    captured: dict[str, str] = field(default_factory=dict)
    blocks: dict[str, BasicBlock] = field(default_factory=dict)
    at: Operation | None = None
    """The operation of the parent that the region belongs to."""

    def operations(self) -> Iterator[Operation]:
        for block in self.blocks.values():
            yield from block.operations


def allocated(compiled: Any, arch: int) -> str:
    """The IR of a compiled kernel once shared memory is allocated, which Triton keeps no text of."""
    from triton._C.libtriton import ir, nvidia, passes
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget("cuda", arch, 32)).load_dialects(context)
    with tempfile.NamedTemporaryFile(suffix=".ttgir") as file:
        Path(file.name).write_text(compiled.asm["ttgir"])
        module = ir.parse_mlir_module(file.name, context)
    module.context = context  # which must outlive it
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, arch, ptx_version(compiled.asm["ptx"]))
    manager.run(module, "allocated")
    assert module.get_int_attr("ttg.shared") == compiled.metadata.shared
    return str(module.str_nodebug())


def ptx_version(ptx: str) -> int:
    """Such as 87 for `.version 8.7`, which chooses how layouts are converted."""
    match = re.search(r"^\.version (\d+)\.(\d+)$", ptx, re.MULTILINE)
    assert match is not None
    return int(match[1] + match[2])


def parsed(text: str) -> list[Region]:
    """The regions of a module, every one after the one that it belongs to."""
    layouts = {alias: (kind, body) for alias, kind, body in ALIAS.findall(text)}
    regions: list[Region] = []
    open_regions: list[Region] = []
    for line in _whole_operations(text):
        if line.startswith("tt.func") or PARTITION.match(line):
            open_regions.append(_opened(line, open_regions))
            regions.append(open_regions[-1])
        elif line.startswith("}"):
            del open_regions[-1:]
        elif open_regions:
            _read(line, open_regions[-1], layouts)
    return regions


def _whole_operations(text: str) -> Iterator[str]:
    """The lines of a module; an operation whose region computes single elements is one line without that region."""
    begun: list[str] = []
    for line in (each.strip() for each in text.splitlines()):
        if line.endswith("({"):
            begun.append(line.removesuffix("({"))
        elif begun and line.startswith("})"):
            whole = begun.pop() + line.removeprefix("})")
            if not begun:
                yield whole
        elif not begun:
            yield line


def _opened(line: str, around: list[Region]) -> Region:
    region = Region(blocks={"bb0": BasicBlock(())})
    if match := PARTITION.match(line):
        region.parent = around[-1]
        region.at = list(around[-1].blocks.values())[-1].operations[-1]
        arguments = NAME.findall(match[2] or "")
        region.captured = dict(zip(arguments, region.at.operands, strict=True)) if arguments else {}
    return region


def _read(line: str, region: Region, layouts: dict[str, tuple[str, str]]) -> None:
    if label := LABEL.match(line):
        region.blocks[label[1]] = BasicBlock(tuple(re.findall(r"(%\w+):", label[2] or "")))
        return
    match = OPERATION.match(line)
    if match is None:
        return
    block = list(region.blocks.values())[-1]
    operation = _operation(match, layouts, line)
    block.operations.append(operation)
    if operation.name.startswith("cf."):
        block.goals += [(goal, tuple(NAME.findall(given))) for goal, given in GOAL.findall(match[3])]


def _operation(match: "re.Match[str]", layouts: dict[str, tuple[str, str]], line: str) -> Operation:
    results = tuple(name.partition(":")[0] for name in (match[1] or "").split(", ") if name)
    memories = tuple(_memory(*found, layouts) for found in MEMORY.findall(line))
    offset = OFFSET.search(line)
    operands = tuple(name.partition("#")[0] for name in NAME.findall(match[3]))
    return Operation(match[2], results, operands, memories, int(offset[1]) if offset else None, line)


def _memory(sizes: str, element: str, alias: str, layouts: dict[str, tuple[str, str]]) -> Memory:
    kind, body = layouts.get(alias, ("", ""))
    swizzle = SWIZZLE.search(body)
    whole = tuple(int(size) for size in sizes.split("x") if size)
    return Memory(whole, element, int(swizzle[1]) if swizzle else 0, kind == "nvmma_shared")
