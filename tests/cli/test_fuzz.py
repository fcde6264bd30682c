"""Any command with any words on any file ends as it should: a bounded part of `make fuzz-cli`, without Ctrl-C."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tools import program


@pytest.mark.parametrize(
    ("seed", "runs"), [(20, 24), *(pytest.param(seed, 250, marks=pytest.mark.exhaustive) for seed in range(1, 21))]
)
def test_random_commands_on_random_files_end_well(seed: int, runs: int, tmp_path: Path, code_folder: Path) -> None:
    """5,000 commands a night; the first 24 of them compile nothing."""
    command = [*program("stores.cli_fuzz"), str(tmp_path), str(runs), str(seed), "0.0"]
    caches = {"TRITON_CACHE_DIR": str(code_folder), "XDG_CACHE_HOME": str(code_folder / "resources")}
    result = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["broken"] == []
    assert {"0", "2", "5"} <= told["ended"].keys()
