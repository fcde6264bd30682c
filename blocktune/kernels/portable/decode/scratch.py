"""Memory that the blocks of one launch share: counters, which are zero between launches, and a workspace.

It outlives the call, so it must not come from a pool that its owner frees or overwrites: that of a CUDA graph while it
is warmed up or captured, or the user's own. It is allocated on a side thread, where no such pool is in use.
"""

import threading
from typing import Any

from blocktune.kernels.base.direct_launch import recorder
from blocktune.kernels.hardware.side_thread import run_on_side_thread

SPARE_COUNTERS = 1 << 16
"""Zeros of a GPU that are allocated at once for launches in CUDA graphs."""

_kept: dict[tuple[int, int], tuple[int, int, Any, Any]] = {}
"""By device and stream: sizes of the two, workspace and counters."""
_spare: dict[int, Any] = {}
_handed_out: list[Any] = []
"""All memory that graphs hold addresses of. They may be replayed at any time, so it is never freed."""
_spare_lock = threading.Lock()


def scratch(device: Any, counters: int, floats: int = 0) -> tuple[Any, Any]:
    """Return (float32 workspace of at least `floats`, at least `counters` int32 zeros).

    The launch that gets them must leave zeros. Launches of a stream follow each other and share theirs. A CUDA graph
    may run at the same time as its stream or as another graph, so each of its launches has its own.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        return torch.empty(floats, dtype=torch.float32, device=device), _graph_counters(device, counters)
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

    if kept is not None:
        floats, counters = max(floats, kept[0]), max(counters, kept[1])

    def allocate() -> tuple[Any, Any]:
        return torch.empty(floats, dtype=torch.float32, device=device), _zeros(device, counters)

    stream, made = torch.cuda.current_stream(device), run_on_side_thread(allocate, device)
    for memory in made:
        memory.record_stream(stream)  # it was allocated on another one
    return floats, counters, *made


def _graph_counters(device: Any, counters: int) -> Any:
    """Return zeros of their own for one launch in a graph. They are zeroed ahead, so that no operation becomes part of
    the graph, and are never reused, since the graph may be replayed at any time."""
    aligned = -(-counters // 4) * 4  # compiled code takes addresses for multiples of 16 bytes
    with _spare_lock:
        spare = _spare.get(device.index)
        if spare is None or spare.numel() < aligned:
            spare = run_on_side_thread(lambda: _zeros(device, max(SPARE_COUNTERS, aligned)), device)
            _handed_out.append(spare)
        _spare[device.index] = spare[aligned:]
        return spare[:counters]


def _zeros(device: Any, count: int) -> Any:
    import torch

    return torch.zeros(count, dtype=torch.int32, device=device)
