"""Launches that are recorded once and go out again with other addresses.

What a launch passes to a compiled kernel follows from types, sizes, strides and options, but for addresses. So where
all of those are known to be as before, the arguments of its kernels are copied from an earlier launch and addresses are
put in. A launch that does more than start kernels and take one workspace is not repeated this way.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blocktune.kernels.base.direct_launch import DirectLaunch, recorder
from blocktune.runtime.dispatch.launches.memory import new_like
from blocktune.runtime.dispatch.launches.replay import FindTensors, KernelReplay, KnownAddresses, LaunchReplay


class Recording:
    """The kernels that this thread starts while the recording is entered.

    Args:
        inputs: the tensors whose addresses change; None for those that are not given.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        self._known = KnownAddresses({id(tensor): place for place, tensor in enumerate(inputs) if tensor is not None})
        self._launches: list[tuple[DirectLaunch, Sequence[Any]]] = []
        self._devices: set[int] = set()
        self._finds: list[FindTensors] = []
        self._found: list[Tensor] = []
        self._operators, self._expected = _Operators(), 0
        self._started = 0

    def __enter__(self) -> Self:
        from triton import knobs

        recorder.current = self
        knobs.runtime.launch_enter_hook.add(self._count)
        self._operators.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        from triton import knobs

        self._operators.__exit__(*error)
        knobs.runtime.launch_enter_hook.remove(self._count)
        recorder.current = None

    def _count(self, metadata: Any) -> None:
        """Count a kernel that Triton starts in any way: it calls its hooks at every start, in whichever thread."""
        del metadata
        self._started += recorder.current is self

    def launched(self, launch: DirectLaunch, values: Sequence[Any]) -> None:
        """Note a kernel that is started with these values."""
        self._launches.append((launch, values))
        self._devices.add(torch._C._cuda_getDevice())

    def found(self, tensors: tuple[Tensor, ...], find: FindTensors) -> None:
        """Record scratch tensors of the current stream; a replay looks them up for its own stream."""
        self._known.kept |= {id(tensor): len(self._found) + n for n, tensor in enumerate(tensors)}
        self._found += tensors
        self._finds.append(find)

    def allocated(self, memory: Tensor) -> None:
        """Note the workspace. A second one counts as an operator."""
        if self._known.memory is None:
            self._known.memory, self._expected = memory, 1

    def replay(self) -> LaunchReplay | None:
        """Return what starts the same kernels again; None where they are not all that was done."""
        whole = self._operators.count == self._expected and len(self._launches) == self._started
        if not whole or len(self._devices) != 1:
            return None
        try:
            launches = [KernelReplay(self._known, launch, values) for launch, values in self._launches]
        except KeyError:  # a tensor that is neither given nor kept
            return None
        memory = self._known.memory
        return LaunchReplay(launches, None if memory is None else new_like(memory), self._finds, *self._devices)


class _Operators(TorchDispatchMode):  # type: ignore[misc]
    """Counts PyTorch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or PyTorch imports its compiler at the first operator, which takes seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += 1
        return function(*args, **(kwargs or {}))
