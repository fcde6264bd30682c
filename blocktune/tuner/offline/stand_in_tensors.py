"""Tensors of a GPU that need not be here: programs find them there, and they are of the CPU, or of no memory at all."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)

_ANSWERS: Mapping[Any, object] = {
    Tensor.device.__get__: CUDA,
    Tensor.is_cuda.__get__: True,
    Tensor.is_cpu.__get__: False,
    Tensor.is_meta.__get__: False,
    Tensor.get_device: 0,
    Tensor.is_pinned: False,
    Tensor.record_stream: None,
}
"""What tensors say of their place, by function."""

_SAME = (Tensor.cuda, Tensor.pin_memory)
"""Functions whose result is the tensor itself."""

_ZEROS: Mapping[Any, Callable[..., Any]] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    Tensor.new_empty: Tensor.new_zeros,
}
"""Memory that is not filled here reads as zeros, the same in every run, and not as whatever lies there."""


class TensorsOfAGpu(TorchFunctionMode):  # type: ignore[misc]
    """Lets a program find its tensors on a GPU. They are on the CPU; from the first one that it makes on `meta`, those
    that it makes on the GPU are there too."""

    def __init__(self) -> None:
        super().__init__()
        self._home = torch.device("cpu")

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func]
        if func is torch.device:  # a name of the GPU, on which nothing is made yet
            return func(*args, **(kwargs or {}))
        if func in _SAME:
            return args[0]
        placed = {name: self._place(value, named=name == "device") for name, value in (kwargs or {}).items()}
        placed.pop("pin_memory", None)
        if func is Tensor.to and len(args) > 1 and type(args[1]) is int:  # the index of a GPU
            args = (args[0], self._home, *args[2:])
        found = _ZEROS.get(func, func)(*(self._place(value) for value in args), **placed)
        return _strided(found, args, func)

    def _place(self, value: Any, *, named: bool = False) -> Any:
        """Return where something is made that a program wants on the GPU; anything else as it is."""
        if isinstance(value, str) and (named or value.partition(":")[0] == "cuda"):
            value = torch.device(value)
        if named and type(value) is int:
            return self._home
        if not isinstance(value, torch.device):
            return value
        if value.type == "meta":
            self._home = value
        return self._home if value.type == "cuda" else value


def _strided(found: Any, args: tuple[Any, ...], func: Any) -> Any:
    """Return the memory of `torch.empty_strided` with zeros in it."""
    return found.zero_() if func in (torch.empty_strided, Tensor.new_empty_strided) else found
