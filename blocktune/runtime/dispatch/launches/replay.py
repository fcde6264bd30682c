"""The kernels of a launch, started again with other addresses: arguments are copied and addresses are put in."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.base.direct_launch import STREAM, DirectLaunch, DropoutWord, EncodedMaps, Part, TensorAddress

MAX_KEPT = 256
"""Sets of addresses whose arguments are kept: those of the layers of a model, some times over."""

FindTensors = Callable[[], tuple[Tensor, ...]]
"""Finds the tensors that are kept for the current stream."""


class KnownAddresses:
    """The tensors that own a launch's addresses.

    places: of the inputs, by id. kept: of the tensors that are found for a stream, by id. memory: the workspace.
    """

    __slots__ = ("kept", "memory", "places")

    def __init__(self, places: Mapping[int, int]) -> None:
        self.places = places
        self.kept: dict[int, int] = {}
        self.memory: Tensor | None = None


class KernelReplay:
    """One kernel of a replay: all arguments of its launcher, and where addresses are put in.

    inputs, described: (place, which input), as an address or as an encoded descriptor. parts, described_parts: (place,
    where the part of the workspace begins). kept: (place, which of the tensors that are found for a stream). words:
    (place, which of the numbers that dropped pairs are made from).

    Raises:
        KeyError: an argument is a tensor that is neither given nor kept.
    """

    __slots__ = ("described", "described_parts", "inputs", "kept", "launch_in_c", "parts", "template", "words")

    def __init__(self, known: KnownAddresses, launch: DirectLaunch, values: Sequence[Any]) -> None:
        self.launch_in_c, self.template = launch.launch_in_c, list(launch.head)
        self.inputs: list[tuple[int, int]] = []
        self.parts: list[tuple[int, int]] = []
        self.described: list[tuple[int, int, EncodedMaps]] = []
        self.described_parts: list[tuple[int, int, EncodedMaps]] = []
        self.kept: list[tuple[int, int]] = []
        self.words: list[tuple[int, int]] = []
        for slot, value in enumerate(values):
            own = launch.maps[slot] if slot < len(launch.maps) else None
            if own is None:
                self._add(known, value)
            else:
                self._add_described(known, value, own)
        self.template += launch.rest

    def _add(self, known: KnownAddresses, value: Any) -> None:
        place = len(self.template)
        self.template.append(None if isinstance(value, Tensor) else value)
        if type(value) is Part:
            self.parts.append((place, value.begin))
        elif type(value) is DropoutWord:
            self.words.append((place, value.place))
        elif value is not None and value is known.memory:
            self.parts.append((place, 0))
        elif isinstance(value, Tensor) and id(value) in known.kept:
            self.kept.append((place, known.kept[id(value)]))
        elif isinstance(value, Tensor):
            self.inputs.append((place, known.places[id(value)]))

    def _add_described(self, known: KnownAddresses, value: Any, own: EncodedMaps) -> None:
        place = len(self.template)
        maps = EncodedMaps(partial(_at, _at(own.describe(value), 0)), own.metadata)
        self.template += own.encoded(value)
        self.template[place] = None
        if type(value) is tuple:
            self.described_parts.append((place, value[0].begin, maps))
        else:
            self.described.append((place, known.places[id(value)], maps))

    def arguments(self, stream: int, begin: int, kept: Sequence[int], addresses: Sequence[int]) -> tuple[Any, ...]:
        """Return all arguments for a stream, with a workspace that begins there and with these addresses, but for the
        words of dropped pairs."""
        made = self.template.copy()
        made[STREAM] = stream
        for place, which in self.inputs:
            made[place] = addresses[which]
        for place, which in self.kept:
            made[place] = kept[which]
        for place, part in self.parts:
            made[place] = begin + part
        for place, which, maps in self.described:
            made[place] = maps.at(addresses[which])
        for place, part, maps in self.described_parts:
            made[place] = maps.at(begin + part)
        return tuple(made)


def _at(description: Any, address: int) -> Any:
    """Return the descriptor with another address, which is all that it keeps of a tensor."""
    other = object.__new__(type(description))  # `copy` takes six times as long
    other.__dict__.update(vars(description), base=TensorAddress(address))
    return other


Ready = tuple[Callable[..., None], tuple[Any, ...], Sequence[tuple[int, int]]]
"""A launcher, its arguments, and which of them are words of dropped pairs."""


class LaunchReplay:
    """Starts the kernels of a launch again, on the current stream of the device that they were recorded on.

    Arguments are kept by the addresses in them: allocators reuse memory.
    """

    __slots__ = ("_current_device", "_device", "_finds", "_kept", "_launches", "_new", "_runtime", "_stream_of")

    def __init__(
        self,
        launches: Sequence[KernelReplay],
        new: Callable[[], Tensor] | None,
        finds: Sequence[FindTensors],
        device: int,
    ) -> None:
        from triton import knobs

        self._launches, self._new, self._finds, self._device = launches, new, finds, device
        self._runtime = knobs.runtime
        self._kept: dict[Any, list[Ready]] = {}
        self._current_device, self._stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def is_hooked(self) -> bool:
        """Return whether a profiler wants to know of launches, which go the ordinary way then."""
        try:
            return bool(self._runtime.launch_enter_hook.calls or self._runtime.launch_exit_hook.calls)
        except AttributeError:  # a hook that someone has put in place of Triton's
            return True

    def start(self, addresses: tuple[int, ...], words: Sequence[int] = ()) -> None:
        """Start the kernels. (Python calls a method in half the time of an object.)

        Args:
            addresses: of the inputs.
            words: those of `drawn_words` where pairs are dropped.
        """
        if self._current_device() != self._device:
            with torch.cuda.device(self._device):
                self.start(addresses, words)
            return
        stream = self._stream_of(self._device)
        memory = None if self._new is None else self._new()  # lives until all kernels are enqueued
        begin = 0 if memory is None else memory.data_ptr()
        own: tuple[int, ...] = ()
        if self._finds:
            # kept until the kernels are enqueued: in a captured graph they are this launch's alone
            found = [tensor for find in self._finds for tensor in find()]
            own = tuple([tensor.data_ptr() for tensor in found])
        ready = self._kept.get((stream, begin, own, addresses))
        if ready is None:
            ready = self._prepared(stream, begin, own, addresses)
        for launch_in_c, arguments, places in ready:
            if places:
                arguments = _with_words(arguments, places, words)
            launch_in_c(*arguments)

    def _prepared(self, stream: int, begin: int, own: tuple[int, ...], addresses: tuple[int, ...]) -> list[Ready]:
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        made: list[Ready] = [
            (launch.launch_in_c, launch.arguments(stream, begin, own, addresses), launch.words)
            for launch in self._launches
        ]
        self._kept[stream, begin, own, addresses] = made
        return made


def _with_words(arguments: tuple[Any, ...], places: Sequence[tuple[int, int]], words: Sequence[int]) -> tuple[Any, ...]:
    """Return the arguments with the words of this call: what is kept belongs to all calls."""
    made = list(arguments)
    for place, which in places:
        made[place] = words[which]
    return tuple(made)
