"""Winners that a job starts with: from frozen files, and from rank 0. They precede the store.

A frozen file is JSON: `{"device": key, "kernels": [{"kernel", "source_hash", "problem", "config", "time_us"}, ...]}`,
in an order of its own, so that equal winners give equal bytes. `BLOCKTUNE_FROZEN_KERNELS` names files, separated as in
PATH.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

from blocktune.kernels.files.file_path import file_path
from blocktune.kernels.files.reading import SERVED_BYTES, json_value, read_trusted
from blocktune.kernels.files.variables import FROZEN_KERNELS
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.stored.places import user_store_path
from blocktune.kernels.stored.provenance import Reuse
from blocktune.kernels.stored.store_views import USER_DISPATCH
from blocktune.kernels.tuned.config import Problem, UserConfig
from blocktune.kernels.tuned.fallback import UserWinner, winner_of
from blocktune.kernels.values.errors import StoreError, UsageError

logger = logging.getLogger("blocktune")

Key = tuple[str, str, str]
"""A device's key, a kernel's name and the hash of its source."""


class FrozenRow(TypedDict):
    """A winner in a frozen document: problem and config as their own documents."""

    kernel: str
    source_hash: str
    problem: str
    config: str
    time_us: float


class FrozenDocument(TypedDict):
    """The winners of a device."""

    device: str
    kernels: list[FrozenRow]


_winners: dict[Key, list[UserWinner]] = {}
_files_read: set[Path] = set()
_names_refused: set[str] = set()


def frozen_winners(kernel: str, source_hash: str, device: DeviceSpec) -> list[UserWinner]:
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
    """Take the winners of a frozen file, once in a process; returns how many it holds.

    Raises:
        UsageError: it is missing or not in order.
    """
    path = file_path(name)
    if path in _files_read:
        return 0
    try:
        document = json_value(read_trusted(path, SERVED_BYTES))
    except (OSError, ValueError, StoreError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"The frozen file {path} cannot be read: {reason}. Write it again by `tune kernels --freeze`, or correct "
            f"{FROZEN_KERNELS.name}."
        ) from error
    count = take(document)
    _files_read.add(path)
    return count


def take(document: object) -> int:
    """Let winners of a document precede what the store knows; returns how many there are.

    Raises:
        UsageError: the document is not in order; then none of it is taken.
    """
    rows = check(document)
    for key, winner in rows:
        kept = [other for other in _winners.get(key, []) if other.problem != winner.problem]
        _winners[key] = [*kept, winner]
    return len(rows)


def check(document: object) -> list[tuple[Key, UserWinner]]:
    """Return the winners of a document, with what they belong to.

    Raises:
        UsageError: the document is not in order.
    """
    try:
        if not isinstance(document, dict):
            raise TypeError(f"a document must be an object, but got {document!r:.80}")
        return [(_key(document["device"], row), winner_of(row, Reuse.EXACT)) for row in document["kernels"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"The frozen document is not in order: {error!r}. It must have a device and kernels."
        ) from error


def known_document(device: DeviceSpec) -> FrozenDocument:
    """Return what this process knows of kernels on a device: what it was given, then what the user's store holds.

    A store that cannot be read counts as empty.
    """
    rows = [
        frozen_row(kernel, source_hash, winner.problem, winner.config, winner.time_us)
        for (key, kernel, source_hash), winners in _winners.items()
        for winner in winners
        if key == device.key
    ]
    given = {_place(row) for row in rows}
    return frozen_document(device.key, rows + [row for row in _stored_rows(device) if _place(row) not in given])


def _stored_rows(device: DeviceSpec) -> list[FrozenRow]:
    try:
        from blocktune.kernels.stored.store_file import SqliteRows  # needs `_sqlite3`, which a frozen file does not

        found = SqliteRows(user_store_path(), USER_DISPATCH).read(device)
    except Exception as error:  # whatever is wrong with a place or a file
        logger.info("No stored configs of autotuned kernels: %s", error)
        return []
    return [
        FrozenRow(
            kernel=row["kernel"],
            source_hash=row["source_hash"],
            problem=row["problem"],
            config=row["config"],
            time_us=row["time_us"],
        )
        for row in found
        if row["device_key"] == device.key
    ]


def _place(row: FrozenRow) -> tuple[str, str, str]:
    return row["kernel"], row["source_hash"], row["problem"]


def forget_frozen() -> None:
    """Drop all winners that were taken."""
    _winners.clear()
    _files_read.clear()
    _names_refused.clear()


def frozen_row(kernel: str, source_hash: str, problem: Problem, config: UserConfig, time_us: float) -> FrozenRow:
    """Return the form of a winner in a frozen document."""
    return {
        "kernel": kernel,
        "source_hash": source_hash,
        "problem": problem.document,
        "config": config.document,
        "time_us": time_us,
    }


def frozen_document(device_key: str, rows: Iterable[FrozenRow]) -> FrozenDocument:
    """Return a document of winners, in an order that follows from them."""
    return {"device": device_key, "kernels": sorted(rows, key=_place)}


def _key(device_key: object, row: Mapping[str, object]) -> Key:
    kernel, source_hash = row["kernel"], row["source_hash"]
    if not (isinstance(device_key, str) and isinstance(kernel, str) and isinstance(source_hash, str)):
        raise TypeError("device, kernel and source_hash must be texts")
    return device_key, kernel, source_hash
