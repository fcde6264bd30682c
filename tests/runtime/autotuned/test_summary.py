"""What a process says of its autotuned kernels when it ends."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from blocktune.runtime.autotuned import summary
from blocktune.runtime.autotuned.choices import BoundLaunch
from blocktune.runtime.autotuned.config import LaunchProblem
from blocktune.runtime.autotuned.launches import Kind, Launches, append_launches
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.ladder import Rung
from tools import ROOT

CODE = """
import torch, triton
from triton import language as tl
from blocktune import autotune
@autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], ["n"])
@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, offsets, offsets < n)
x = torch.zeros(8, dtype=torch.int32)
for _ in range(3):
    kernel[(1,)](x, 8)
print(x.tolist())
"""


def test_a_process_says_what_it_launched_and_interpreted_kernels_run_with_the_first_config(tmp_path: Path) -> None:
    script = tmp_path / "program.py"  # Triton reads the source of a kernel
    script.write_text(CODE)
    environment = os.environ | {"BLOCKTUNE_SUMMARY": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-P", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[0, 1, 2, 3, 4, 5, 6, 7]\n"
    lines = done.stderr.splitlines()[-2:]
    assert lines[0].startswith("__main__:kernel: 3 launches, 1 kind of calls, 0 tuned here")
    assert lines[1].startswith("blocktune: 1 autotuned kernel, 3 launches, 0 new kinds of calls")


def test_what_earlier_processes_measured_is_told_as_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Kind("nvidia h200|9.0|132", "m:kernel", LaunchProblem.of({"n": 8}))
    monkeypatch.setenv("BLOCKTUNE_LAUNCHES", str(tmp_path / "launches.jsonl"))
    append_launches(tmp_path / "launches.jsonl", {kind: Launches(hits=9, misses=2, seconds=5.0)})
    facts = {"name": "m:kernel", "misses": 1, "seconds": 0.0, "choices": {}}
    table = SimpleNamespace(calls=1, launches={kind: Launches(hits=4)}, served={})
    kernel = SimpleNamespace(**facts, table=table, tuner=SimpleNamespace(configs=[]))
    monkeypatch.setattr(summary, "kernels", [kernel])
    assert "m:kernel: 1 launch, 0 kinds of calls" in summary.summary()
    assert "0 of them known before, which saved 2.5 s of measuring; 0 kernels" in summary.summary()
    (tmp_path / "launches.jsonl").unlink()
    (tmp_path / "launches.jsonl").mkdir()
    assert "0 of them known before; 0 kernels" in summary.summary()


def test_time_saved_failures_and_other_winners_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first, winner = (triton.Config({"BLOCK": block}) for block in (16, 32))
    problem = LaunchProblem.of({"n": 8})
    choice = Explanation(
        rung=Rung.EXACT,
        reason="measured now",
        shape=problem,
        launched=winner,
        time_us=100.0,
        default_time_us=300.0,
        tuned=True,
        dropped={"kernel BLOCK=64": "run_error: illegal memory access", "kernel BLOCK=128": "infeasible: spills"},
    )
    served = BoundLaunch(choice, (8,))
    served.calls = 10_000
    kernel = SimpleNamespace(
        name="m:kernel",
        misses=1,
        seconds=2.5,
        table=SimpleNamespace(calls=10_000, launches={}, served={(None, problem): served}),
        choices={problem: choice},
        tuner=SimpleNamespace(configs=[first, winner]),
    )
    monkeypatch.setattr(summary, "kernels", [kernel])
    lines = summary.summary().splitlines()
    assert "1 tuned here in 2.5 s, 1 not with the list's first config" in lines[0]
    assert "up to 3.00 times as fast as it" in lines[0]
    assert lines[1] == "  kernel BLOCK=64 failed: run_error: illegal memory access"
    assert len(lines) == 3
    assert lines[2].endswith(
        "1 kernel with another winner than the first config of the list, which saved 2 s of the GPU's time."
    )
