"""The boundary around a launch: keys, stores, locks, NVML, versions and listeners may fail, and the launch goes on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("blocktune")

MAX_WARNINGS = 1000
"""Causes that are remembered, so that each is told once. Texts that differ with every launch must not pile up."""

_told: set[tuple[str, str]] = set()


def warn_of_failure(kernel: str, part: str, error: Exception) -> None:
    """Say, once in a process for each cause, that a part around the launch of a kernel has failed."""
    cause = f"{type(error).__name__}: {error}"
    if (part, cause) not in _told and len(_told) < MAX_WARNINGS:
        _told.add((part, cause))
        logger.warning("%s is launched without %s, which failed: %s", kernel, part, cause)


@contextmanager
def tolerance(kernel: str, part: str) -> Iterator[None]:
    """Let a part around the launch of a kernel fail, whatever the reason, with a warning."""
    try:
        yield
    except Exception as error:  # a launch needs none of these parts
        warn_of_failure(kernel, part, error)


def forget_warnings() -> None:
    """Let every cause be told again."""
    _told.clear()
