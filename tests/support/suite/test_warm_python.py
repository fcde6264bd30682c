"""A program runs from a warm server as it runs in a new Python."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.suite import warm_python


def both(*words: str, **told: Any) -> list[tuple[int, str, str]]:
    """Return how a program ended in both ways, and what it printed."""
    command = [sys.executable, "-P", *words]
    cold = subprocess.run(command, capture_output=True, text=True, **told)
    warm = warm_python.run(command, **told)
    return [(done.returncode, done.stdout, done.stderr) for done in (cold, warm)]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "code",
    [
        "import sys; print(sys.argv, __name__, sys.stdin.read() == '')",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('said')",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit; atexit.register(print, 'at the end'); print('first', flush=True)",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
        "import os; print(os.getcwd(), sorted(os.environ), os.environ['HOME'])",
        "import subprocess; print(subprocess.run(['true']).returncode)",
        "import multiprocessing as m; print(m.get_context('spawn').Pool(1).map(abs, [-1]))",
    ],
)
def test_a_program_ends_and_prints_alike(code: str, tmp_path: Path) -> None:
    cold, warm = both("-c", code, "one", "two", cwd=tmp_path, env=os.environ | {"HOME": "/elsewhere"})
    assert warm == cold


def test_a_module_runs_with_its_arguments() -> None:
    cold, warm = both("-m", "json.tool", "--help")
    assert warm == cold
    assert cold[0] == 0


def test_an_error_is_told() -> None:
    done = warm_python.run([sys.executable, "-P", "-c", "raise ValueError('wrong')"])
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: wrong\n")
    with pytest.raises(subprocess.CalledProcessError):
        warm_python.run([sys.executable, "-P", "-c", "1 / 0"], check=True)


def test_what_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        warm_python.run([sys.executable, "-P", "-c", "import time; time.sleep(100)"], timeout=0.5)


def test_what_a_program_costs_is_counted() -> None:
    before = warm_python.used.processor_seconds
    warm_python.run([sys.executable, "-P", "-c", "import time\nwhile time.process_time() < 0.3: pass"])
    assert 0.2 < warm_python.used.processor_seconds - before < 3.0


def test_nothing_of_ours_is_imported_yet() -> None:
    code = "import sys; print([name for name in sys.modules if name.startswith('blocktune')])"
    alone = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # PyTorch's import brings a part of ours along
    assert warm_python.run([sys.executable, "-P", "-c", code], env=alone).stdout == "[]\n"
    assert "'blocktune.autoload'" in warm_python.run([sys.executable, "-P", "-c", code]).stdout
