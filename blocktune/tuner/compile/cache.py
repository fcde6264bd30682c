"""Remembers how compiles ended, so that no config is compiled twice on one machine.

Each key has one JSON file, written next to its place and moved there in one step: any number of processes may read and
write at once, on any file system, and a damaged file costs one entry. The folder may be deleted at any time.
"""

import json
import logging
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from blocktune.db.records.records import Outcome
from blocktune.kernels.files.checksums import CHECKSUM, checksum_of, require_unchanged
from blocktune.kernels.files.file_path import cache_folder, file_path, replace_file
from blocktune.kernels.files.reading import COMPILED_BYTES, read_json
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses

FORMAT = 3
"""Raised when an entry's meaning changes; entries of another format are compiled again."""

REMEMBERED = frozenset({Outcome.OK, Outcome.INFEASIBLE, Outcome.COMPILE_ERROR})
"""A timeout is not remembered: a less busy machine may finish the compile."""

Record = TypeVar("Record", KernelResources, SharedAccesses)

_log = logging.getLogger(__name__)


class ResourceCache:
    """Compile results by `compile_key`, in the user's cache folder unless another is given."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = cache_folder() / "resources" if folder is None else file_path(folder)
        self._writable = True

    @property
    def folder(self) -> Path:
        """Where the entries are."""
        return self._folder

    def get(self, key: str) -> CompileResult | None:
        """Return what was remembered, or None. A damaged entry is dropped with a warning."""
        path = self._path(key)
        try:
            return _result(read_json(path, COMPILED_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.warning("The remembered compile %s is unreadable (%s) and is made again.", path, error)
            return None

    def put(self, key: str, result: CompileResult) -> None:
        """Remember a result. Where the folder cannot be written, one warning is logged and nothing is remembered."""
        if not self._writable or result.outcome not in REMEMBERED:
            return
        try:
            self._write(self._path(key), json.dumps(_entry(result), indent=1))
        except OSError as error:
            self._writable = False
            _log.warning("Compiles are not remembered: %s. Set XDG_CACHE_HOME to a folder that can be written.", error)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _write(self, path: Path, text: str) -> None:
        for folder in (self._folder.parent, self._folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, text.encode())


def _entry(result: CompileResult) -> dict[str, Any]:
    told = {
        "format": FORMAT,
        "config": result.config.to_json(),
        "outcome": str(result.outcome),
        "resources": None if result.resources is None else result.resources.to_json(),
        "shared": None if result.shared is None else result.shared.to_json(),
        "error": result.error,
        "seconds": result.seconds,
    }
    return told | {CHECKSUM: checksum_of(told)}


def _result(entry: dict[str, Any]) -> CompileResult | None:
    """Return the result of an entry; None if it is of another format.

    Raises:
        ValueError, TypeError, KeyError: it is not an entry, or was changed.
    """
    if entry["format"] != FORMAT:
        return None
    require_unchanged({name: entry[name] for name in entry if name != CHECKSUM}, entry[CHECKSUM])
    outcome = Outcome(entry["outcome"])
    if outcome not in REMEMBERED or (outcome is Outcome.OK) != (entry["resources"] is not None):
        raise UsageError(f"An entry must have {sorted(REMEMBERED)}, and resources if ok, but got {outcome}.")
    return CompileResult(
        config=KernelConfig.from_json(entry["config"]),
        outcome=outcome,
        resources=None if entry["resources"] is None else _checked_record(KernelResources, entry["resources"]),
        shared=None if entry["shared"] is None else _checked_record(SharedAccesses, entry["shared"]),
        error=str(entry["error"]),
        seconds=float(entry["seconds"]),
        cached=True,
    )


def _checked_record(kind: type[Record], data: dict[str, Any]) -> Record:
    """Return the record with these fields, each of its type and none below 0."""
    for name, wanted in get_type_hints(kind).items():  # without what `Annotated` says of columns
        value = data[name]
        if type(value) is not wanted or (type(value) is int and value < 0):
            raise UsageError(f"`{name}` must be a {wanted.__name__} from 0 on, but got {value!r}.")
    return kind(**data)
