"""Rows and files that anybody may have written: the dispatcher takes them within its rules, or leaves them out."""

import json
import logging
import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blocktune.db.exchange.document import document_from, frozen_document
from blocktune.db.exchange.importing import records_from
from blocktune.db.store import ResultStore
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.errors import ImportRejectedError, StoreError
from blocktune.kernels.values.features import MAX_SIZE, Features, MaskKind
from blocktune.kernels.values.shape import Direction
from blocktune.runtime.autotuned.fallback import stored_winners
from blocktune.runtime.selection.fallback import ConfigTable, climb_down
from blocktune.runtime.selection.ladder import Candidate
from blocktune.runtime.selection.miss_file import append_misses, read_misses
from blocktune.runtime.store_reader.export_file import rows_in_file, seal_of
from blocktune.runtime.store_reader.sources import SqliteConfigs, read_source
from blocktune.runtime.store_reader.usable_rows import usable_rows
from tests.support.fakes.dispatch_fakes import H200, best, shape_like
from tests.support.stores.frozen_files import KERNEL, SOURCE, autotuned_winner

pytestmark = pytest.mark.triton_free

SHAPE = shape_like(dtype="bfloat16")
ASKED = (
    SHAPE,
    shape_like(1, seqlen_k=4096, dtype="bfloat16"),
    shape_like(512, dtype="bfloat16", features=Features(window=(5, 5))),
    shape_like(512, dtype="bfloat16", features=Features(mask=MaskKind.BOOLEAN, dropout=True)),
    shape_like(dtype="bfloat16", direction=Direction.BACKWARD),
)
HUGE = 10**400
NUMBERS = st.integers() | st.sampled_from([HUGE, -HUGE, 2**31, 2**63, 0, -1, 1]) | st.floats()
WORDS = st.text(max_size=8) | st.sampled_from(["flash_fwd", "window=5:5", f"window={HUGE}:0", "page=64", "__class__"])
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def winner() -> Any:
    kernel = get_kernel("flash_fwd")
    config = kernel.default_config(SHAPE, H200.limits)
    return best(SHAPE, config, kernel_hash=kernel.source_hash)


def good_row() -> dict[str, Any]:
    made = winner()
    return {
        "device_key": H200.key,
        "shape": made.shape.to_json(),
        "config": made.config.to_json(),
        "kernel_hash": made.kernel_hash,
        "origin": "measured",
        "time_us": 10.0,
        "triton": made.environment.triton,
        "ptxas": made.environment.ptxas,
        "driver": "",
        "power_limit_w": 700,
    }


def places(document: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all values of a JSON document, itself not."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    found = []
    for name, value in items:
        found.append((*way, name))
        if isinstance(value, (dict, list)):
            found += places(value, (*way, name))
    return found


def changed(document: Any, way: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(document))
    inner = copy
    for name in way[:-1]:
        inner = inner[name]
    inner[way[-1]] = value
    return copy


def assert_harmless(rows: Any) -> None:
    """Whatever the ladder offers obeys the rules of its kernel, for every shape that is asked for."""
    table = ConfigTable(rows)
    for shape in ASKED:
        offers = [step for step in climb_down(table, shape, H200.limits) if isinstance(step, Candidate)]
        for offer in offers:
            assert get_kernel(offer.config.kernel).violations(offer.config, shape, H200.limits) == ()
        assert offers, "the default always stands"


@given(way=st.sampled_from(places(good_row())), value=JUNK, added=st.booleans(), name=WORDS)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_in_a_row_is_left_out_or_within_the_rules(
    way: tuple[Any, ...], value: Any, added: bool, name: str
) -> None:
    row = changed(good_row(), (*way[:-1], name) if added else way, value)
    for form in (row, row | {key: json.dumps(row[key], default=repr) for key in ("shape", "config") if key in row}):
        rows = usable_rows([form, good_row()], H200, where="here")
        assert 1 <= len(rows) <= 2
        assert_harmless(rows)


@pytest.mark.parametrize("size", ["batch", "num_heads", "seqlen_q", "seqlen_k", "head_dim"])
@pytest.mark.parametrize("value", [MAX_SIZE + 1, HUGE])
def test_sizes_that_no_kernel_can_hold_are_left_out(size: str, value: int) -> None:
    assert usable_rows([changed(good_row(), ("shape", size), value)], H200, where="here") == []


@given(data=st.data(), value=JUNK.filter(lambda value: b"" not in (value,)), sealed=st.booleans())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_in_a_file_is_left_out_or_within_the_rules(
    data: st.DataObject, value: Any, sealed: bool, tmp_path: Path
) -> None:
    document = json.loads(
        json.dumps(
            frozen_document(H200, [winner(), autotuned_winner(64)]) if sealed else document_from(H200, [winner()], None)
        )
    )
    for row in document["bests"]:
        del row["checksum"]  # as somebody would who means it
    way = data.draw(st.sampled_from(places(document)))
    try:
        broken = changed(document, way, value)
        if sealed and way != ("sha256",):
            broken["sha256"] = seal_of(broken)
        text = canonical_text(broken)
    except (TypeError, ValueError):
        return  # no JSON
    file = tmp_path / "frozen.json"
    file.write_text(text)
    with suppress(StoreError):
        assert_harmless(usable_rows(rows_in_file(file), H200, where="here"))
    for found in stored_winners(KERNEL, SOURCE, H200, file):
        assert found.config.kernel == KERNEL
        assert len(found.config.document) <= 1000
        assert found.time_us is None or 0 < found.time_us < math.inf


def test_one_row_of_another_type_costs_that_row(tmp_path: Path) -> None:
    """In a store, an import and the file of misses: `features` is a text, and here a number."""
    path = tmp_path / "blocktune.db"
    other = replace(winner(), shape=shape_like(512, dtype="bfloat16"))
    with ResultStore.open(path) as store:
        store.set_best(winner())
        store.set_best(other)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE shape SET document = json_set(document, '$.features', 5) WHERE seqlen_q = 512")
    found, problems = read_source(SqliteConfigs(path), H200)
    assert ([each.shape for each in found], problems) == ([SHAPE], [])
    document = document_from(H200, [winner()], [])
    document["bests"][0]["shape"]["features"] = 5
    with pytest.raises(ImportRejectedError, match=r"bests\[0\]\.shape"):
        records_from(document)
    misses = tmp_path / "misses.jsonl"
    append_misses(misses, {(H200.key, SHAPE): 3})
    line = json.loads(misses.read_text())
    line["shape"]["features"] = 5
    misses.write_text(misses.read_text() + json.dumps(line) + "\n")
    assert read_misses(misses) == {(H200.key, SHAPE): 3}


def test_a_frozen_file_that_lost_its_seal_is_no_export(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    export = document_from(H200, [winner()], None)
    path.write_text(json.dumps(export))
    assert len(rows_in_file(path)) == 1
    frozen = frozen_document(H200, [winner()])
    del frozen["sha256"]
    path.write_text(json.dumps(frozen))
    with pytest.raises(StoreError, match="is not a frozen file"):
        rows_in_file(path)
