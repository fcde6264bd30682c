"""The source hashes of the kernels that ship, known as long as the text of all their files is as it was.

To find the hashes of all kernels parses more than 500 functions, which took half a second of a process's first call. To
read the files takes a twentieth of that.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from blocktune.kernels.files.reading import SOURCE_BYTES, read_bytes, read_json

KERNELS = Path(__file__).parents[1]
FILE = KERNELS / "source_hashes.json"
"""The digest of the files, and the hashes by `name_of`; `make results` writes it."""
PARTS = ("base", "hardware", "historical", "hopper", "portable", "values")
"""The folders that device code and its constants come from."""


def name_of(functions: Iterable[Any]) -> str:
    """Return what stands for the functions of a kernel in the file."""
    return " ".join(f"{each.__module__}.{getattr(each, '__name__', '')}" for each in functions)


def known_hash(functions: Iterable[Any]) -> str | None:
    """Return the source hash of these jitted functions; None where it has to be computed."""
    from triton import knobs

    if knobs.runtime.interpret:
        return None  # other functions stand for those that the interpreter cannot run
    return _hashes().get(name_of(functions))


@cache
def _hashes() -> Mapping[str, str]:
    document = read_json(FILE) if FILE.exists() else {}
    hashes: dict[str, str] = document["hashes"] if document.get("digest") == digest() else {}
    return hashes


def digest(kernels: Path = KERNELS) -> str:
    """Return 32 hexadecimal digits that change with every file that device code may come from."""
    found = hashlib.sha256()
    for path in sorted(path for part in PARTS for path in (kernels / part).rglob("*.py")):
        found.update(f"{path.relative_to(kernels).as_posix()}\n".encode())
        found.update(read_bytes(path, SOURCE_BYTES))
    return found.hexdigest()[:32]
