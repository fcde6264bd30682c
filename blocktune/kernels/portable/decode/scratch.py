"""Memory that blocks of one launch share: counters, which are zero between launches, and a workspace."""

import threading
from typing import Any

from blocktune.kernels.base.direct_launch import recorder

SPARE_COUNTERS = 1 << 16
"""Zeros of a GPU that are kept for launches in CUDA graphs."""

_kept: dict[tuple[int, int], tuple[int, int, Any, Any]] = {}
"""By device and stream: sizes of the two, workspace and counters."""
_spare: dict[int, Any] = {}
_spare_lock = threading.Lock()


def scratch(device: Any, counters: int, floats: int) -> tuple[Any, Any]:
    """Return (float32 workspace of at least `floats`, at least `counters` int32 zeros).

    The launch that gets them must leave zeros. Launches of a stream follow each other and share theirs. A CUDA graph
    may run at the same time as its stream or as another graph, so each of its launches has its own.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        return torch.empty(floats, dtype=torch.float32, device=device), _zeros_for_a_graph(device, counters)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    kept = _kept.get(key)
    if kept is None or kept[0] < floats or kept[1] < counters:
        kept = _kept[key] = _larger(kept, device, counters, floats)
    if recorder.current is not None:
        recorder.current.found(kept[2:], lambda: scratch(device, counters, floats))
    return kept[2], kept[3]


def _larger(
    kept: tuple[int, int, Any, Any] | None, device: Any, counters: int, floats: int
) -> tuple[int, int, Any, Any]:
    import torch

    with _spare_lock:
        if device.index not in _spare:
            _spare[device.index] = torch.zeros(SPARE_COUNTERS, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # a graph may run on another stream
    if kept is not None:
        floats, counters = max(floats, kept[0]), max(counters, kept[1])
    work = torch.empty(floats, dtype=torch.float32, device=device)
    return floats, counters, work, torch.zeros(counters, dtype=torch.int32, device=device)


def _zeros_for_a_graph(device: Any, counters: int) -> Any:
    """Return zeros of their own for one launch; from spare ones, no operation becomes part of the graph."""
    import torch

    aligned = -(-counters // 4) * 4  # compiled code takes addresses for multiples of 16 bytes
    with _spare_lock:
        spare = _spare.get(device.index)
        if spare is not None and spare.numel() >= aligned:
            _spare[device.index] = spare[aligned:]
            return spare[:counters]
    return torch.zeros(counters, dtype=torch.int32, device=device)
