"""The shortest way to launch a compiled kernel again: straight to the C function of Triton 3.6's launcher.

`CompiledKernel[grid](*arguments)` spends its time in Python: on every launch it walks the arguments, encodes every
tensor descriptor again (3 us each), asks CUDA about every pointer and calls the profiling hooks. Here addresses are
passed as numbers, and an encoded descriptor is kept by the address of its tensor, since sizes and strides are those of
the plan.

It reads what is private to Triton, so it is taken only for the version that it was read from, a kernel without scratch
memory, and as long as no launch hook is set; otherwise the launch goes the ordinary way.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MAX_MAPS = 1024
"""Encoded descriptors that a plan keeps for each of its tensors. They are 128 bytes, and pointers come back: allocators
reuse memory."""

Describe = Callable[[Any], Any]
"""Makes the descriptor of a tensor, or of (a part of a workspace or its address, its rows)."""


STREAM = 3
"""The place of the stream among the arguments of Triton's launcher, after the grid."""


class ThreadRecorder(threading.local):
    """What notes the launches of this thread (runtime/dispatch/launches/recording.py), or None."""

    current: Any = None


recorder = ThreadRecorder()


class Part(int):
    """The address of a part of a workspace, which knows where in it the part begins."""

    begin: int

    @classmethod
    def of(cls, memory: int, begin: int) -> "Part":
        part = cls(memory + begin)
        part.begin = begin
        return part


class DropoutWord(int):
    """A number that dropped pairs are made from, which knows its place among those: a launch that is repeated gets
    others."""

    place: int

    @classmethod
    def all(cls, words: Sequence[int]) -> tuple["DropoutWord", ...]:
        made = tuple(map(cls, words))
        for place, word in enumerate(made):
            word.place = place
        return made


class TensorAddress:
    """Stands for a tensor where only its address counts."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class EncodedMaps:
    """The encoded descriptors of one argument, each with the sizes and strides that follow it in a launch."""

    __slots__ = ("describe", "kept", "metadata")

    def __init__(self, describe: Describe, metadata: Any) -> None:
        self.describe = describe
        self.metadata = metadata
        self.kept: dict[Any, list[Any]] = {}

    def at(self, address: int) -> Any:
        """Return the map alone of what `describe` makes of an address."""
        found = self.kept.get(address)
        return (self.encode(address, address) if found is None else found)[0]

    def encoded(self, value: Any) -> list[Any]:
        """Return the maps of a value, kept or not."""
        place = value if type(value) is tuple else value.data_ptr()
        found = self.kept.get(place)
        return self.encode(value, place) if found is None else found

    def encode(self, value: Any, place: Any) -> list[Any]:
        """Return the maps of a tensor at an address, or of a part of a workspace as (address, rows), which is its place
        as well. It is kept by its place."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        enter_context()
        if len(self.kept) >= MAX_MAPS:
            self.kept.clear()  # all: which addresses come back is not known
        made: list[Any] = make_tensordesc_arg(self.describe(value), self.metadata)
        self.kept[place] = made
        return made


def enter_context() -> None:
    """Make the current device's context that of this thread.

    A new thread has none until it asks CUDA's runtime for something that needs one, and memory that PyTorch had kept
    comes without asking. Launchers enter the context themselves; the driver's function that encodes descriptors fails.
    """
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.is_current_stream_capturing()


class DirectLaunch(NamedTuple):
    """A kernel that is started directly: head (grid, stream, function and options), then the values of a launch, those
    with maps as these, then rest."""

    launch_in_c: Callable[..., None]
    head: tuple[Any, ...]
    maps: Sequence[EncodedMaps | None]
    rest: tuple[Any, ...]


def direct_launcher(
    compiled: Any,
    grid: tuple[int, int, int],
    leading: Callable[..., tuple[Any, ...]] | None,
    trailing: Sequence[Any],
    descriptors: Sequence[tuple[int, Describe]],
) -> Callable[..., None] | None:
    """Return launch(*arguments), which enqueues `compiled` on the current stream of the current device; None where
    there is no way.

    Args:
        compiled: a `CompiledKernel` that has been launched.
        grid: programs in three dimensions.
        leading: makes the kernel's first arguments, which change from call to call, of a launch's arguments; None where
            they are the launch's arguments.
        trailing: the others, as they are in every launch.
        descriptors: which of the leading arguments are tensors that the kernel gets as descriptors.
    """
    import torch
    from triton import knobs

    ends = _ends(compiled, len(descriptors))
    if ends is None:
        return None
    launch_in_c, metadata = ends
    maps: list[EncodedMaps | None] = [None] * (1 + max((slot for slot, _ in descriptors), default=-1))
    for (slot, describe), own in zip(descriptors, metadata, strict=True):
        maps[slot] = EncodedMaps(describe, own)
    described, runtime, run, rest = len(maps), knobs.runtime, compiled.run, tuple(trailing)
    function, packed = compiled.function, compiled.packed_metadata
    options = run.launch_cooperative_grid, run.launch_pdl, None, None, packed, None, None, None
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    current_device, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    ordinary = compiled[grid]
    itself = DirectLaunch(launch_in_c, (*grid, None, function, *options), maps, rest)

    def launch(*arguments: Any) -> None:
        values = arguments if leading is None else leading(*arguments)
        if recorder.current is not None:
            recorder.current.launched(itself, values)
        if (
            runtime.launch_enter_hook is not enter
            or runtime.launch_exit_hook is not leave
            or enter.calls
            or leave.calls
        ):
            # a profiler's hook gets the launch's metadata, which only the ordinary way puts together
            ordinary(*with_descriptors(values, descriptors), *rest)
            return
        final: list[Any] = []
        for value, own in zip(values, maps, strict=False):
            if own is None:
                final.append(value.data_ptr() if hasattr(value, "data_ptr") else value)
            else:
                final += own.encoded(value)
        final += [value.data_ptr() if hasattr(value, "data_ptr") else value for value in values[described:]]
        launch_in_c(*grid, stream_of(current_device()), function, *options, *final, *rest)

    return launch


def with_descriptors(values: Sequence[Any], descriptors: Sequence[tuple[int, Describe]]) -> Sequence[Any]:
    """Return the arguments with descriptors in place of the tensors that have one."""
    if not descriptors:
        return values
    enter_context()
    made = list(values)
    for slot, describe in descriptors:
        made[slot] = describe(made[slot])
    return made


def _ends(compiled: Any, described: int) -> tuple[Callable[..., None], Sequence[Any]] | None:
    """Return the C function under a launcher, and what it knows of every descriptor; None if it is not as expected."""
    run = compiled.run
    metadata = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    if len(metadata) != described or None in metadata or run.global_scratch_size or run.profile_scratch_size:
        return None
    if not described:
        return run.launch, ()
    # with descriptors, Triton's launcher is a Python function around the C function: its closure holds that one
    cells = dict(zip(run.launch.__code__.co_freevars, run.launch.__closure__ or (), strict=True))
    return (cells["launcher"].cell_contents, metadata) if "launcher" in cells else None
