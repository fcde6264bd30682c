"""Documents that are not in order: each is rejected by the place of what is wrong, and changes nothing."""

import copy
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blocktune.db.exchange.importing import records_from
from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import ImportRejectedError, UsageError
from blocktune.kernels.values.shape import AttentionShape

Document = dict[str, Any]


def put(*steps: str | int, value: Any) -> Callable[[Document], Any]:
    """Sets the value at a place of the document."""

    def change(document: Document) -> Document:
        inner: Any = document
        for step in steps[:-1]:
            inner = inner[step]
        inner[steps[-1]] = value
        return document

    return change


def drop(*steps: str | int) -> Callable[[Document], Any]:
    def change(document: Document) -> Document:
        inner: Any = document
        for step in steps[:-1]:
            inner = inner[step]
        del inner[steps[-1]]
        return document

    return change


BEST, TRIAL = ("bests", 0), ("trials", 0)
TOMORROW = (datetime.now(UTC) + timedelta(days=2)).isoformat()
REJECTED = [
    (lambda _: [], "`document` must be an object"),
    (lambda _: None, "`document` must be an object"),
    (put("format", value="vllm"), "`format` must be `blocktune-results`"),
    (put("schema", value=2), "`schema` must be an integer from 1 to 1"),
    (put("schema", value=True), "`schema` must be"),
    (put("notes", value="hello"), "`notes` must be absent"),
    (put("x" * 500, value=1), f"`{'x' * 80}` must be absent"),
    (drop("device"), "the field `device`"),
    (put("device", value=7), "`device` must be a device"),
    (put("device", "num_sms", value=-1), "`device` must be a device"),
    (put("device", "cc", value="99.9"), "`device` must be a device"),
    (put("device", "color", value="red"), "`device` must be a device"),
    (put("environments", value=[]), "`environments` must be an object of up to"),
    (put("environments", value={"0" * 16: {}}), "the field `triton`"),
    (put("bests", value={}), "`bests` must be a list"),
    (put("bests", value=[1]), "`bests[0]` must be an object"),
    (put("bests", value=[{}] * 20_001), "`bests` must be a list of up to 20000"),
    (put(*BEST, "pre_hook", value="os.system"), "`bests[0].pre_hook` must be absent"),
    (put(*BEST, "environment", value="f" * 16), "`bests[0].environment` must be a digest that"),
    (put(*BEST, "environment", value=["f"]), "`bests[0].environment` must be an environment's digest"),
    (put(*BEST, "kernel_hash", value="../../x"), "`bests[0].kernel_hash` must be 16"),
    (
        put(*BEST, "votes", value=["a" * 16 + ":" + "b" * 16]),
        "`bests[0].votes[0]` must be the hashes of a machine and a",
    ),
    (put(*BEST, "votes", value=[f"{'a' * 16}:{'b' * 16}:99991231"]), "`bests[0].votes` must be votes of days until"),
    (put(*BEST, "origin", value="guessed"), "`bests[0].origin` must be one of measured"),
    (put(*BEST, "origin", value=["measured"]), "`bests[0].origin` must be one of"),
    (put(*BEST, "created_at", value="yesterday"), "`bests[0].created_at` must be a time in ISO"),
    (put(*BEST, "created_at", value="2026-01-01T00:00:00"), "`bests[0].created_at` must be a time with its zone"),
    (put(*BEST, "created_at", value=TOMORROW), "`bests[0].created_at` must be a time with its zone from"),
    (put(*BEST, "created_at", value="0001-01-01T00:00:00+14:00"), "`bests[0].created_at` must be a time with its zone"),
    (put(*BEST, "created_at", value=12), "`bests[0].created_at` must be a time"),
    (put(*BEST, "time_us", value=0), "`bests[0].time_us` must be a number"),
    (put(*BEST, "time_us", value=-5.0), "`bests[0].time_us` must be a number"),
    (put(*BEST, "time_us", value=math.nan), "`bests[0].time_us` must be a number"),
    (put(*BEST, "time_us", value=math.inf), "`bests[0].time_us` must be a number"),
    (put(*BEST, "time_us", value=10**400), "`bests[0].time_us` must be a number"),
    (put(*BEST, "time_us", value="1"), "`bests[0].time_us` must be a number"),
    (put(*BEST, "time_us", value=None), "`bests[0]` must be an object with `time_us`"),
    (put(*BEST, "speedup_low", value=1e9), "`bests[0].speedup_low` must be a number"),
    (put(*BEST, "trials", value=-1), "`bests[0].trials` must be an integer"),
    (put(*BEST, "shape", "seqlen_q", value=0), "`bests[0].shape` must be a shape (Not a shape: `seqlen_q > 0`"),
    (put(*BEST, "shape", "seqlen_q", value=2**40), "`bests[0].shape` must be a shape (Not a shape: `seqlen_q <= "),
    (put(*BEST, "shape", "window", value=3), "`bests[0].shape` must be a shape (A shape has no "),
    (put(*BEST, "shape", "num_heads_kv", value=5), "`bests[0].shape` must be a shape"),
    (put(*BEST, "shape", value="b2"), "`bests[0].shape` must be a shape"),
    (drop(*BEST, "shape", "batch"), "`bests[0].shape` must be a shape"),
    (
        put(*BEST, "config", "block_m", value=100),
        "`bests[0].config` must be a config (`block_m` must be a multiple of 16",
    ),
    (put(*BEST, "config", "num_stages", value=10**9), "`bests[0].config` must be a config"),
    (put(*BEST, "config", "ir_override", value="/tmp/evil.ttgir"), "`bests[0].config` must be a config"),
    (put(*BEST, "config", "kernel", value="a; import os"), "`bests[0].config` must be a config"),
    (put(*BEST, "config", value={"kernel": "k"} | {f"p{i}": 1 for i in range(20)}), "`bests[0].config` must be"),
    (put(*BEST, "config", value=None), "`bests[0].config` must be a config"),
    (put(*BEST, "default", value=3), "`bests[0].default` must be a config"),
    (put("trials", value="many"), "`trials` must be a list"),
    (put(*TRIAL, "outcome", value="maybe"), "`trials[0].outcome` must be one of ok"),
    (put(*TRIAL, "outcome", value="run_error"), "`trials[0]` must be an object that has `time_us` exactly when"),
    (put(*TRIAL, "time_us", value=None), "`trials[0]` must be an object that has `time_us` exactly when"),
    (put(*TRIAL, "resources", "registers", value=-1), "`trials[0].resources.registers` must be an integer"),
    (put(*TRIAL, "resources", "cubin", value="AAAA"), "`trials[0].resources.cubin` must be absent"),
    (drop(*TRIAL, "resources", "barriers"), "`trials[0].resources` must be an object with the field `barriers`"),
    (put(*TRIAL, "resources", "code_sha256", value="zz"), "`trials[0].resources.code_sha256` must be 64"),
    (put(*TRIAL, "resources", "tensor_cores", value="<b>"), "`trials[0].resources.tensor_cores` must be the name"),
    (put(*TRIAL, "occupancy", value=1.5), "`trials[0].occupancy` must be a number from 0 to 1"),
    (put(*TRIAL, "limiters", value=["[red]"]), "`trials[0].limiters[0]` must be the name of a limit"),
    (put(*TRIAL, "samples_us", value=[1.0] * 10_001), "`trials[0].samples_us` must be a list of up to"),
    (put(*TRIAL, "samples_us", 1, value=0), "`trials[0].samples_us[1]` must be a number"),
    (put(*TRIAL, "error", value="\0"), "`trials[0].error` must be a text"),
    (put(*TRIAL, "error", value="\x1b]0;title\x07"), "`trials[0].error` must be a text"),
    (put("sha256", value="0" * 64), "`sha256` must be the hash of the rest"),
    (put("sha256", value=7), "`sha256` must be the hash of the rest"),
    (put(*TRIAL, "error", value="\ud800"), "`trials[0].error` must be a text"),
    (put(*TRIAL, "telemetry", "power_w", value=-1), "`trials[0].telemetry.power_w` must be a number"),
    (put(*TRIAL, "telemetry", "fan", value=1), "`trials[0].telemetry.fan` must be absent"),
]


@pytest.mark.parametrize(("change", "message"), REJECTED, ids=[message for _, message in REJECTED])
def test_a_bad_document_is_rejected_by_its_place(
    document: Document, change: Callable[[Document], Any], message: str
) -> None:
    with pytest.raises(ImportRejectedError) as caught:
        records_from(change(copy.deepcopy(document)))
    assert message in str(caught.value)
    assert "Nothing was imported" in str(caught.value)
    assert len(str(caught.value)) < 1500


def without_checksums(document: Document) -> Document:
    """A document that was edited by hand."""
    rows = {
        kind: [{name: value for name, value in row.items() if name != "checksum"} for row in document.get(kind, ())]
        for kind in ("bests", "trials")
    }
    return copy.deepcopy(document) | rows


def test_a_name_that_a_terminal_would_obey_is_not_stored(store: ResultStore, document: Document) -> None:
    with pytest.raises(UsageError, match="printable"):
        store.import_json(put("device", "name", value="\x1b[2J")(without_checksums(document)))
    assert store.devices() == []


def test_no_fact_of_an_exported_device_changes_silently(store: ResultStore, document: Document) -> None:
    store.import_json(document, trust=True)
    exported = store.export_json()
    for name, value in exported["device"].items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            with pytest.raises(ImportRejectedError, match="device"):
                records_from(put("device", name, value=value + 1)(copy.deepcopy(exported)))
    edited = put("device", "clock_mhz", value=1000)(copy.deepcopy(exported))
    (best, *_), _ = records_from(drop("device_checksum")(edited) or edited)
    assert best.device.clock_mhz == 1000


def test_an_environment_must_have_its_own_digest(document: Document) -> None:
    changed = copy.deepcopy(document)
    digest = next(iter(changed["environments"]))
    changed["environments"][digest]["driver"] = "another"
    with pytest.raises(ImportRejectedError, match="the environment with this digest"):
        records_from(changed)


def test_one_bad_row_keeps_all_others_out(store: ResultStore, document: Document) -> None:
    changed = copy.deepcopy(document)
    changed["trials"][1]["compile_seconds"] = -1
    with pytest.raises(ImportRejectedError, match="compile_seconds"):
        store.import_json(changed)
    assert set(store.health().rows.values()) == {0}


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in entries for place in ((*at, key), *places(inner, (*at, key)))]


@pytest.mark.exhaustive
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_junk_anywhere_is_rejected_or_harmless(document: Document, data: st.DataObject) -> None:
    changed = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from(places(changed)))
        put(*where, value=data.draw(JUNK))(changed)
    try:
        bests, trials = records_from(changed)
    except ImportRejectedError:
        return
    for record in (*bests, *trials):
        assert KernelConfig.from_json(record.config.to_json()) == record.config
        assert AttentionShape.from_json(record.shape.to_json()) == record.shape
        assert record.time_us is None or 0 < record.time_us < 1e12
