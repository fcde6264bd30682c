"""The arguments of a call on their way to another process: descriptions in JSON, the tensors' bytes in files.

The caller's own values travel, since only the caller knows the indices or masks that a kernel expects. The folder is
private and lives as long as the measuring; the bytes are read as numbers and nothing else. Tensors that share memory
do not share it there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.config import Plain

_ALIGNMENT = 16


def save_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write tensors into the folder and describe all arguments.

    Raises:
        UsageError: an argument is neither a tensor nor a plain value.
    """
    return {
        "args": [_saved(str(place), value, folder) for place, value in enumerate(args)],
        "kwargs": {name: _saved(name, value, folder) for name, value in kwargs.items()},
    }


def load_arguments(description: Mapping[str, Any], folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that `save_arguments` described, with their strides and their alignment."""
    args = [_loaded(value, folder) for value in description["args"]]
    return args, {name: _loaded(value, folder) for name, value in description["kwargs"].items()}


def _saved(name: str, value: Any, folder: Path) -> Any:
    if isinstance(value, Plain):
        return {"value": value}
    if not isinstance(value, Tensor):
        raise UsageError(
            f"`isolate` copies tensors and plain values to another process, but argument {name} is a "
            f"{type(value).__name__}. Tune this kernel without `isolate`."
        )
    plain = one_of_each(value.detach()).contiguous().cpu()
    (folder / name).write_bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return {
        "file": name,
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "strides": list(value.stride()),
        "offset": value.data_ptr() % _ALIGNMENT,
        "device": value.device.type,
    }


def _loaded(description: Mapping[str, Any], folder: Path) -> Any:
    if "file" not in description:
        return description["value"]
    shape, strides = description["shape"], description["strides"]
    sizes = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    content = (folder / description["file"]).read_bytes()
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else nothing
    dtype = getattr(torch, description["dtype"])
    values = flat.view(dtype).reshape(sizes)
    return _placed(values, sizes, strides, description).as_strided(shape, strides, _start(description, dtype))


def _placed(values: Tensor, sizes: list[int], strides: list[int], description: Mapping[str, Any]) -> Tensor:
    """Return memory with these values, laid out as they were, at an address that divides as theirs did."""
    start = _start(description, values.dtype)
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if values.numel() else 0
    memory = torch.empty(start + span, dtype=values.dtype, device=description["device"])
    memory.as_strided(sizes, strides, start).copy_(values)
    return memory


def _start(description: Mapping[str, Any], dtype: torch.dtype) -> int:
    return int(description["offset"] // dtype.itemsize)


def one_of_each(tensor: Tensor) -> Tensor:
    """Return the tensor without the repetitions of broadcast dimensions."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
