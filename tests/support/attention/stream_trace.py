"""What the streams of a GPU did during a call: how long each kernel took, and which ones ran beside each other."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
MAX_NAME = 80


def traced(run: Callable[[], None]) -> list[dict[str, Any]]:
    """Return what ran on the GPU meanwhile, in the order of the starts: name, stream, and start and length in us."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return placed([event for event in events if event.get("cat") in ON_DEVICE])


def placed(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events of a Chrome trace, from the first start on."""
    ordered = sorted(events, key=lambda event: float(event["ts"]))
    return [
        {
            "name": event["name"][:MAX_NAME],
            "stream": event["args"].get("stream"),
            "start_us": round(float(event["ts"]) - float(ordered[0]["ts"]), 1),
            "us": round(float(event["dur"]), 1),
        }
        for event in ordered
    ]


def totals(events: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each stream how long each kernel took in all, in us."""
    found: dict[str, dict[str, float]] = {}
    for event in events:
        kernels = found.setdefault(str(event["stream"]), {})
        kernels[event["name"]] = round(kernels.get(event["name"], 0.0) + event["us"], 1)
    return found
