"""The checksum of a row: what stands in it is what was written, or the row is named and left out.

It tells accidents, such as a flipped bit on a disk, not authors: whoever changes a row on purpose can change its
checksum too.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.values.errors import UsageError

CHECKSUM = "checksum"
"""The field of a row that holds it."""

DEVICE_CHECKSUM = "device_checksum"
"""The field of an export that holds that of its `device`."""

_DIGITS = 16


def checksum_of(values: Mapping[str, Any]) -> str:
    """Return the checksum of a row's values: the beginning of the SHA-256 of their canonical JSON.

    A value that is None is left out, so that a column that comes later changes no older checksum. A whole number counts
    as equal whether it is a float or an integer, since columns do not keep the difference.

    Raises:
        ValueError: a number is not finite.
    """
    present = {
        name: value if type(value) is str else _plain(value) for name, value in values.items() if value is not None
    }
    return hashlib.sha256(canonical_text(present).encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def require_unchanged(values: Mapping[str, Any], checksum: object) -> None:
    """Check that values are those that the checksum was made of. A row without one is older, and believed.

    Raises:
        UsageError: they are not.
    """
    if checksum is not None and checksum_of(values) != checksum:
        raise UsageError(
            f"The row was changed after it was written: its content does not match its checksum {checksum!r:.40}."
        )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
