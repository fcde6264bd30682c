"""What a Gluon kernel computes with, on the CPU: integers of 32 bits, shared memory, pointers and descriptors."""

import math
import types
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

ADDRESSES = 1 << 64


class F32(float):
    """A number from memory, of whichever type it was there."""

    def to(self, _: Any) -> "F32":
        return self


class I32(int):
    """An integer as the GPU computes with it: 32 bits, and division that is only asked of what is not negative."""

    def to(self, _: Any) -> "I32":
        return self

    def __floordiv__(self, other: Any) -> Any:
        assert self >= 0, "division truncates on the GPU"
        assert other > 0
        return I32(int(self) // int(other))

    def __mod__(self, other: Any) -> Any:
        assert self >= 0, "the remainder of a negative number has another sign on the GPU"
        return I32(int(self) % int(other))


def _arithmetic(name: str) -> Callable[[I32, Any], Any]:
    plain = getattr(int, name)

    def compute(self: I32, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        found = plain(int(self), int(other))
        assert -(1 << 31) <= found < 1 << 31, "overflow"
        return I32(found)

    return compute


for _name in ("add", "sub", "mul", "xor"):
    setattr(I32, f"__{_name}__", _arithmetic(f"__{_name}__"))
    setattr(I32, f"__r{_name}__", _arithmetic(f"__r{_name}__"))


class Memory:
    """A tile, or tiles, of shared memory."""

    def __init__(self, data: torch.Tensor, shape: Sequence[int], layout: Any) -> None:
        self.data, self.shape, self.layout, self.dtype = data, [int(size) for size in shape], layout, data.dtype
        self.parts: dict[int, Memory] = {}

    def index(self, place: int) -> "Memory":
        assert 0 <= place < self.shape[0]
        if place not in self.parts:
            size = count(self.shape[1:])
            self.parts[place] = Memory(self.data[place * size :], self.shape[1:], self.layout)
        return self.parts[place]

    def permute(self, order: tuple[int, int]) -> "Transposed":
        assert order == (1, 0)
        return Transposed(self)

    def slice(self, start: int, length: int, dim: int = 0) -> "Slice":
        return Slice(self, start, length, dim)

    @cached_property
    def panels(self) -> torch.Tensor:
        *outer, rows, columns = self.shape
        assert all(size == 1 for size in outer)
        swizzle = getattr(self.layout, "swizzle_byte_width", 0)
        width = min(swizzle // self.dtype.itemsize or columns, columns)
        return self.data[: rows * columns].view(columns // width, rows, width)

    def load(self, _: Any = None) -> Any:
        if self.shape == [1]:
            number = I32(self.data[0])
            return types.SimpleNamespace(item=lambda: number)
        if len(self.shape) == 1:
            return self.data[: self.shape[0]].clone()
        *_, rows, columns = self.shape
        return self.panels.permute(1, 0, 2).clone(memory_format=torch.contiguous_format).view(rows, columns)

    def store(self, value: torch.Tensor) -> None:
        if self.shape == [1]:
            self.data[0] = value
            return
        if len(self.shape) == 1:
            self.data[: self.shape[0]] = value
            return
        panels = self.panels
        panels.copy_(value.reshape(panels.shape[1], panels.shape[0], panels.shape[2]).permute(1, 0, 2))


class Slice(Memory):
    """Some rows (dim 0) or columns of a tile."""

    def __init__(self, whole: Memory, start: int, length: int, dim: int) -> None:
        shape = [*whole.shape]
        assert 0 <= start <= start + length <= shape[dim]
        shape[dim] = length
        super().__init__(whole.data, shape, whole.layout)
        self.whole, self.start, self.dim = whole, int(start), dim

    def load(self, _: Any = None) -> Any:
        return self.whole.load().narrow(self.dim, self.start, self.shape[self.dim])

    def store(self, value: torch.Tensor) -> None:
        if self.dim == 1:  # of a tile that is the warpgroup's own
            whole = self.whole.load()
            whole.narrow(1, self.start, self.shape[1]).copy_(value)
            self.whole.store(whole)
            return
        panels = self.whole.panels.narrow(1, self.start, self.shape[0])
        panels.copy_(value.reshape(panels.shape[1], panels.shape[0], panels.shape[2]).permute(1, 0, 2))


def reinterpret(memory: Memory, dtype: Any, shape: Sequence[int], layout: Any) -> Memory:
    size = count(memory.shape) * memory.dtype.itemsize
    assert count(shape) * dtype.itemsize <= size, "the new tile is larger than the memory"
    return Memory(memory.data[: count(memory.shape)].view(dtype), shape, layout)


class Transposed:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def load(self, _: Any = None) -> torch.Tensor:
        return self.memory.load().T


class Pointer:
    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset

    def __add__(self, step: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset + step)

    def __sub__(self, step: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset - step)

    @property
    def dtype(self) -> types.SimpleNamespace:
        """A pointer's type as kernels read it: the bits of an element."""
        return types.SimpleNamespace(
            element_ty=types.SimpleNamespace(primitive_bitwidth=8 * self.tensor.element_size())
        )


class Descriptor:
    """What the copy engine knows of a tensor; made from a host's descriptor."""

    def __init__(self, host: Any) -> None:
        self.host, self.layout, self.dtype = host, host.layout, host.base.dtype
        nbytes = count(host.block_shape) * host.base.element_size()
        self.block_type = types.SimpleNamespace(shape=list(host.block_shape), nbytes=nbytes)
        self.offset, self.item = host.base.storage_offset(), host.base.element_size()
        self.memory = torch.empty(0, dtype=host.base.dtype).set_(host.base.untyped_storage())
        self.block, self.axes = tuple(host.block_shape[-2:]), min(2, len(host.block_shape))
        assert all(size == 1 for size in host.block_shape[:-2])
        bytes_apart = [stride * self.item for stride in host.strides[:-1]]
        assert all(0 <= apart < 1 << 40 and apart % 16 == 0 for apart in bytes_apart)

    def box(self, coordinates: Sequence[int]) -> tuple[tuple[slice, ...], torch.Tensor]:
        """Of a block [rows, columns] or [rows]: which part is inside the tensor, and that part of the memory."""
        host, axes, places = self.host, self.axes, [int(place) for place in coordinates]
        outer = zip(places[:-2], host.shape[:-2], strict=True) if axes == 2 else ()
        inside = all(0 <= place < size for place, size in outer)
        part = tuple(map(_overlap, places[-axes:], self.block, host.shape[-axes:]))
        sizes = [found.stop - found.start if inside else 0 for found in part]
        first = [*places[:-axes], *(place + found.start for place, found in zip(places[-axes:], part, strict=True))]
        start = sum(place * stride for place, stride in zip(first, host.strides, strict=True)) * self.item
        place = start % ADDRESSES // self.item if all(sizes) else 0
        seen = tuple(slice(found.start, found.start + size) for found, size in zip(part, sizes, strict=True))
        return seen, self.memory.as_strided(sizes, (*host.strides[-axes:-1], 1), self.offset + place)


def _overlap(place: int, length: int, size: int) -> slice:
    """Return which of so many elements from this place on are among the first `size`."""
    start = min(max(-place, 0), length)
    return slice(start, max(start, min(length, size - place)))


def count(shape: Sequence[int]) -> int:
    return math.prod(map(int, shape))
