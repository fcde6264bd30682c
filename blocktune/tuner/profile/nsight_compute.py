"""Runs Nsight Compute (`ncu`) on one config, or reads the counters that it recorded elsewhere."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocktune.kernels.files.reading import COUNTER_BYTES, read_text
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoDeviceError, UsageError
from blocktune.kernels.values.features import NO_FEATURES
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.drop_in.request import LaunchRequest
from blocktune.tuner.profile.comparison import METRICS

REPORT = ".ncu-rep"
TIMEOUT_S = 300
NO_PERMISSION = "ERR_NVGPUCTRPERM"

CSV = ("--csv", "--page", "raw", "--print-units", "base")
RECORD = (
    "--profile-from-start", "off", "--clock-control", "none",
    "--section", "WarpStateStats", "--metrics", ",".join(METRICS),
)  # fmt: skip
"""The clock stays as the driver sets it, since the predictions are for a card that nothing slows."""


def record_command(shape: AttentionShape, config: KernelConfig, ncu: str = "ncu") -> tuple[str, ...]:
    """Return the command that launches a config under Nsight Compute and prints its counters as CSV.

    Raises:
        UsageError: the shape has features, whose further inputs cannot be made up.
    """
    if shape.features != NO_FEATURES:
        raise UsageError(
            f"Only plain attention can be profiled, but got the features {shape.features.label!r}. Leave them out, or "
            "profile your own program and give its counters by `--from`."
        )
    return _command({"shape": shape.to_json(), "config": config.to_json()}, ncu)


def _command(task: Mapping[str, Any], ncu: str) -> tuple[str, ...]:
    return (ncu, *RECORD, *CSV, sys.executable, "-P", "-m", "blocktune.tuner.profile.target", json.dumps(task))


def record_counters(shape: AttentionShape, config: KernelConfig) -> str:
    """Return the counters of a config as CSV, recorded on the GPU here.

    Raises:
        NoDeviceError: there is no `ncu`, or the driver refuses counters.
        UsageError: the shape has features, or the launch failed.
    """
    return _run_ncu(record_command(shape, config, _ncu()))


def record_launch(request: LaunchRequest, config: LaunchConfig) -> str:
    """Return the counters of an autotuned kernel's config as `record_counters` does."""
    return _run_ncu(_command({"request": request.to_json(), "config": config.to_json()}, _ncu()))


def read_counters(path: Path) -> str:
    """Return the CSV in a file; that of a report (.ncu-rep) is what `ncu` makes of it.

    Raises:
        NoDeviceError: the file is a report, and there is no `ncu`.
        UsageError: the file cannot be read.
    """
    if path.suffix == REPORT:
        return _run_ncu((_ncu(), "--import", str(path), *CSV))
    try:
        return read_text(path, COUNTER_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path} cannot be read: {reason}. Counters are a CSV or a report (*{REPORT}).") from error


def _ncu() -> str:
    found = shutil.which("ncu")
    if found is None:
        raise NoDeviceError(
            "Nsight Compute is missing: `ncu` is not on the PATH. Install it, or record counters elsewhere, by `tune "
            "profile ... --out counters.csv`, and read them here by `--from counters.csv`."
        )
    return found


def _run_ncu(command: tuple[str, ...]) -> str:
    """Return what a run of ncu prints."""
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=dict(os.environ)
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"The profile took more than {TIMEOUT_S} s and was stopped. Take a smaller shape.") from error
    said = found.stdout + found.stderr
    if NO_PERMISSION in said:
        raise NoDeviceError(
            f"The driver does not permit to read counters ({NO_PERMISSION}). NVIDIA says how to permit it: "
            "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
        )
    if found.returncode:
        raise UsageError(f"`ncu` failed with exit status {found.returncode}: {said.strip()[-800:]}")
    return found.stdout
