"""Any command with any words on any file ends as it should: a bounded part of `make fuzz-cli`, without Ctrl-C."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import program


@pytest.mark.parametrize("runs", [40, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_random_commands_on_random_files_end_well(runs: int, tmp_path: Path) -> None:
    command = [*program("cli_fuzz"), str(tmp_path), str(runs), "0", "0.0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["broken"] == []
    assert {"0", "2", "5"} <= told["ended"].keys()
