"""The inputs of a fuzzer: one archive for each in the repository, which every run of the tests reads again."""

import hashlib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tools import ROOT

FOLDER = ROOT / "tests/data/corpus"
MOST_INPUTS, MOST_BYTES = 400, 4096
"""What an archive keeps: small inputs, the smallest first."""
_ALWAYS = (1980, 1, 1, 0, 0, 0)
"""The time of every member, so that equal inputs are an equal archive."""


def archive_of(name: str) -> Path:
    """Return where the inputs of a parser are kept."""
    return FOLDER / f"{name}.zip"


def load(path: Path) -> list[bytes]:
    """Return the inputs of an archive; none where there is no such file."""
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(member) for member in archive.namelist()]


def save(path: Path, inputs: Iterable[bytes]) -> int:
    """Write an archive of inputs, and return how many it keeps."""
    kept = sorted({each for each in inputs if len(each) <= MOST_BYTES}, key=lambda each: (len(each), each))[
        :MOST_INPUTS
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for each in kept:
            archive.writestr(
                zipfile.ZipInfo(hashlib.sha256(each).hexdigest()[:16], _ALWAYS), each, zipfile.ZIP_DEFLATED
            )
    return len(kept)
