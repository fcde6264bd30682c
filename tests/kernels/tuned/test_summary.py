"""What a process says of its autotuned kernels when it ends."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.programs import ROOT

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
    assert lines[0].startswith("__main__:kernel: 3 launches, 1 kinds of calls, 0 tuned here")
    assert lines[1].startswith("blocktune: 1 autotuned kernels, 3 launches, 0 new kinds of calls")
