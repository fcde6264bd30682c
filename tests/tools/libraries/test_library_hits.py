"""The parts of the libraries' bench that time no kernel: what known launches cost the host, and what ranks tell."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.fakes.fake_triton import FakeGpu
from tests.support.libraries import document as library_document
from tests.support.libraries import hits as library_hits
from tests.support.libraries import steps as library_steps
from tests.support.triton_modes import compiled_here
from tests.tools.libraries.test_library_bench import forget_choices_of_tests, step
from tests.tuner.drop_in.conftest import H200
from tools.libraries import bench as library_bench

pytestmark = compiled_here


def test_known_launches_are_timed_in_three_ways_and_tune_nothing(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(library_steps, "STEPS", {"ours": step})
    for name, value in (("STEPS", ("ours",)), ("ROUNDS", 2), ("LAUNCHES", 3)):
        monkeypatch.setattr(library_hits, name, value)
    forget_choices_of_tests()
    rows = library_hits.known_calls()
    assert [row["kernel"].rpartition(":")[2] for row in rows] == ["scale_kernel", "sum_kernel"]
    assert all(0 < row[way] < math.inf for row in rows for way in ("launch_us", "stock_us", "ours_us"))
    assert len(gpu.launches) == 2 * 3 * 2 * 3 + 3  # kernels, ways, rounds and launches, and the pass itself
    assert not gpu.timed
    forget_choices_of_tests()


def test_what_ranks_tell_comes_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"scene": "one dies", "ranks": [None, {"tuned": True, "config": "a"}]}]
    said = SimpleNamespace(stdout="".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(library_bench.subprocess, "run", lambda *_, **__: said)
    monkeypatch.setattr(library_document, "current_device", lambda: H200)
    monkeypatch.setattr(library_document, "version", lambda name: "1.0")
    library_bench.rank_agreement(tmp_path / "bench.json", 2, 10.0)
    assert library_document.read(tmp_path / "bench.json")["ranks"] == rows
