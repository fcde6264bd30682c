"""Winners that a job starts with: from frozen files, and from rank 0. They precede the store.

`BLOCKTUNE_FROZEN_KERNELS` names the files, which `tune freeze` writes, separated as in PATH. Ranks exchange winners as
rows with `ROW_FIELDS`.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blocktune.kernels.files.file_path import file_path
from blocktune.kernels.files.signature import trusted_key
from blocktune.kernels.files.variables import FROZEN_KERNELS
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.runtime.autotuned.fallback import KernelWinner, winner_of
from blocktune.runtime.store_reader.export_file import Row, autotuned_rows_in_file
from blocktune.runtime.store_reader.provenance import Reuse
from blocktune.runtime.store_reader.sources import autotuned_rows

logger = logging.getLogger("blocktune")

Key = tuple[str, str, str]
"""A device's key, a kernel's name and the hash of its source."""


ROW_FIELDS = ("device_key", "kernel", "source_hash", "problem", "config", "time_us")
"""Of a winner between ranks, as the store's `user_dispatch` view has them: problem and config are texts of JSON."""

_winners: dict[Key, list[KernelWinner]] = {}
_files_read: set[Path] = set()
_names_refused: set[str] = set()


def frozen_winners(kernel: str, source_hash: str, device: DeviceSpec) -> list[KernelWinner]:
    """Return the winners of a kernel that this process was given. A file that the environment names and that cannot be
    taken costs a warning."""
    for name in FROZEN_KERNELS.items():
        _load_named(name)
    return list(_winners.get((device.key, kernel, source_hash), ()))


def is_given_winners() -> bool:
    """Return whether this process was given winners, or its environment names files of them."""
    return bool(_winners) or bool(FROZEN_KERNELS.items())


def _load_named(name: str) -> None:
    """Take the winners of a file that the environment names, or warn once: the store, and strict kernels, go on."""
    if name in _names_refused:
        return
    try:
        load_frozen(name)
    except UsageError as error:
        _names_refused.add(name)
        logger.warning("%s Its winners are not used.", error)


def load_frozen(name: str | Path) -> int:
    """Take the winners of autotuned kernels in a frozen file, once in a process; returns how many it holds.

    Raises:
        UsageError: it is missing or not in order, another user can change it, or the owner of the trusted key that is
            named did not sign it.
    """
    path = file_path(name)
    if path in _files_read:
        return 0
    try:
        count = take(autotuned_rows_in_file(path, signed_by=trusted_key()))
    except StoreError as error:
        raise UsageError(f"{error} {FROZEN_KERNELS.name} and `install(frozen=...)` name frozen files.") from error
    _files_read.add(path)
    return count


def take(rows: Iterable[Mapping[str, Any]]) -> int:
    """Let winners precede what the store knows; returns how many there are.

    Raises:
        UsageError: a row is not in order; then none is taken.
    """
    winners = checked(rows)
    for key, winner in winners:
        add_winner(key, winner)
    return len(winners)


def add_winner(key: Key, winner: KernelWinner) -> None:
    """Let a winner precede what the store knows, in place of an earlier one of its problem."""
    others = [other for other in _winners.get(key, []) if other.shape != winner.shape]
    _winners[key] = [*others, winner]


def checked(rows: Iterable[Mapping[str, Any]]) -> list[tuple[Key, KernelWinner]]:
    """Return the winners of rows, with what they belong to.

    Raises:
        UsageError: a row is not in order.
    """
    try:
        return [(_key_of(row), winner_of(row, Reuse.EXACT)) for row in rows]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"A frozen winner is not in order: {error!r}. Freeze it again by `tune freeze`.") from error


def known_rows(device: DeviceSpec) -> list[Row]:
    """Return what this process knows of kernels on a device, in an order that follows from it: what it was given, then
    what the user's store holds.

    A store that cannot be read counts as empty.
    """
    given = [
        (*key, winner.shape.document, winner.config.document, winner.time_us)
        for key, winners in _winners.items()
        for winner in winners
    ]
    rows = [*_stored_rows(device), *(dict(zip(ROW_FIELDS, values, strict=True)) for values in given)]
    known = {tuple(row[name] for name in ROW_FIELDS[1:4]): row for row in rows if row["device_key"] == device.key}
    return [known[place] for place in sorted(known)]


def _stored_rows(device: DeviceSpec) -> list[Row]:
    try:
        return [{name: row[name] for name in ROW_FIELDS} for row in autotuned_rows(device)]
    except Exception as error:  # whatever is wrong with a place or a file
        logger.info("No stored configs of autotuned kernels: %s", error)
        return []


def forget_frozen() -> None:
    """Drop all winners that were taken."""
    _winners.clear()
    _files_read.clear()
    _names_refused.clear()


def _key_of(row: Mapping[str, Any]) -> Key:
    key = row["device_key"], row["kernel"], row["source_hash"]
    if not all(isinstance(text, str) for text in key):
        raise TypeError("device, kernel and source_hash must be texts")
    return key
