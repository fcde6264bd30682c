"""Results without the names of a machine: a hash that tells it from others, and texts of errors."""

import getpass
import hashlib
import re
import socket
from pathlib import Path

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.nvml import canonical_uuid, gpu_uuids

_PURPOSE = "blocktune contribution "
"""Stands before what is hashed, so that a hash of the same UUID for another purpose differs."""

LEFT_OUT = "..."


def machine_hash(device: DeviceSpec) -> str | None:
    """Return a hash of the machine: of its GPUs' first UUID, which has 128 random bits; None without one."""
    uuids = gpu_uuids() or ((device.uuid,) if device.uuid else ())
    if not uuids:
        return None
    first = min(map(canonical_uuid, uuids))
    return hashlib.sha256((_PURPOSE + first).encode()).hexdigest()[:16]


def without_names(text: str) -> str:
    """Return a text without this machine's and user's names and the user's folder, which errors may repeat."""
    home, host = _home(), socket.gethostname()
    names = {host, host.partition(".")[0], _user()} - {""}
    found = text.replace(home, LEFT_OUT) if home else text
    if not (found and names):
        return found
    return re.sub(rf"\b({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})\b", LEFT_OUT, found)


def _user() -> str:
    """Return the user's name; empty where the user id has none, as in containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the latter since Python 3.13
        return ""


def _home() -> str:
    """Return the user's folder; empty without one, or if it is the root of all paths."""
    try:
        home = str(Path.home())
    except RuntimeError:
        return ""
    return "" if home == "/" else home
