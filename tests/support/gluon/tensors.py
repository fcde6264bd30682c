"""Runs a Gluon kernel without partitions on the CPU: its own source, with stand-ins for tensors, pointers and memory.

gluon_machine.py does the same for kernels whose warps specialise. Register layouts are not modelled: they say which
thread holds what, and no result depends on it. Whatever is loaded or stored must lie in its tensor.
"""

import itertools
import random
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as real

from tests.support.gluon import machine as gluon_machine
from tests.support.gluon.assembly import ASSEMBLY
from tests.support.gluon.memory import I32

LAYOUTS = (
    "BlockedLayout",
    "DistributedLinearLayout",
    "DotOperandLayout",
    "NVMMADistributedLayout",
    "SliceLayout",
    "SwizzledSharedLayout",
)
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "abs": torch.abs,
    "exp2": torch.exp2,
    "log2": torch.log2,
    "permute": torch.permute,
    "reshape": torch.reshape,
    "max": torch.amax,
    "sum": torch.sum,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "where": torch.where,
}


class Tile:
    """A tensor of registers."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.shape, self.dtype = data, list(data.shape), data.dtype
        self.type = types.SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Tile":
        return Tile(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def __getitem__(self, place: Any) -> "Tile":
        return Tile(self.data[place])

    def item(self) -> float:
        return float(self.data)


def _plain(value: Any) -> Any:
    if isinstance(value, Tile):
        return value.data
    if isinstance(value, real.constexpr):
        return value.value
    return torch.tensor(int(value)) if isinstance(value, I32) else value


def _operator(name: str) -> Callable[[Tile, Any], Any]:
    def compute(self: Tile, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        if "floordiv" in name or "mod" in name:
            assert (self.data >= 0).all(), "division truncates on the GPU"
        return Tile(getattr(self.data, name)(_plain(other)))

    return compute


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "and"):
    setattr(Tile, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("add", "sub", "mul", "and"):
    setattr(Tile, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq"):
    setattr(Tile, f"__{_name}__", _operator(f"__{_name}__"))


class Pointer:
    """An address, or a tensor of them, in a tensor's memory."""

    def __init__(self, memory: torch.Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Pointer":
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return cls(whole, torch.tensor(tensor.storage_offset()))

    def __add__(self, step: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + _plain(step))

    def __getitem__(self, place: Any) -> "Pointer":
        return Pointer(self.memory, self.offset[place])

    def to(self, dtype: torch.dtype, bitcast: bool) -> "Pointer":
        assert bitcast
        ratio = dtype.itemsize // self.memory.element_size()
        assert (self.offset % ratio == 0).all()
        return Pointer(self.memory.view(dtype), self.offset // ratio)

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and which of them count, all of which lie in the memory."""
        mask = torch.tensor(True) if mask is None else torch.as_tensor(_plain(mask))
        offset, mask = torch.broadcast_tensors(self.offset, mask)
        assert ((offset >= 0) & (offset < self.memory.numel()))[mask].all(), "an address outside the tensor"
        return offset, mask


def load(pointer: Pointer, mask: Any = None, other: Any = 0, **hints: str) -> Any:
    del hints
    offset, mask = pointer.places(mask)
    found = torch.full(offset.shape, other, dtype=pointer.memory.dtype)
    found[mask] = pointer.memory[offset[mask]]
    if found.dim():
        return Tile(found)
    return float(found) if found.is_floating_point() else I32(found)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, mask = pointer.places(mask)
    value = torch.as_tensor(_plain(value), dtype=pointer.memory.dtype).expand(offset.shape)
    pointer.memory[offset[mask]] = value[mask]


def atomic_add(pointer: Pointer, value: int, sem: str) -> I32:
    assert sem == "acq_rel"
    before = load(pointer)
    store(pointer, int(before) + value)
    return I32(before)


class Shared:
    """A tile of shared memory, or a part of one. Floating-point numbers are NaN until something is stored."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.shape, self.dtype = data, list(data.shape), data.dtype

    def store(self, value: Tile) -> None:
        assert (self.shape, self.dtype) == (value.shape, value.dtype)
        self.data.copy_(value.data)

    def load(self, _: Any) -> Tile:
        return Tile(self.data.clone())

    def index(self, place: int) -> "Shared":
        assert 0 <= place < self.shape[0]
        return Shared(self.data[int(place)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.permute(*order))


def allocated(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
    del layout
    garbage = float("nan") if dtype.is_floating_point else 0x7F7F7F7F  # NaN of e4m3, too
    return Shared(torch.full(list(shape), garbage, dtype=dtype))


class Copies:
    """Copies in flight, in groups: of what is copied nothing is there before its group is waited for."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[Shared, Tile]]] = []
        self.open: list[tuple[Shared, Tile]] = []

    def copy_ahead(self, memory: Shared, pointer: Pointer) -> None:
        memory.store(allocated(memory.dtype, memory.shape, None).load(None))
        self.open.append((memory, load(pointer)))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, pending: int) -> None:
        while len(self.groups) > pending:
            for memory, tile in self.groups.pop(0):
                memory.store(tile)


def warpgroup_mma(a: Tile, b: Shared, acc: Tile, use_acc: bool = True, is_async: bool = False) -> Tile:
    del is_async
    product = torch.matmul(a.data.float(), b.data.float())
    return Tile(product + acc.data) if use_acc else Tile(product)


def assembled(asm: Any, constraints: str, tiles: Sequence[Tile], **hints: Any) -> Tile | list[Tile]:
    """What an instruction returns: a tile, or several of them where it has several results."""
    del constraints, hints
    found = ASSEMBLY[getattr(asm, "value", asm)](*(tile.data for tile in tiles))
    return [Tile(one) for one in found] if len(found) > 1 else Tile(found[0])


def mma_v2(a: Tile, b: Tile, acc: Tile) -> Tile:
    assert a.dtype == b.dtype
    return Tile(torch.matmul(a.data.float(), b.data.float()) + acc.data)


def _apply(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def compute(*arguments: Any) -> Any:
        if all(isinstance(argument, int) for argument in arguments):
            return I32(min(arguments) if function is torch.minimum else max(arguments))
        first, *rest = arguments
        if function in (torch.amax, torch.sum, torch.permute, torch.reshape):
            return Tile(function(first.data, *rest))
        return Tile(function(*(torch.as_tensor(_plain(argument)) for argument in arguments)))

    return compute


def _filled(shape: Sequence[int], value: Any, dtype: torch.dtype, layout: Any) -> Tile:
    del layout
    return Tile(torch.full(list(shape), value, dtype=dtype))


GRID = types.SimpleNamespace(place=(0, 0, 0), sizes=(1, 1, 1), warps=4)
GL = types.SimpleNamespace(
    **{name: getattr(real, name) for name in LAYOUTS},
    **{name: _apply(function) for name, function in FUNCTIONS.items()},
    **{name: getattr(torch, name) for name in ("int8", "int16", "int32", "int64", "float16", "float32")},
    constexpr=real.constexpr,
    NVMMASharedLayout=types.SimpleNamespace(get_default_for=lambda shape, dtype: None),
    pointer_type=lambda dtype: dtype,
    num_warps=lambda: GRID.warps,
    program_id=lambda axis: I32(GRID.place[axis]),
    num_programs=lambda axis: I32(GRID.sizes[axis]),
    arange=lambda start, stop, layout: Tile(torch.arange(start, stop, dtype=torch.int32)),
    zeros=lambda shape, dtype, layout: _filled(shape, 0, dtype, layout),
    full=_filled,
    cast=lambda value, dtype: value.to(dtype),
    join=lambda a, b: Tile(torch.stack((a.data, b.data), -1)),
    split=lambda tile: tuple(Tile(half) for half in tile.data.unbind(-1)),
    inline_asm_elementwise=assembled,
    convert_layout=lambda value, layout, assert_trivial=False: value,
    allocate_shared_memory=allocated,
    static_range=range,
    load=load,
    store=store,
    atomic_add=atomic_add,
)
COPIES = Copies()
STAND_INS: dict[str, Any] = {
    "gl": GL,
    "mma_v2": mma_v2,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": lambda pending, deps: deps[0],
    "async_copy": COPIES,
    "copy_ahead": COPIES.copy_ahead,
    "block_barrier": lambda: None,
    "fence_async_shared": lambda: None,
    "launch_merge_early": lambda number: None,
}


def run(kernel: Any, grid: tuple[int, int, int], arguments: Sequence[Any], warps: int) -> None:
    """Runs all programs of a launch in a random order, one after another; arguments as the jitted kernel takes them."""
    made = [
        Pointer.of(value) if isinstance(value, torch.Tensor) else I32(value) if type(value) is int else value
        for value in arguments
    ]
    function = gluon_machine.as_python(kernel, STAND_INS)
    GRID.sizes, GRID.warps = grid, warps
    places = list(itertools.product(*(range(size) for size in grid)))
    random.Random(0).shuffle(places)
    for GRID.place in places:
        function(*made)
