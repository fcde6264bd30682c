"""Frozen files that say who froze them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.exchange.document import frozen_document, save_text
from blocktune.db.exchange.importing import records_from
from blocktune.db.records.records import Best
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.files.signature import signed, warn_of_unused_key
from blocktune.kernels.files.variables import TRUSTED_KEY
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.store_reader.export_file import rows_in_file, seal_of
from blocktune.runtime.store_reader.sources import JsonConfigs, LayeredConfigs, SqliteConfigs, UserConfigs, read_source
from tests.cli.conftest import Tune, tune, winner
from tests.support.stores.odd_values import odd_file

pytestmark = pytest.mark.triton_free

H200 = device_named("h200")


@pytest.fixture
def winners(winner: Any) -> list[Best]:
    return [winner()]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Two pairs of keys in PEM and one as ssh-keygen writes it: `one`, `other`, `ssh`, and `.pub`."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    plain = serialization.NoEncryption()
    for name in ("one", "other", "ssh"):
        key = Ed25519PrivateKey.generate()
        ssh = name == "ssh"
        private = serialization.PrivateFormat.OpenSSH if ssh else serialization.PrivateFormat.PKCS8
        public = serialization.PublicFormat.OpenSSH if ssh else serialization.PublicFormat.SubjectPublicKeyInfo
        encoding = serialization.Encoding.OpenSSH if ssh else serialization.Encoding.PEM
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_bytes(key.private_bytes(serialization.Encoding.PEM, private, plain))
        (tmp_path / f"{name}.pub").write_bytes(key.public_key().public_bytes(encoding, public))
    return tmp_path


def frozen(keys: Path, winners: list[Best], key: str | None = "one") -> Path:
    document = frozen_document(winners[0].device, winners)
    if key is not None:
        document = signed(document, document["sha256"], keys / key)
    save_text(canonical_text(document) + "\n", keys / "frozen.json")
    return keys / "frozen.json"


@pytest.mark.parametrize("key", ["one", "ssh"])
def test_the_owner_s_signature_is_known(keys: Path, winners: list[Best], key: str) -> None:
    path = frozen(keys, winners, key)
    assert len(rows_in_file(path, signed_by=keys / f"{key}.pub")) == 1
    assert len(rows_in_file(path)) == 1  # a hash is enough where no key is named
    assert len(records_from(json.loads(path.read_text()))[0]) == 1


def test_another_s_and_a_missing_one_are_refused(keys: Path, winners: list[Best]) -> None:
    with pytest.raises(StoreError, match="another signature"):
        rows_in_file(frozen(keys, winners, "other"), signed_by=keys / "one.pub")
    with pytest.raises(StoreError, match="no signature"):
        rows_in_file(frozen(keys, winners, None), signed_by=keys / "one.pub")


def test_a_file_that_was_changed_and_sealed_again_is_refused(keys: Path, winners: list[Best]) -> None:
    path = frozen(keys, winners)
    document = json.loads(path.read_text())
    document["bests"][0]["time_us"] = 1.0
    del document["bests"][0]["checksum"]
    document["sha256"] = seal_of(document)
    path.write_text(json.dumps(document))
    assert len(rows_in_file(path)) == 1
    with pytest.raises(StoreError, match="another signature"):
        rows_in_file(path, signed_by=keys / "one.pub")


def test_strict_takes_signed_files_alone(
    keys: Path, winners: list[Best], monkeypatch: pytest.MonkeyPatch, tune: Tune
) -> None:
    path = frozen(keys, winners)
    tune.store(*winners)
    layers = (UserConfigs(), SqliteConfigs(tune.db), JsonConfigs())
    monkeypatch.setenv("BLOCKTUNE_DB", str(path))
    rows, problems = read_source(LayeredConfigs(layers), H200, signed_by=keys / "one.pub")
    assert [row.shape for row in rows] == [winners[0].shape]
    assert ["signed by the owner" in problem for problem in problems] == [True, True]
    monkeypatch.setenv(TRUSTED_KEY.name, str(keys / "other.pub"))
    shape = winners[0].shape
    for strict in (True, False):
        warnings = Dispatcher(LayeredConfigs(layers), strict=strict).explain(shape, device=H200).warnings
        assert any("another signature" in warning for warning in warnings) == strict


def test_a_key_that_a_dispatcher_does_not_use_is_told_once(
    keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unused_key.cache_clear()
    monkeypatch.setenv(TRUSTED_KEY.name, str(keys / "one.pub"))
    Dispatcher(LayeredConfigs(()), strict=True)
    assert TRUSTED_KEY.name not in caplog.text
    for _ in range(2):
        Dispatcher(LayeredConfigs(()))
    assert caplog.text.count(f"{TRUSTED_KEY.name} names {keys / 'one.pub'}, but a dispatcher that is not strict") == 1


def test_a_source_of_the_program_needs_no_signature(keys: Path) -> None:
    class Own:
        def configs(self, device: Any) -> list[Any]:
            return []

    assert read_source(Own(), H200, signed_by=keys / "one.pub") == ([], [])


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\n\n-----END PRIVATE KEY-----\n"])
def test_what_is_no_key_is_named(keys: Path, winners: list[Best], content: bytes) -> None:
    path = frozen(keys, winners)
    (keys / "bad").touch(mode=0o600)
    (keys / "bad").write_bytes(content)
    with pytest.raises(UsageError, match="Ed25519"):
        rows_in_file(path, signed_by=keys / "bad")
    with pytest.raises(UsageError, match="Ed25519"):
        signed({}, "", keys / "bad")
    with pytest.raises(UsageError, match="cannot be"):
        signed({}, "", keys / "absent")
    with pytest.raises(UsageError, match="Ed25519 key"):
        signed({}, "", keys / "one.pub")


def test_the_command_signs_and_verifies(keys: Path, winners: list[Best], tune: Tune) -> None:
    tune.store(*winners)
    out = keys / "out.json"
    assert tune("freeze", out, "--sign", keys / "one").exit_code == 0
    assert "1 winner," in tune("freeze", out, "--verify", keys / "one.pub").stderr
    assert json.loads(tune("freeze", out, "--verify", keys / "one.pub", "--json").stdout)["bests"] == 1
    assert tune("freeze", out, "--verify", keys / "other.pub").exit_code == 5
    assert tune("freeze", out, "--sign", keys / "absent").exit_code == 2


def test_without_the_package_its_name_is_said(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "sys.modules['cryptography.hazmat.primitives'] = None\n"
        "from blocktune.kernels.files.signature import signed\n"
        "signed({}, '', sys.argv[1])"
    )
    found = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert 'pip install "blocktune[sign]"' in found.stderr


__all__ = ["tune", "winner"]  # fixtures of the command line's tests


def test_a_private_key_that_others_can_read_signs_nothing(keys: Path, winners: list[Best], tune: Tune) -> None:
    tune.store(*winners)
    (keys / "one").chmod(0o640)
    done = tune("freeze", keys / "out.json", "--sign", keys / "one")
    assert done.exit_code == 2
    assert "Others can read the private key" in done.stderr
    assert not (keys / "out.json").exists()


def test_a_key_that_others_can_write_proves_nothing(keys: Path, winners: list[Best]) -> None:
    path = frozen(keys, winners)
    for name in ("one", "one.pub"):
        (keys / name).chmod(0o602)
    with pytest.raises(StoreError, match="every user may write"):
        rows_in_file(path, signed_by=keys / "one.pub")
    with pytest.raises(StoreError, match="every user may write"):
        frozen(keys, winners)


@pytest.mark.parametrize("kind", ["missing", "pipe", "endless", "directory", "socket"])
def test_a_key_that_is_no_file_is_named_at_once(keys: Path, winners: list[Best], kind: str) -> None:
    with pytest.raises(UsageError, match=f"The key file .*{kind} cannot be read"):
        rows_in_file(frozen(keys, winners), signed_by=odd_file(keys, kind))
