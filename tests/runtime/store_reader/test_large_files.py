"""What production reads may be large, or made to be: it is bounded, and nothing of it is lost without a word."""

import hashlib
import json
import logging
import os
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktune.db.exchange.document import frozen_document, save_text
from blocktune.db.store import ResultStore
from blocktune.kernels.files import json_pieces
from blocktune.kernels.files.json_pieces import canonical_pieces, canonical_text, loads_in_pieces
from blocktune.kernels.files.reading import json_value
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.values.errors import ForeignStoreError, StoreCorruptError, StoreError
from blocktune.runtime.store_reader import export_file, store_file
from blocktune.runtime.store_reader.export_file import rows_in_file, seal_of
from blocktune.runtime.store_reader.sources import JsonConfigs, SqliteConfigs
from blocktune.runtime.store_reader.store_file import SqliteRows
from blocktune.runtime.store_reader.store_views import DISPATCH, USER_DISPATCH, digest_of
from tests.support.fakes.dispatch_fakes import H200, best, config, shape_like, store_with
from tests.support.stores.bad_stores import changed_by
from tests.support.stores.large_stores import multiplied

pytestmark = [pytest.mark.triton_free, pytest.mark.usefixtures("plain_kernel")]

H100 = device_named("h100_sxm5")
SHAPE = shape_like()
MANY_BYTES = 400 << 20
"""What a hostile file tries to make."""


# --- many winners ---


def test_thousands_of_winners_are_all_read(store: Path) -> None:
    found = SqliteConfigs(multiplied(store, 5000)).configs(H200)
    assert len({row.shape for row in found}) == len(found) == 5000


def test_what_is_more_than_a_process_takes_is_counted_in_a_warning(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_file, "MAX_ROWS", 100)
    assert len(SqliteRows(multiplied(store, 150)).read(H200)) == 100
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "holds 150 winners" in warning
    assert "tune freeze" in warning


def test_another_devices_winners_never_displace_those_of_this_one(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_file, "MAX_ROWS", 100)
    multiplied(store, 150, device=H100)
    with ResultStore.open(store) as opened:
        opened.set_best(best(shape_like(4096), config()))
    rows = SqliteRows(store).read(H200)
    assert len(rows) == 100
    assert [row["device_key"] for row in rows] == [H200.key] + 99 * [H100.key]
    assert {row["device_key"] for row in SqliteRows(store).read(H100)} == {H100.key}


def test_rows_come_in_the_same_order_from_files_that_were_written_in_another(tmp_path: Path) -> None:
    winners = [
        best(shape_like(length), config(), device=device) for length in (128, 256, 512) for device in (H100, H200)
    ]
    one = store_with(tmp_path / "one.db", *winners)
    other = store_with(tmp_path / "other.db", *reversed(winners))
    assert SqliteRows(one).read(H200) == SqliteRows(other).read(H200)


def test_a_time_keeps_all_of_its_digits(tmp_path: Path, store: Path) -> None:
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("UPDATE best SET time_us = ?, served_checksum = NULL", (100 / 3,))
    assert [row["time_us"] for row in SqliteRows(store).read(H200)] == [100 / 3]


# --- what is not ours ---


def test_the_views_are_those_that_the_migrations_make(store: Path) -> None:
    with closing(sqlite3.connect(store)) as connection:
        made = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'view'").fetchall())
        for view in (DISPATCH, USER_DISPATCH):
            form = view.forms[digest_of(made[view.name])]
            assert set(form.columns) <= {row[1] for row in connection.execute(f"PRAGMA table_info({view.name})")}
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            assert {table for table in tables if table in made[view.name].split()} == set(form.tables)


def view_of(column: str, more: str = "") -> Callable[[Path], None]:
    """Puts a view of another program in the place of ours."""

    def change(path: Path) -> None:
        changed_by("DROP VIEW dispatch")(path)
        changed_by(
            f"CREATE VIEW dispatch AS SELECT '{H200.key}' AS device_key, {column} AS shape_json, '' AS config_json, "
            f"'' AS kernel_hash, 'measured' AS origin, 1.0 AS time_us, '' AS triton, '' AS ptxas, '' AS driver {more}"
        )(path)

    return change


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (view_of(f"hex(zeroblob({MANY_BYTES // 2}))"), ForeignStoreError),
        (view_of(f"printf('%{MANY_BYTES}d', 1)"), ForeignStoreError),
        (view_of("''", "UNION ALL SELECT '', '', '', '', '', 1, '', '', ''"), ForeignStoreError),
        (changed_by(f"UPDATE shape SET document = printf('%{MANY_BYTES // 8}d', 1)"), StoreCorruptError),
        (changed_by(f"UPDATE blocktune_schema SET version_num = printf('%{MANY_BYTES // 8}d', 1)"), StoreCorruptError),
    ],
    ids=["zeroblob", "printf", "union", "document", "version"],
)
def test_no_file_makes_the_reader_make_large_values(
    store: Path, damage: Callable[[Path], None], error: type[StoreError]
) -> None:
    damage(store)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(error):
        SqliteRows(store).read(H200)
    assert time.thread_time() - began < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # in KiB


def test_a_table_that_is_a_view_is_refused(store: Path) -> None:
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("PRAGMA legacy_alter_table = ON")
        connection.execute("ALTER TABLE shape RENAME TO hidden")
        connection.execute("CREATE VIEW shape AS SELECT * FROM hidden")
    with pytest.raises(ForeignStoreError, match="is not the one that blocktune makes"):
        SqliteRows(store).read(H200)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("shape.document", "x'00'"),
        ("shape.document", f"printf('%{1 << 19}d', 1)"),
        ("shape.document", "json_set(document, '$.features', 5)"),
        ("shape.document", "json_set(document, '$.features', json('[1]'))"),
        ("config.document", "json_set(document, '$.kernel', json('[1]'))"),
        ("kernel.source_hash", "x'ff'"),
        ("best.time_us", "'fast'"),
        ("best.time_us", "9e999"),
        ("best.origin", "CAST(x'ff' AS TEXT)"),
    ],
)
def test_a_value_of_another_kind_costs_its_row_alone(
    tmp_path: Path, column: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = best(shape_like(256), config(64), kernel_hash="1" * 16)
    path = store_with(tmp_path / "store.db", best(SHAPE, config()), other)
    table, name = column.split(".")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute(f"UPDATE {table} SET {name} = {value} WHERE id = 2")
    assert [row.shape for row in SqliteConfigs(path).configs(H200)] == [SHAPE]
    assert "1 row(s) of" in caplog.text


def test_winners_of_many_functions_do_not_displace_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    ResultStore.open(path).close()
    monkeypatch.setattr(store_file, "MAX_ROWS", 10)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "INSERT INTO device (id, key, name, compute_capability, num_sms, source, document) "
            "VALUES (1, ?, 'NVIDIA H200', '9.0', 132, 'catalogue', '{}')",
            (H200.key,),
        )
        connection.execute(
            "INSERT INTO environment (id, digest, triton, ptxas, torch, cuda, driver, protocol, power_limit_w) "
            "VALUES (1, '', '', '', '', '', '', 1, 0)"
        )
        connection.executemany(
            "INSERT INTO kernel (id, name, source_hash) VALUES (?, ?, '0123456789abcdef')",
            [(number + 1, f"module:function{number}") for number in range(50)],
        )
        connection.execute("INSERT INTO shape (id, document) VALUES (1, '{}')")
        connection.execute("INSERT INTO config (id, document) VALUES (1, '{}')")
        connection.executemany(
            "INSERT INTO best (device_id, environment_id, kernel_id, shape_id, config_id, created_at, origin, time_us, "
            "trials) VALUES (1, 1, ?, 1, 1, '2026-01-01', 'measured', 1.0, 1)",
            [(number + 1,) for number in range(50)],
        )
    rows = SqliteRows(path, USER_DISPATCH).read(H200, kernel="module:function49", source_hash="0123456789abcdef")
    assert [row["kernel"] for row in rows] == ["module:function49"]


# --- results files ---


def frozen(path: Path, device: DeviceSpec = H200, count: int = 1) -> Path:
    winners = [best(shape_like(128 + number), config(), device=device) for number in range(count)]
    save_text(canonical_text(frozen_document(device, winners)), path)
    return path


def test_a_file_of_thousands_of_winners_is_read(tmp_path: Path) -> None:
    assert len(JsonConfigs(frozen(tmp_path / "h200.json", count=2000)).configs(H200)) == 2000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" + "[]," * 2_000_000 + "[]]", "more than 200000 values"),
        ('{"bests":[' + "{}," * 2_000_000 + "{}]}", "more than 200000 values"),
        ('{"bests":' + "[" * 3_000_000, "is not JSON"),
        ('{"bests":["' + "x" * 3_000_000 + '"]}', "more than 65536 characters"),
        (" " * (17 << 20), "it is larger than 16 MiB"),
        ("\0" * (17 << 20), "it is larger than 16 MiB"),
    ],
    ids=["lists", "objects", "depth", "text", "blanks", "zeros"],
)
def test_a_file_that_would_take_long_is_refused_at_once(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "large.json"
    path.write_text(text)
    began = time.thread_time()
    with pytest.raises(StoreError, match=message):
        rows_in_file(path)
    assert time.thread_time() - began < 3


def test_other_threads_go_on_while_a_file_is_decoded(tmp_path: Path) -> None:
    """With `json.loads` of the whole text the longest of their pauses is as long as the decoding."""
    script = """
        import sys, threading, time
        from pathlib import Path
        from blocktune.runtime.store_reader.export_file import rows_in_file
        def longest_share():
            longest, done = 0.0, threading.Event()
            def tick():
                nonlocal longest
                last = time.perf_counter()
                while not done.is_set():
                    now = time.perf_counter()
                    longest, last = max(longest, now - last), now
            thread = threading.Thread(target=tick)
            thread.start()
            began = time.perf_counter()
            assert len(rows_in_file(Path(sys.argv[1]))) == 4000
            took = time.perf_counter() - began
            done.set()
            thread.join()
            return longest / took
        shares = [longest_share()]
        while shares[-1] >= 0.25 and len(shares) < 10:  # another program may have taken the processor away
            shares.append(longest_share())
        print(min(shares))
    """
    path = frozen(tmp_path / "h200.json", count=4000)
    command = [sys.executable, "-P", "-c", "\n".join(line[8:] for line in script.splitlines()), str(path)]
    assert float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) < 0.25


@pytest.mark.parametrize("target", ["/proc/kmsg", "/proc/self/pagemap", "/dev/zero", "/dev/full", "/dev/tty", "/proc"])
@pytest.mark.parametrize("suffix", [".json", ".db"])
def test_links_to_what_blocks_or_never_ends_are_answered_at_once(tmp_path: Path, target: str, suffix: str) -> None:
    link = tmp_path / f"link{suffix}"
    link.symlink_to(target)
    source = JsonConfigs(link) if suffix == ".json" else SqliteConfigs(link)
    began = time.monotonic()
    with pytest.raises(StoreError, match="link"):
        source.configs(H200)
    assert time.monotonic() - began < 60


def test_a_file_that_grows_while_it_is_read_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_file, "SERVED_BYTES", 1024)
    path = tmp_path / "sparse.json"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(StoreError, match="it is larger than 1 KiB"):
        rows_in_file(path)


# --- JSON in pieces ---

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(value=JSON, indent=st.sampled_from([None, 0, 2]))
def test_pieces_make_what_the_whole_text_makes(value: Any, indent: int | None) -> None:
    assert loads_in_pieces(json.dumps(value, indent=indent)) == value
    assert "".join(canonical_pieces(value)) == canonical_text(value)


@given(value=JSON, data=st.data())
def test_a_broken_text_is_refused_as_the_whole_text_is(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text) - 1))
    broken = text[:at] + data.draw(st.sampled_from(["", ",", "]", "}", '"', "1", ":", "[", "x"])) + text[at + 1 :]
    try:
        wanted = json_value(broken)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            loads_in_pieces(broken)
    else:
        assert loads_in_pieces(broken) == wanted


@pytest.mark.parametrize(
    "text", ['{"a":1,"b":2,"a":1}', '{"a":{"b":1,"b":2}}', '[[{"a":1,"\\u0061":2}]]', '[[[{"a":1,"a":1}]]]']
)
@pytest.mark.parametrize("read", [json_value, loads_in_pieces])
def test_an_object_with_two_members_of_one_name_is_refused(read: Callable[[str], Any], text: str) -> None:
    """Readers do not agree on which of them counts."""
    with pytest.raises(ValueError, match="two members with the name"):
        read(text)


def test_a_number_is_not_cut_where_a_piece_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "PIECE_CHARACTERS", (4, 8))
    assert loads_in_pieces("[[123456],[1234567]]") == [[123456], [1234567]]
    with pytest.raises(ValueError, match="more than 8 characters"):
        loads_in_pieces("[[123456789]]")


def test_the_seal_of_a_document_is_the_hash_of_its_canonical_text() -> None:
    text = '{"a":{},"b":[1,{"c":null}]}'
    document = {"b": [1, {"c": None}], "a": {}}
    assert canonical_text(document) == text
    assert seal_of(document | {"sha256": "x"}) == hashlib.sha256(text.encode()).hexdigest()
