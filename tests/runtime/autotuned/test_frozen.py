"""One frozen format for the winners of all kernels: sealed, checked, signed where a key is named, by one reader."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.exchange.document import frozen_document, save_text
from blocktune.db.exchange.importing import records_in
from blocktune.db.store import ResultStore
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.files.signature import signed
from blocktune.kernels.files.variables import DB, FROZEN_KERNELS, TRUSTED_KEY
from blocktune.kernels.values.errors import ImportRejectedError, StoreError, UsageError
from blocktune.runtime.autotuned.fallback import stored_winners
from blocktune.runtime.autotuned.frozen import forget_frozen, frozen_winners, load_frozen
from blocktune.runtime.store_reader.export_file import autotuned_rows_in_file, rows_in_file, seal_of
from tests.cli.conftest import tune as tune
from tests.support.stores.frozen_files import BOTH, H200, KERNEL, SOURCE, autotuned_winner, flips_served, frozen_text

pytestmark = pytest.mark.triton_free


@pytest.fixture(autouse=True)
def _nothing_taken() -> Any:
    forget_frozen()
    yield
    forget_frozen()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_text(frozen_text(BOTH), tmp_path / "h200.json")
    return tmp_path / "h200.json"


def blocks(winners: Any) -> list[Any]:
    return [winner.config.parameters["BLOCK"] for winner in winners]


def test_one_file_holds_the_winners_of_both_kinds(path: Path) -> None:
    assert len(rows_in_file(path)) == 2
    assert len(autotuned_rows_in_file(path)) == load_frozen(path) == 3
    assert blocks(frozen_winners(KERNEL, SOURCE, H200)) == [64, 128, 256]
    assert load_frozen(path) == 0  # once in a process


def test_an_import_takes_winners_of_autotuned_kernels_from_a_trusted_file_alone(tune: Any, path: Path) -> None:
    assert "left out 3 winners of autotuned kernels: --trust takes them" in tune("import", path).output
    with ResultStore.open(tune.db) as store:
        assert (len(store.bests()), store.kernel_bests()) == (2, [])
    assert tune("import", path, "--trust").exit_code == 0
    with ResultStore.open(tune.db) as store:
        assert [replace(best, device=H200) for best in store.kernel_bests()] == [
            replace(autotuned_winner(block), default=None) for block in (64, 128, 256)
        ]
    assert blocks(stored_winners(KERNEL, SOURCE, H200, tune.db)) == [64, 128, 256]


@pytest.mark.parametrize(
    ("place", "value", "rule"),
    [
        (("origin",), "predicted", "measured"),
        (("shape", "kernel"), 1, "printable text"),
        (("shape", "problem"), {"n": [1]}, "problem of a kernel"),
        (("config", "parameters"), {"BLOCK": 1 << 63}, "config of a kernel"),
        (("time_us",), -1.0, "time_us"),
        (("kernel_hash",), "x", "16 hexadecimal digits"),
    ],
)
def test_an_import_refuses_a_winner_that_breaks_a_rule(
    path: Path, place: tuple[str, ...], value: Any, rule: str
) -> None:
    document = json.loads(path.read_text())
    *way, last = place
    row = document["bests"][-1]
    for name in way:
        row = row[name]
    row[last] = value
    document["sha256"] = seal_of(document)
    with pytest.raises(ImportRejectedError, match=rule):
        records_in(document)


def test_equal_winners_give_equal_bytes(path: Path) -> None:
    assert frozen_text(reversed(BOTH)) == path.read_text()


def test_no_flipped_bit_serves_another_config(tmp_path: Path) -> None:
    served = flips_served(tmp_path, 300, seed=1)
    assert served.wrong == 0
    assert served.refused > 290  # the others are equal in meaning: a bit of a blank, or the case of an escape


def test_a_changed_row_of_an_export_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    document = json.loads(frozen_text([autotuned_winner(64), autotuned_winner(128)]))
    for name in ("sha256",):
        del document[name]
    for row in document["bests"]:
        row["trials"] = 3  # as exports have it
        del row["checksum"]
    document["bests"][0]["checksum"] = "0" * 16
    (tmp_path / "export.json").write_text(json.dumps(document))
    (row,) = autotuned_rows_in_file(tmp_path / "export.json")
    assert json.loads(row["config"]) == {"BLOCK": 128}
    assert "`bests[0]`" in caplog.text


def test_a_file_that_lost_its_seal_is_refused(path: Path) -> None:
    document = json.loads(path.read_text())
    del document["sha256"]
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="is not a frozen file"):
        load_frozen(path)


def test_every_row_of_a_frozen_file_has_a_checksum(path: Path) -> None:
    """A file that is sealed again after a change of one row loses that row."""
    document = json.loads(path.read_text())
    assert all("checksum" in row for row in document["bests"])
    document["bests"][-1]["config"]["parameters"]["BLOCK"] = 1024
    document["sha256"] = seal_of(document)
    path.write_text(json.dumps(document))
    assert load_frozen(path) == 2


def test_the_unsealed_format_of_old_says_how_to_write_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({"device": H200.key, "kernels": []}))
    with pytest.raises(UsageError, match=r"An older `tune kernels --freeze`.*again by `tune freeze`"):
        load_frozen(path)
    monkeypatch.setenv(FROZEN_KERNELS.name, str(path))
    for _ in range(2):
        assert frozen_winners(KERNEL, SOURCE, H200) == []
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "again by `tune freeze`" in warning.getMessage()


def test_a_file_that_others_can_change_is_not_taken(path: Path) -> None:
    path.chmod(0o666)
    with pytest.raises(UsageError, match="every user may write"):
        load_frozen(path)


def test_with_a_trusted_key_only_its_owner_s_files_are_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, secret, public = Ed25519PrivateKey.generate(), path.parent / "key", path.parent / "key.pub"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    secret.touch(mode=0o600)
    secret.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    monkeypatch.setenv(TRUSTED_KEY.name, str(public))
    with pytest.raises(UsageError, match="carries no signature"):
        load_frozen(path)
    assert stored_winners(KERNEL, SOURCE, H200, path) == []
    document = json.loads(path.read_text())
    save_text(canonical_text(signed(document, document["sha256"], secret)), path)
    assert load_frozen(path) == 3
    assert len(stored_winners(KERNEL, SOURCE, H200, path)) == 3


def test_the_file_that_the_environment_names_as_the_store_serves_autotuned_kernels(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DB.name, str(path))
    assert blocks(stored_winners(KERNEL, SOURCE, H200)) == [64, 128, 256]
    assert stored_winners(KERNEL, "f" * 16, H200) == []


def test_a_document_of_results_alone_is_read(tmp_path: Path) -> None:
    for text in ("{", "[]", "1", '{"format": "blocktune-results"}', "[" * 10_000):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(StoreError):
            autotuned_rows_in_file(tmp_path / "x.json")
        with pytest.raises(UsageError):
            load_frozen(tmp_path / "x.json")


def test_a_row_that_breaks_a_rule_refuses_its_file(tmp_path: Path) -> None:
    document = frozen_document(H200, [autotuned_winner(64), autotuned_winner(128)])
    document["bests"][0]["config"]["parameters"]["BLOCK"] = 1 << 63
    del document["bests"][0]["checksum"]
    document["sha256"] = seal_of(document)
    (tmp_path / "h200.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="A parameter must be less than"):
        load_frozen(tmp_path / "h200.json")
    assert frozen_winners(KERNEL, SOURCE, H200) == []
