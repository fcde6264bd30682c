"""Where the user's store is, and what the variable may name in its place."""

import os
import subprocess
from pathlib import Path

import pytest

from blocktune.db.exchange.document import frozen_document, save_text
from blocktune.db.store import ResultStore, default_store_path
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.runtime.store_reader.places import user_store_path
from blocktune.runtime.store_reader.provenance import Reuse
from blocktune.runtime.store_reader.sources import (
    LayeredConfigs,
    SqliteConfigs,
    UserConfigs,
    default_source,
    read_source,
)
from tests.support.fakes.dispatch_fakes import (
    H200,
    ListSource,
    best,
    config,
    shape_like,
    tuned,
)
from tools import python

pytestmark = [pytest.mark.triton_free, pytest.mark.usefixtures("plain_kernel")]

SHAPE = shape_like()


@pytest.mark.parametrize("named", [None, "{tmp}/a.db", "sqlite:////{tmp}/a.db", "~/a.db"])
def test_reader_and_store_agree_where_the_users_store_is(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blocktune.db.tables.location import StoreTarget

    monkeypatch.delenv("BLOCKTUNE_DB", raising=False)
    if named is not None:
        monkeypatch.setenv("BLOCKTUNE_DB", named.format(tmp=str(tmp_path).lstrip("/")).replace("{", ""))
    assert Path(os.path.abspath(user_store_path())) == StoreTarget.of(None).path


def test_reader_and_store_agree_on_the_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOCKTUNE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert user_store_path() == default_store_path()


@pytest.mark.parametrize("value", ["", ".", "data", "../data"])
def test_no_variable_leads_the_reader_into_the_working_directory(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLOCKTUNE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", value)
    monkeypatch.chdir(tmp_path)
    assert user_store_path() == Path.home() / ".local" / "share" / "blocktune" / "blocktune.db" == default_store_path()


@pytest.fixture
def frozen(tmp_path: Path) -> Path:
    file = tmp_path / "frozen.json"
    save_text(canonical_text(frozen_document(H200, [best(SHAPE, config())])), file)
    return file


def test_the_variable_may_name_a_frozen_file(frozen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", str(frozen))
    assert UserConfigs().configs(H200) == [tuned(SHAPE, config(), reuse=Reuse.EXACT)]
    assert read_source(default_source(), H200)[0][0] == tuned(SHAPE, config(), reuse=Reuse.EXACT)
    with pytest.raises(StoreError, match="results file"):
        user_store_path()  # what only a store can hold is not looked for in it
    with pytest.raises(UsageError, match="results file by its name"):
        ResultStore.open()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[]", "format and schema"),
        ("[" * 100_000, "is not JSON"),
        ("changed", "changed after it was frozen"),
        ("NaN", "changed after it was frozen"),
        ("folder", "it is a directory"),
        ("pipe", "it is a pipe"),
        ("", "is not JSON"),
        ("binary", "cannot be read"),
    ],
)
def test_a_frozen_file_that_cannot_be_read_costs_one_problem_that_names_it(
    text: str | None, message: str, frozen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", str(frozen))
    sealed = frozen.read_text()
    frozen.unlink()
    if text == "folder":
        frozen.mkdir()
    elif text == "pipe":
        os.mkfifo(frozen)
    elif text == "binary":
        frozen.write_bytes(b"\xff\xfe\x00")
    elif text is not None:
        time_us = f'"time_us":{"NaN" if text == "NaN" else 11}'
        frozen.write_text(sealed.replace('"time_us":10.0', time_us) if text in ("changed", "NaN") else text)
    rows, problems = read_source(LayeredConfigs((UserConfigs(), ListSource([tuned(SHAPE, config(64))]))), H200)
    assert [row.config for row in rows] == [config(64)]
    assert len(problems) == 1
    assert message in problems[0]
    assert str(frozen) in problems[0]


def test_a_server_is_not_read_and_its_password_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", "postgresql://me:secret@host/db")
    with pytest.raises(StoreError, match="SQLite files and results files") as caught:
        SqliteConfigs().configs(H200)
    assert "secret" not in str(caught.value)


WITHOUT_SQLITE = """
import sys
sys.modules["_sqlite3"] = None
import torch
from blocktune import attention
from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.store_reader.sources import JsonConfigs, SqliteConfigs, read_source
query = torch.randn(1, 2, 16, 64)
wanted = torch.nn.functional.scaled_dot_product_attention(query, query, query)
torch.testing.assert_close(attention(query, query, query), wanted)
rows, problems = read_source(JsonConfigs(), device_named("h200"))
assert rows and not problems, problems
(problem,) = read_source(SqliteConfigs("some.db"), device_named("h200"))[1]
print(problem)
"""


def test_only_who_reads_a_store_needs_sqlite() -> None:
    done = subprocess.run(python(WITHOUT_SQLITE), capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "_sqlite3" in done.stdout
