"""The source hashes that are known without looking at sources are those of today's sources."""

import json
from pathlib import Path

import pytest

from blocktune.kernels import registry
from blocktune.kernels.base.source_hash import computed_hash
from blocktune.kernels.files import known_hashes
from blocktune.kernels.files.known_hashes import FILE, known_hash, name_of
from blocktune.kernels.files.reading import read_text
from blocktune.kernels.portable.forward.general import flash_fwd_general_kernel
from tests.support.triton_modes import compiled_here
from tools.pages.source_hashes import hashes_text

pytestmark = compiled_here

GENERAL = (flash_fwd_general_kernel,)


def test_the_file_is_up_to_date() -> None:
    assert read_text(FILE, 1 << 20) == hashes_text(), "`make results` writes it"


def test_every_kernel_is_known() -> None:
    assert known_hash(GENERAL) == computed_hash(GENERAL) == registry.KERNELS["flash_fwd_general"].source_hash
    assert len(json.loads(read_text(FILE, 1 << 20))["hashes"]) >= len(registry.KERNELS) - 2  # two pairs are alike


def test_a_file_of_other_sources_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"digest": "0" * 32, "hashes": {name_of(GENERAL): "wrong"}}
    for text in (json.dumps(document), None):
        path = tmp_path / f"{len(text or '')}.json"
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(known_hashes, "FILE", path)
        known_hashes._hashes.cache_clear()
        assert known_hash(GENERAL) is None
    monkeypatch.undo()
    known_hashes._hashes.cache_clear()
