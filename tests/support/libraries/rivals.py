"""Examples of this repository under this tuner and written in Helion: what a tuning from nothing takes, and the times
of what it chose."""

import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blocktune.tuner.measure.clock import CudaClock, HookedLaunch
from blocktune.tuner.measure.environment import source_commit
from tests.support.libraries.document import read, write
from tools.libraries.starts import caches_in

Operator = Callable[..., Tensor]

ROUNDS = 60

SEARCH_SECONDS = 40
"""After which Helion ends a search and takes what it has found. On a machine that has just started, its first config
takes almost 20."""

MAX_ERROR = 300

EXAMPLES: Mapping[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "matmul": (((4096, 4096), (4096, 4096)), {}),
    "attention": (((32, 4096, 128),) * 3, {"is_causal": False}),  # Helion's has no mask
    "softmax": (((8192, 4000),), {}),
}
"""The shapes of an example's tensors by its name, and what else it is called with."""


@dataclass(frozen=True, slots=True)
class Operation(HookedLaunch):
    """One operator with its tensors. It has hooks, which do nothing, for the head start of launches by Triton."""

    operator: Operator
    tensors: tuple[Tensor, ...]

    def before(self) -> None:
        """Prepare nothing."""

    def run(self) -> Tensor:
        """Run the operator."""
        return self.operator(*self.tensors)

    def __call__(self) -> None:
        self.run()

    def after(self) -> None:
        """Restore nothing."""


def compare(path: Path, seconds: float) -> None:
    """Add to a file the rows of the examples that it lacks; none is begun after this many seconds."""
    from tests.support.libraries import helion_kernels

    end, version = time.monotonic() + seconds, importlib.metadata.version("helion")
    operators = helion_kernels.kernels(SEARCH_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= caches_in(folder)
        for example in EXAMPLES:
            rows = read(path).get("helion", [])
            if time.monotonic() > end or any(row["example"] == example and not row["error"] for row in rows):
                continue
            row = compared(example, "cuda", operators[example])
            row |= {"helion": version, "helion_limit_seconds": SEARCH_SECONDS}
            others = [each for each in rows if each["example"] != example]
            write(path, read(path) | {"helion": [*others, row]})
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


def compared(example: str, device: str, helion: Operator) -> dict[str, Any]:
    """Return the row of an example: seconds and times of both, and how far Helion's result is from ours, or its
    error."""
    shapes, options = EXAMPLES[example]
    tensors = tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    ours: Operator = getattr(import_module(f"examples.autotuned_{example}"), example)
    found = Operation(lambda *given: ours(*given, **options), tensors), Operation(helion, tensors)
    right, seconds = _first(found[0])
    row = {"example": example, "commit": source_commit(), "ours_seconds": seconds, "error": ""}
    try:
        result, row["helion_seconds"] = _first(found[1])
    except Exception as error:  # whatever Helion raises with this Triton and PyTorch
        return row | {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR]}
    own, theirs = zip(*CudaClock().rounds(found, ROUNDS), strict=True)
    difference = float((result.double() - right.double()).norm() / right.double().norm())
    times = {"ours_us": statistics.median(own), "helion_us": statistics.median(theirs)}
    return row | times | {"difference": difference}


def _first(operation: Operation) -> tuple[Tensor, float]:
    """Return the result of a first call, and the seconds that it takes with its tuning."""
    begin = time.monotonic()
    result = operation.run()
    torch.cuda.synchronize()
    return result, time.monotonic() - begin
