"""Variables of the environment that switch something on or off."""

import os

from blocktune.kernels.values.errors import UsageError

ON, OFF = ("1", "on", "yes", "true"), ("0", "off", "no", "false")


def is_switched_on(variable: str, way_out: str, *, unless_set: bool = False) -> bool:
    """Return what a variable says: 1 or 0, or a word for either.

    Args:
        variable: its name.
        way_out: what an error tells people to do.
        unless_set: what holds where it is not set, or empty.

    Raises:
        UsageError: it says neither.
    """
    said = os.environ.get(variable, "")
    if not said:
        return unless_set
    if said.lower() not in (*ON, *OFF):
        raise UsageError(f"{variable} must be 1 or 0, but got {said!r:.80}. {way_out}")
    return said.lower() in ON
