"""The kernels of a launch, started again with other addresses: arguments are copied and addresses are put in."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.base.direct_launch import STREAM, Address, DirectLaunch, EncodedMaps, Part

Find = Callable[[], tuple[Tensor, ...]]
"""Finds the tensors that are kept for the current stream."""


class Known:
    """What the addresses of a launch belong to.

    places: of the inputs, by id. kept: of tensors that are kept for a stream, by id, what finds them and which of what
    it finds. memory: the workspace.
    """

    __slots__ = ("kept", "memory", "places")

    def __init__(self, places: Mapping[int, int]) -> None:
        self.places = places
        self.kept: dict[int, tuple[Find, int]] = {}
        self.memory: Tensor | None = None


class Repeated:
    """One kernel of a replay: all arguments of its launcher, and where addresses are put in.

    inputs, described: (place, which input), as an address or as an encoded descriptor. parts, described_parts: (place,
    where the part of the workspace begins). finds: what finds tensors, and (place, which of them).

    Raises:
        KeyError: an argument is a tensor that is neither given nor kept.
    """

    __slots__ = ("described", "described_parts", "finds", "inputs", "launch_in_c", "parts", "template")

    def __init__(self, known: Known, launch: DirectLaunch, values: Sequence[Any]) -> None:
        self.launch_in_c, self.template = launch.launch_in_c, list(launch.head)
        self.inputs: list[tuple[int, int]] = []
        self.parts: list[tuple[int, int]] = []
        self.described: list[tuple[int, int, EncodedMaps]] = []
        self.described_parts: list[tuple[int, int, EncodedMaps]] = []
        self.finds: dict[Find, list[tuple[int, int]]] = {}
        for slot, value in enumerate(values):
            own = launch.maps[slot] if slot < len(launch.maps) else None
            if own is None:
                self._add(known, value)
            else:
                self._add_described(known, value, own)
        self.template += launch.rest

    def _add(self, known: Known, value: Any) -> None:
        place = len(self.template)
        self.template.append(None if isinstance(value, Tensor) else value)
        if type(value) is Part:
            self.parts.append((place, value.begin))
        elif value is not None and value is known.memory:
            self.parts.append((place, 0))
        elif isinstance(value, Tensor) and id(value) in known.kept:
            find, which = known.kept[id(value)]
            self.finds.setdefault(find, []).append((place, which))
        elif isinstance(value, Tensor):
            self.inputs.append((place, known.places[id(value)]))

    def _add_described(self, known: Known, value: Any, own: EncodedMaps) -> None:
        place = len(self.template)
        maps = EncodedMaps(partial(_at, _at(own.describe(value), 0)), own.metadata)
        self.template += own.encoded(value)
        self.template[place] = None
        if type(value) is tuple:
            self.described_parts.append((place, value[0].begin, maps))
        else:
            self.described.append((place, known.places[id(value)], maps))


def _at(description: Any, address: int) -> Any:
    """Return the descriptor with another address, which is all that it keeps of a tensor."""
    other = copy(description)
    other.base = Address(address)
    return other


class Replay:
    """replay(addresses of the inputs) starts the kernels of a launch again, on the current stream of the device that
    they were recorded on."""

    __slots__ = ("_current_device", "_device", "_launches", "_new", "_runtime", "_stream_of")

    def __init__(self, launches: list[Repeated], new: Callable[[], Tensor] | None, device: int) -> None:
        from triton import knobs

        self._launches, self._new, self._runtime, self._device = launches, new, knobs.runtime, device
        self._current_device, self._stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    @property
    def is_watched(self) -> bool:
        """Whether a profiler wants to know of launches: then they go the ordinary way."""
        enter, leave = self._runtime.launch_enter_hook, self._runtime.launch_exit_hook
        return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))

    def __call__(self, addresses: Sequence[int]) -> None:
        if self._current_device() != self._device:
            with torch.cuda.device(self._device):
                self(addresses)
            return
        stream = self._stream_of(self._device)
        memory = None if self._new is None else self._new()  # lives until all kernels are enqueued
        begin = 0 if memory is None else memory.data_ptr()
        for launch in self._launches:
            final = launch.template.copy()
            final[STREAM] = stream
            for place, which in launch.inputs:
                final[place] = addresses[which]
            for place, which, maps in launch.described:
                final[place] = maps.at(addresses[which])
            for place, part in launch.parts:
                final[place] = begin + part
            for place, part, maps in launch.described_parts:
                final[place] = maps.at(begin + part)
            found = [find() for find in launch.finds]  # in a captured graph they are this launch's alone
            for tensors, places in zip(found, launch.finds.values(), strict=True):
                for place, which in places:
                    final[place] = tensors[which].data_ptr()
            launch.launch_in_c(*final)
