"""The arguments of a call on their way to another process: descriptions in JSON, the tensors' bytes in files.

The caller's own values travel, since only the caller knows the indices or masks that a kernel expects. The folder is
private and lives as long as the tuning; the bytes are read as numbers and nothing else.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.tuned.config import Problem, TensorKind


def save_arguments(arguments: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Writes the tensors into the folder, one file each by name, and describes all arguments."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            plain = _one_of_each(value.detach()).contiguous().cpu()
            (folder / name).write_bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    device = next((value.device.type for value in arguments.values() if isinstance(value, Tensor)), "cpu")
    return {"folder": str(folder), "device": device, "problem": Problem.of(arguments).document}


def load_arguments(description: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that `save_arguments` described, with the strides that they had."""
    folder, device = Path(description["folder"]), description["device"]
    problem = Problem.from_document(description["problem"])
    return {
        name: _loaded(value, folder / name, device) if isinstance(value, TensorKind) else value
        for name, value in problem.arguments
    }


def _loaded(kind: TensorKind, file: Path, device: str) -> Tensor:
    sizes = [1 if stride == 0 else size for size, stride in zip(kind.shape, kind.strides, strict=True)]
    content = file.read_bytes()
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    values = flat.view(getattr(torch, kind.dtype)).reshape(sizes)
    tensor = torch.empty_strided(sizes, kind.strides, dtype=values.dtype, device=device)
    tensor.copy_(values)
    return tensor.as_strided(kind.shape, kind.strides)


def _one_of_each(tensor: Tensor) -> Tensor:
    """The tensor without the repetitions of broadcast dimensions."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
