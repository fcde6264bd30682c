"""The program that times the host's part of calls without a GPU."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from blocktune.kernels.base.launch import DIRECT_TRITON
from tests.support.triton_modes import TRITON, compiled_here
from tools import program


@compiled_here
@pytest.mark.exhaustive
@pytest.mark.skipif(TRITON != DIRECT_TRITON, reason="its libcuda has what this Triton calls")
@pytest.mark.skipif(shutil.which("cc") is None, reason="its libcuda has to be compiled")
def test_the_time_of_a_call_and_its_functions_are_printed(tmp_path: Path) -> None:
    command = [*program("calls.host_profile"), "cache", "--functions", "5"]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    found = re.search(r"^cache +(\d+\.\d\d) us$", printed, re.MULTILINE)
    assert found is not None, printed
    assert float(found[1]) > 0
    assert "due to restriction <5>" in printed
