"""The file of the source hashes of the kernels that ship (blocktune.kernels.files.known_hashes.py)."""

import json
from unittest import mock

from blocktune.kernels import registry
from blocktune.kernels.base import source_hash
from blocktune.kernels.files import known_hashes


def hashes_text() -> str:
    """Return the text of the file, as today's sources have it."""
    found: dict[str, str] = {}

    def note(functions: tuple[object, ...]) -> None:
        found[known_hashes.name_of(functions)] = source_hash.computed_hash(functions)

    with mock.patch.object(source_hash, "known_hash", note):
        for kernel in registry.KERNELS.values():
            assert type(kernel)().source_hash in found.values()  # a new one, which has not found its hash yet
    return json.dumps({"digest": known_hashes.digest(), "hashes": dict(sorted(found.items()))}, indent=1) + "\n"
