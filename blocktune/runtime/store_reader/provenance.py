"""The provenance of a measurement besides its shape and config, and its worth where something of that differs.

A time is a fact about one kind of device (name, compute capability, SM count: `DeviceSpec.key`), one version of a
kernel's source, the Triton and ptxas that compiled it, and the driver and power limit under which it ran. Whatever else
the caller asks for (data type, head dimensions, mask, direction, features) is part of the shape.

The measuring protocol and its regime are no part of it: winners come from finals, which all versions of the protocol
hold alike, and a call does not know how hard its process drives the GPU. Of two regimes the store keeps the winner that
was measured last.
"""

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import metadata
from typing import TypeVar

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.nvml import driver_version, power_limit_w

Row = TypeVar("Row")

POWER_CLASS = 0.1
"""Power limits that differ by more than this share of the higher one are others."""


class Reuse(StrEnum):
    """How far a measurement's identity is from the present one, nearest first. Only `EXACT` is a measurement of ours.
    Another power limit is as much as another driver.

    Rows of another kind of device, such as an H100's on an H200, are never more than `SAME_CAPABILITY`, and neither are
    rows of unknown descent.
    """

    EXACT = "exact"
    OTHER_DRIVER = "other_driver"
    OTHER_COMPILER = "other_compiler"
    OTHER_SOURCE = "other_source"
    SAME_CAPABILITY = "same_capability"


DISTANCE_OF_REUSE = {reuse: index / 4 for index, reuse in enumerate(Reuse)}
"""What a neighbour's other driver, compiler, source or device weighs besides its shape: a device one doubling."""

MAX_DISTANCE = 6.0
"""How far a neighbour may be. Lengths a factor 8 away on both sides are; beyond it a default is the better guess."""

MAX_NEIGHBOURS = 4
"""How many neighbours a source tries; each may cost a compilation when it fails at launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """device_key: `DeviceSpec.key`. kernel_hash: of the device code. Versions are empty and the power limit is 0 where
    they are unknown."""

    device_key: str
    kernel_hash: str
    triton: str
    ptxas: str
    driver: str
    power_limit_w: int = 0


def present_identity(device: DeviceSpec, kernel_hash: str) -> Identity:
    """Return the identity of a measurement which would be made now, on this device."""
    return Identity(
        device_key=device.key,
        kernel_hash=kernel_hash,
        triton=triton_version(),
        ptxas=ptxas_version(device.limits.sm_arch),
        driver=driver_version(),
        power_limit_w=power_limit_w(device.uuid),
    )


def reuse_of(measured: Identity, present: Identity) -> Reuse | None:
    """Return what a measurement of one identity is worth in another, judged by the greatest difference; None is
    nothing.

    What one side does not know counts as equal: a device that is only named has no driver.
    """
    if measured.device_key != present.device_key:
        same = _compute_capability(measured.device_key) == _compute_capability(present.device_key) != ""
        return Reuse.SAME_CAPABILITY if same else None
    if measured.kernel_hash != present.kernel_hash:
        return Reuse.OTHER_SOURCE
    if _differ(measured.triton, present.triton) or _differ(measured.ptxas, present.ptxas):
        return Reuse.OTHER_COMPILER
    watts = sorted((measured.power_limit_w, present.power_limit_w))
    if _differ(measured.driver, present.driver) or 0 < watts[0] < (1 - POWER_CLASS) * watts[1]:
        return Reuse.OTHER_DRIVER
    return Reuse.EXACT


def nearest_rows(rows: Iterable[tuple[float, Reuse, Row]]) -> list[Row]:
    """Return the rows that a call without its own measurement may take, the nearest first.

    Args:
        rows: what was measured for something else: how far that is, what the measurement is worth here, and the row.
    """
    near = [(distance + DISTANCE_OF_REUSE[reuse], row) for distance, reuse, row in rows if distance <= MAX_DISTANCE]
    return [row for _, row in sorted(near, key=lambda pair: pair[0])[:MAX_NEIGHBOURS]]


def _differ(one: str, other: str) -> bool:
    return bool(one and other) and one != other


def _compute_capability(device_key: str) -> str:
    """Return the middle of a key such as `nvidia h200|9.0|132`; empty for what is no key."""
    parts = device_key.rsplit("|", 2)
    return parts[1] if len(parts) == 3 else ""


@cache
def triton_version() -> str:
    """Return the version of the installed wheel."""
    return metadata.version("triton")


@cache
def ptxas_version(sm_arch: int) -> str:
    """Return the version of Triton's assembler for an architecture such as 90: `12.8.93`. Empty when none works.

    TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH are honoured, as Triton does. The assembler is run once, which
    Triton does anyway before it compiles.
    """
    from triton.backends.nvidia.compiler import get_ptxas_version

    try:
        banner = str(get_ptxas_version(sm_arch))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # none works; then Triton compiles nothing either
        return ""
    match = re.search(r"V(\d+(?:\.\d+)+)", banner)
    return match[1] if match else banner.strip()
