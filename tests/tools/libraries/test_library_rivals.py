"""Examples next to another autotuner's operators: their rows, and how a file is filled."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.libraries import rivals
from tests.support.libraries.document import read, write
from tests.support.triton_modes import compiled_here

pytestmark = compiled_here


def test_examples_are_compared_with_other_operators_which_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor the example computes what PyTorch does."""
    clock = SimpleNamespace(rounds=lambda launches, count: [(20.0, 25.0)] * count)
    monkeypatch.setattr(rivals, "CudaClock", lambda: clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    row = rivals.compared("softmax", "cpu", lambda x: torch.softmax(x, dim=-1))
    assert (row["ours_us"], row["helion_us"], row["difference"], row["error"]) == (20.0, 25.0, 0.0, "")

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ImportError("no such name")

    row = rivals.compared("softmax", "cpu", broken)
    assert (row["error"], "helion_us" in row) == ("ImportError: no such name", False)


def test_only_examples_that_a_file_lacks_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, compared = tmp_path / "bench.json", list[str]()
    known = [{"example": "matmul", "error": ""}, {"example": "attention", "error": "out of memory"}]
    write(path, {"helion": known})
    helion = SimpleNamespace(kernels=lambda seconds: dict.fromkeys(rivals.EXAMPLES))
    monkeypatch.setitem(sys.modules, "tests.support.libraries.helion_kernels", helion)
    monkeypatch.setattr(rivals.importlib.metadata, "version", lambda name: "1.2.0")
    monkeypatch.setattr(rivals, "caches_in", lambda folder: {})

    def row(example: str, device: str, operator: Any) -> dict[str, Any]:
        compared.append(example)
        return {"example": example, "error": ""}

    monkeypatch.setattr(rivals, "compared", row)
    rivals.compare(path, -1.0)
    assert not compared
    rivals.compare(path, 60.0)
    assert compared == ["attention", "softmax"]
    assert [(row["example"], row["error"]) for row in read(path)["helion"]] == [
        ("matmul", ""),
        ("attention", ""),
        ("softmax", ""),
    ]
