"""The software that a measurement depends on, as found on this machine."""

import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

from blocktune.db.records.records import Environment, Regime
from blocktune.kernels.files.variables import COMMIT
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.nvml import driver_version
from blocktune.tuner.compile.compiler import ptxas_version
from blocktune.tuner.measure.protocol import PROTOCOL_VERSION
from blocktune.tuner.measure.telemetry import GpuMonitor


def measuring_environment(device: DeviceSpec, monitor: GpuMonitor, regime: Regime = Regime.SUSTAINED) -> Environment:
    """Return the environment of times taken on a present GPU."""
    return Environment(
        triton=version("triton"),
        ptxas=ptxas_version(device.limits.cc),
        torch=version("torch"),
        cuda=_cuda_of_torch(),
        driver=driver_version(),
        protocol=PROTOCOL_VERSION,
        power_limit_w=monitor.power_limit_w,
        regime=regime,
    )


def _cuda_of_torch() -> str:
    """Return the version of CUDA that torch was built for, without its import, which takes seconds of every run."""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    return run_path(str(Path(torch.origin).with_name("version.py")))["cuda"] or ""


def predicting_environment(device: DeviceSpec) -> Environment:
    """Return the environment of predictions: compilers only, no driver, no GPU."""
    return Environment(
        triton=version("triton"),
        ptxas=ptxas_version(device.limits.cc),
        torch=version("torch"),
        protocol=PROTOCOL_VERSION,
    )


_SOURCES = Path(__file__).resolve().parents[3]


def source_commit(root: Path = _SOURCES) -> str:
    """Return the commit of the sources that measure, with `+` after it if they were changed since.

    Args:
        root: the folder that holds the rooms.

    Returns:
        What the variable `COMMIT` says, or Git; empty where neither knows, as in an installed package.
    """
    named = COMMIT.text()
    if named or not (root / ".git").exists():
        return named
    commit = _git(root, "rev-parse", "HEAD")
    return commit + ("+" if commit and _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str:
    """Return what Git prints; nothing where it fails or is missing."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
