"""Launches of several kernels: each takes the slow path once and the short one later, with one workspace for all.

A backward starts three kernels, and `kernel[grid](...)` looks at the 20 to 40 arguments of each: most of what a
training step costs on the host. What those look-ups find is the same for all tensors of one kind, so a launch is
prepared for a kind: sizes, strides and constants are bound, and the kernels that were compiled are kept.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add
from typing import Any, ClassVar

from blocktune.kernels.base.direct_launch import Describe, Part, TensorAddress, recorder, with_descriptors
from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.base.launch import can_pin, direct_of, launcher_of

PART_BYTES = 256
"""Parts of a workspace begin at multiples of this: copy engines and compiled code want 16 or 128."""
ALIGNMENT_BYTES = 16
"""What Triton compiles other code for."""
MAX_LAYOUTS = 16
"""Layouts of gradients that a plan keeps a launch for; autograd hands in one or two."""


class Step:
    """One kernel of a launch: `step(*values)` starts it with the values that change from call to call, then `rest`.

    Args:
        function: the jitted function.
        grid: programs in up to three dimensions.
        rest: the arguments after the values, which stay as they are.
        options: of the launch, such as num_warps.
        descriptors: which of the values the function gets as a descriptor, and what makes it.
        pins: keep the compiled kernel of the first launch, for calls whose values have its types and alignment.
    """

    __slots__ = ("_descriptors", "_function", "_grid", "_options", "_pins", "_rest", "_short", "takes_addresses")

    def __init__(
        self,
        function: Any,
        grid: Sequence[int],
        rest: Sequence[Any],
        options: Mapping[str, int],
        descriptors: Sequence[tuple[int, Describe]] = (),
        *,
        pins: bool = False,
    ) -> None:
        self._function = function
        x, y, z = (*grid, 1, 1)[:3]
        self._grid = x, y, z
        self._rest, self._options, self._descriptors = tuple(rest), options, descriptors
        self._pins = pins
        self._short: Launch | None = None
        self.takes_addresses = False  # whether numbers may stand for tensors

    def __call__(self, *values: Any) -> None:
        if self._short is not None:
            self._short(*values)
            return
        arguments = with_descriptors(values, self._descriptors)
        compiled = self._function[self._grid](*arguments, *self._rest, **self._options)
        if self._pins and can_pin(compiled):
            bound = compiled, self._grid, None, self._rest, self._descriptors
            direct = direct_of(*bound)
            self._short = launcher_of(*bound) if direct is None else direct
            self.takes_addresses = direct is not None


def take_addresses(*steps: Step) -> bool:
    """Return whether numbers may stand for tensors in all of them."""
    return False not in [step.takes_addresses for step in steps]


def new_memory(count: int, dtype: Any, device: Any) -> Any:
    """Return memory of this many elements, which a recording knows."""
    import torch

    memory = torch.empty(count, dtype=dtype, device=device)
    if recorder.current is not None:
        recorder.current.allocated(memory)
    return memory


class Workspace:
    """Parts of one allocation.

    Args:
        parts: elements and data type (of PyTorch) of each; a part without elements is None.
    """

    __slots__ = ("_bytes", "_parts")

    def __init__(self, *parts: tuple[int, Any]) -> None:
        places, end = [], 0
        for count, dtype in parts:
            places.append((end, count, dtype))
            end += -(-count * dtype.itemsize // PART_BYTES) * PART_BYTES
        self._bytes, self._parts = end, tuple(places)

    def new(self, device: Any) -> Any:
        """Return memory for all parts, from the allocator of PyTorch: it stays the current stream's until the stream
        has used it."""
        import torch

        return new_memory(self._bytes, torch.uint8, device)

    def parts(self, memory: Any, *, as_addresses: bool) -> list[Any]:
        """Return the parts of such memory, as tensors or as addresses."""
        if as_addresses:
            base, make = memory.data_ptr(), add if recorder.current is None else Part.of
            return [make(base, begin) if count else None for begin, count, _ in self._parts]
        return [
            memory[begin : begin + count * dtype.itemsize].view(dtype) if count else None
            for begin, count, dtype in self._parts
        ]


def based(part: Any) -> Any:
    """Return what a descriptor of a part of a workspace is based on: the tensor, or what stands for its address."""
    return TensorAddress(part) if isinstance(part, int) else part


class PreparedBackward:
    """launch(q, k, v, out, lse, dout, dq, dk, dv, scale[, extras]) of tensors of one kind, the shortest way.

    Autograd chooses the layout of dout, a compiled graph that of the output, and what a user's hooks have saved and
    restored may be laid out in any way, so that each of their layouts has a launch of its own.

    Args:
        prepare: makes a launch for arguments like these.
        fits: whether the kernels can read a gradient; others are copied.
        binds_tokens: a launch is for one number of packed tokens.
    """

    __slots__ = ("_binds_tokens", "_fits", "_launches", "_prepare")

    def __init__(self, prepare: Callable[..., Launch], fits: Callable[[Any], bool], *, binds_tokens: bool) -> None:
        self._prepare, self._fits, self._binds_tokens = prepare, fits, binds_tokens
        self._launches: dict[Any, Launch] = {}

    def __call__(self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *rest: Any) -> None:
        strides = q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | lse.data_ptr() | dout.data_ptr()
        aligned = not addresses % ALIGNMENT_BYTES or _alignments(q, k, v, out, lse, dout)
        tokens = q.shape[2] if self._binds_tokens else None
        layout = strides, dout.dtype, aligned, tokens
        launch = self._launches.get(layout)
        if launch is None:
            launch = self._made(layout, (q, k, v, out, lse, dout, *rest))
        launch(q, k, v, out, lse, dout, *rest)

    def _made(self, layout: Any, arguments: tuple[Any, ...]) -> Launch:
        launch = self._prepare(*arguments) if self._fits(arguments[5]) else self._of_a_copy
        if len(self._launches) >= MAX_LAYOUTS:
            self._launches.clear()
        self._launches[layout] = launch
        return launch

    def _of_a_copy(self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *rest: Any) -> None:
        self(q, k, v, out, lse, copied(dout), *rest)


def copied(tensor: Any) -> Any:
    """Return a contiguous copy, whose address is aligned."""
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def _alignments(*tensors: Any) -> tuple[bool, ...]:
    return tuple(tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in tensors)


class Launcher:
    """Base of what `bind` returns where a launch is prepared for a kind of arguments."""

    __slots__ = ()

    def prepared(self, *arguments: Any, **pins: Any) -> Launch:
        """Return a launch for arguments with the sizes, strides, data types and alignment of these; pins: as of
        `Step`."""
        raise NotImplementedError

    def __call__(self, *arguments: Any) -> None:
        """Enqueue the launch.

        Raises:
            UsageError: the tensor of a feature is missing, or dropout_p is outside [0, 1).
        """
        self.prepared(*arguments, pins=False)(*arguments)

    def pinned(self, *arguments: Any) -> Launch:
        """Launch by the slow path and by the short one, and return the shortest launcher for arguments like these.

        Raises:
            Exception: whatever Triton raises when a kernel cannot be compiled or launched.
        """
        launch = self._preparing(*arguments)
        launch(*arguments)
        launch(*arguments)  # writes the same result again: an unexpected signature shows here, not later
        return launch

    def _preparing(self, *arguments: Any) -> Launch:
        return self.prepared(*arguments, pins=True)


class BackwardLauncher(Launcher):
    """What `bind` of a backward returns: launch(q, k, v, out, lse, dout, dq, dk, dv, scale[, extras])."""

    __slots__ = ()

    binds_tokens: ClassVar[bool] = True
    """Whether what is prepared serves one number of packed tokens only."""

    def fits(self, dout: Any) -> bool:
        """Return whether the kernels can read this gradient of the output."""
        return bool(dout.stride(-1) == 1)  # autograd may hand in one value for all

    def __call__(self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *rest: Any) -> None:
        """Launch as a `Launcher` does, with a copy of a gradient that the kernels cannot read."""
        super().__call__(q, k, v, out, lse, dout if self.fits(dout) else copied(dout), *rest)

    def _preparing(self, *arguments: Any) -> Launch:
        del arguments  # a gradient has whatever layout autograd chooses
        return PreparedBackward(partial(self.prepared, pins=True), self.fits, binds_tokens=self.binds_tokens)
