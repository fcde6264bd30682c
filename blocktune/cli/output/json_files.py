"""JSON documents of results/: read with a check of what they are, and written whole or not at all."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocktune.kernels.files import reading
from blocktune.kernels.files.file_path import file_path
from blocktune.kernels.values.errors import UsageError


def read_document(path: Path, kind: str, form: str, schema: int) -> dict[str, Any]:
    """Return the document in a file. kind: what messages call such a file; form: its `format`.

    Raises:
        UsageError: it is no document of this format and schema.
    """
    document = read_json(path)
    if not isinstance(document, Mapping) or (document.get("format"), document.get("schema")) != (form, schema):
        raise UsageError(
            f"{path} is not a {kind} file, which has format {form} and schema {schema}. Name another file."
        )
    return dict(document)


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        UsageError: the file cannot be read, or is no JSON.
    """
    try:
        return reading.read_json(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Name another file.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}. Name another file.") from error


def writable(path: Path | None) -> Path | None:
    """Return the file of a flag `--out`, once it is clear that it can be written: what goes there takes minutes to
    make.

    Raises:
        UsageError: it is a folder, or the folder that it is in is missing or not writable.
    """
    if path is None:
        return None
    folder = file_path(path).parent
    if file_path(path).is_dir():
        raise UsageError(f"{path} cannot be written: it is a folder. Name a file in it.")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        problem = "not writable" if folder.is_dir() else "missing"
        raise UsageError(f"{path} cannot be written: the folder {folder} is {problem}. Make it, or name another file.")
    return path


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step, so that whoever reads it sees all of the old text or all of the new.

    Raises:
        UsageError: the file cannot be written.
    """
    from blocktune.db.exchange.document import save_text

    try:
        save_text(text, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Name another file.") from error
