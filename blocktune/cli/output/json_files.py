"""JSON documents of results/: read with a check of what they are, and written whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Name another file.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}. Name another file.") from error


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step, so that whoever reads it sees all of the old text or all of the new.

    Raises:
        UsageError: the file cannot be written.
    """
    from blocktune.db.exchange.document import save_text

    try:
        save_text(text, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}. Name another file.") from error
