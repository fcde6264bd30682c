"""What a room takes from one above it: a name for what is found there, so that no import runs upward.

The root, where all rooms meet, says where each name is at home (blocktune/__init__.py).
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

_homes: dict[str, str] = {}


def bind(homes: Mapping[str, str]) -> None:
    """Remember in which module each name is; none of them is imported yet."""
    _homes.update(homes)


def bound_value(name: str) -> Any:
    """Return what a name was bound to; the first call imports its module."""
    return getattr(import_module(_homes[name]), name)
