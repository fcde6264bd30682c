"""The wheel in an environment of its own, which has what the wheel asks for and nothing else."""

import subprocess
from pathlib import Path

import pytest

from tests.package.test_slim import ATTENTION
from tests.support.distributions import linked_environment, pip, unpacked_zip, wheel_of

INSTALLED = """
import importlib.metadata as metadata, sysconfig
import blocktune
assert blocktune.__file__.startswith(sysconfig.get_path("purelib")), blocktune.__file__
print(blocktune.__version__, *sorted(each.name for each in metadata.distributions()))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, whose requirements pip has found there."""
    pytest.importorskip("setuptools", minversion="77", reason="building the wheel needs setuptools >= 77")
    folder = tmp_path_factory.mktemp("installed")
    wheel = wheel_of(unpacked_zip(folder), folder)
    made = linked_environment(folder / "environment", "torch", "triton", "nvidia-ml-py")
    pip("--python", made, "install", "--no-index", wheel)
    return made


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_attention_runs_with_torch_and_triton_alone(python: Path, tmp_path: Path) -> None:
    names = run(python, "-c", INSTALLED, folder=tmp_path)
    assert "blocktune" in names.stdout.split(), names.stderr
    assert {"optuna", "sqlalchemy", "numpy", "typer", "rich", "alembic"}.isdisjoint(names.stdout.lower().split())
    done = run(python, "-c", ATTENTION, folder=tmp_path)
    assert done.stdout.split() == ["exact"], done.stderr


@pytest.mark.parametrize("name", ["blocktune", "tune"])
def test_the_command_says_what_it_needs(python: Path, tmp_path: Path, name: str) -> None:
    done = run(python.parent / name, "run", "--seq", "8192", "--dim", "64", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith('Install it: pip install "blocktune[tune]"\n')
