"""Flags of `tune run` that what is tuned does not support: they are refused, not ignored."""

from collections.abc import Mapping
from typing import Any

from blocktune.kernels.values.errors import UsageError


def refuse(flags: Mapping[str, Any], instead: str) -> None:
    """Check that no flag is given; a flag that is not given is None, empty, 0 or False. `instead` ends the message.

    Raises:
        UsageError: some are given.
    """
    given = [name for name, value in flags.items() if value]
    if given:
        raise UsageError(f"{', '.join(given)}: not supported here. {instead}")
