"""Every command as a process of its own: it ends as it should, and prints nothing but what it has to say.

Libraries print when they are imported or when the process ends, which a command that runs in the process of the tests
does not show. Triton 3.9 lists what Python has not freed by then.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stores.new_stores import new_store
from tools.pages.command_reference import leaf_commands

ROOT = Path(__file__).parents[2]
WINNERS = ROOT / "blocktune/results/h100.json"
SWEEP = next((ROOT / "results/sweeps").glob("*.sweep.json.gz"))
SHAPE = "--seq 512 --dim 64 --device h200"
DONE, WRONG_USE, NO_GPU, NOTHING_MEASURED = 0, 2, 4, 6

COMMANDS = {
    "bench": ("--seq 512 --dim 64", NO_GPU),
    "contribute": ("gpu.json", NO_GPU),
    "best": (SHAPE, DONE),
    "buckets": ("--device h200", DONE),
    "lab calibrate": ("no-such-sweeps", WRONG_USE),
    "devices": ("", DONE),
    "diff": (f"{WINNERS} {WINNERS}", DONE),
    "doctor": ("", DONE),
    "explain": (f"{SHAPE} --kernel flash_fwd", DONE),
    "export": ("- --device h200", DONE),
    "freeze": ("frozen.json --device h200", NOTHING_MEASURED),
    "gc": ("", DONE),
    "import": (f"{WINNERS} --trust", DONE),
    "kernels": ("", DONE),
    "ladder": (SHAPE, DONE),
    "lab sweeps show": (str(SWEEP), DONE),
    "lab sweeps write": ("sweeps", DONE),
    "list": ("", DONE),
    "merge": (f"{WINNERS} --trust", DONE),
    "lab noise": ("--seq 512 --dim 64", NO_GPU),
    "occupancy": ("--cc 9.0 --warps 4 --regs 168 --shared 115712", DONE),
    "profile": (f"{SHAPE} --sass --kernel flash_fwd", DONE),
    "lab record": (f"sweeps --shapes {ROOT}/results/dense-sweeps/shapes.toml", WRONG_USE),
    "lab rematch": ("no-such-store.db", WRONG_USE),
    "lab replay": (f"{SWEEP} --strategy random --seeds 1", DONE),
    "report": (f"{SWEEP} --out report.html", DONE),
    "roofline": ("--device h200", DONE),
    "run": (SHAPE, DONE),
    "ui": ("no-such-place", WRONG_USE),
    "verify": ("", NO_GPU),
}
"""What follows a command, and its exit status where there is no GPU."""


def test_no_command_is_left_out() -> None:
    assert sorted(COMMANDS) == sorted(leaf_commands())


@pytest.mark.few(6)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_as_it_should(command: str, tmp_path: Path) -> None:
    words, status = COMMANDS[command]
    environment = os.environ | {
        "BLOCKTUNE_DB": str(new_store(tmp_path / "results.db")),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    line = [sys.executable, "-P", "-m", "blocktune.cli.main", *command.split(), *words.split()]
    ended = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert ended.returncode == status, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "nanobind" not in ended.stderr
    assert "Warning" not in ended.stderr
