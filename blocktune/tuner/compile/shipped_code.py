"""Compiled code on its way from the machine that compiled it to the one that launches it.

A folder of its own holds what a compile left: in `triton` a folder for each kernel, as in Triton's disk cache, and in
`resources` what `ResourceCache` remembers. Both are named by hashes of all that code depends on, so code of other
software is never found where it arrives, and costs no more than its room.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blocktune.db.records.records import Outcome
from blocktune.kernels.files.file_path import replace_file
from blocktune.kernels.files.reading import COMPILED_BYTES, read_bytes
from blocktune.kernels.values.errors import UsageError

KERNELS, RESULTS = "triton", "resources"
"""The parts of the folder."""

MAX_BYTES = 64 << 20
"""Of one shipment; kernels that do not fit are left out."""

_GROUP = "__grp__"
"""How Triton names the file that says where the files of a kernel are. A kernel without it does not count as there."""

_LEVEL = 1


@dataclass(frozen=True, slots=True)
class ShippedCode:
    """The files of kernels by folder and name, and the remembered results by name, all compressed."""

    kernels: Mapping[str, Mapping[str, bytes]]
    results: Mapping[str, bytes]


def packed_code(folder: Path, most_bytes: int = MAX_BYTES) -> ShippedCode:
    """Return what compiles have left in a folder. What did not compile is left out: where the code is wanted, it is
    tried again."""
    kernels: dict[str, dict[str, bytes]] = {}
    for place in sorted(path for path in (folder / KERNELS).glob("*") if path.is_dir()):
        files = {
            file.name: zlib.compress(read_bytes(file, COMPILED_BYTES), _LEVEL)
            for file in place.iterdir()
            if file.is_file()
        }
        most_bytes -= sum(map(len, files.values()))
        if most_bytes < 0:
            break
        kernels[place.name] = files
    texts = {file.name: read_bytes(file, COMPILED_BYTES) for file in (folder / RESULTS).glob("*.json")}
    compiled = {name: text for name, text in texts.items() if json.loads(text)["outcome"] == Outcome.OK}
    return ShippedCode(kernels, {name: zlib.compress(text, _LEVEL) for name, text in compiled.items()})


def unpack_code(code: ShippedCode, kernels: Path, results: Path) -> None:
    """Add code to the caches of this machine. A file that is there stays; other processes may read meanwhile.

    Args:
        code: what arrived.
        kernels: the folder of Triton's cache.
        results: that of `ResourceCache`.

    Raises:
        OSError: a file cannot be written.
        UsageError: a name leads out of its folder.
    """
    for name, files in code.kernels.items():
        place = kernels / _plain(name)
        for file in sorted(files, key=lambda file: file.startswith(_GROUP)):  # a kernel is there once its group is
            text = zlib.decompress(files[file])
            _add(place / _plain(file), _moved_group(text, place) if file.startswith(_GROUP) else text)
    for name, text in code.results.items():
        _add(results / _plain(name), zlib.decompress(text))


def _moved_group(text: bytes, place: Path) -> bytes:
    """Return a group whose files are in another folder: Triton writes whole paths."""
    names = json.loads(text)["child_paths"]
    return json.dumps({"child_paths": {name: str(place / _plain(name)) for name in names}}).encode()


def _add(path: Path, content: bytes) -> None:
    """Add a file to a cache that does not have it."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, content)


def _plain(name: str) -> str:
    """Return a name, checked to be one.

    Raises:
        UsageError: it is a path.
    """
    if not name or name != os.path.basename(name) or name in (".", ".."):
        raise UsageError(f"Shipped code must have plain file names, but got {name!r:.80}.")
    return name
