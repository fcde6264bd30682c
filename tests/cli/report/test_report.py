"""`tune report`: what the file holds is what the sources hold, nothing in it runs but its own scripts."""

import base64
import gzip
import hashlib
import html
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blocktune.cli.report.page import door
from blocktune.cli.report.sources import Sources
from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.selection.miss_file import append_misses
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.lab.sweep_file import load_sweep
from tests.support.pages.reports import (
    DENSE,
    DOCUMENTS,
    HOSTILE,
    RESULTS,
    SHIPPED,
    WIDE,
    hostile_bench,
    python_of_few_addresses,
    write_report,
)

pytestmark = pytest.mark.xdist_group("report")

MAX_BYTES = 3_000_000
BLOCK = re.compile(r'<script type="application/gzip" id="([a-z0-9-]+)">([A-Za-z0-9+/=]*)</script>')


def blocks(path: Path) -> dict[str, Any]:
    """The data in a report, by name."""
    return {
        name: json.loads(gzip.decompress(base64.b64decode(code)))
        for name, code in BLOCK.findall(path.read_text(encoding="utf-8"))
    }


@pytest.fixture(scope="module")
def data(report_file: Path) -> dict[str, Any]:
    return blocks(report_file)


@pytest.mark.parametrize(("index", "path"), [(0, DENSE), (1, WIDE)], ids=("dense", "wide"))
def test_every_measured_number_is_that_of_the_sweep(data: dict[str, Any], index: int, path: Path) -> None:
    sweep = load_sweep(path)
    columns = data[f"sweep-{index}"]["columns"]
    trials = sorted(sweep.trials, key=lambda trial: trial.created_at)
    assert columns["time_us"] == [trial.time_us for trial in trials]
    assert columns["relative"] == [trial.relative_to_anchor for trial in trials]
    assert columns["low_us"] == [min(trial.samples_us, default=None) for trial in trials]
    assert columns["registers"] == [trial.resources and trial.resources.registers for trial in trials]
    assert columns["throttle_reasons"] == [trial.telemetry.throttle_reasons for trial in trials]
    assert columns["score"] == [sweep.scores.get(trial.config) for trial in trials]


def test_the_rows_of_a_bench_are_those_of_its_file(data: dict[str, Any]) -> None:
    document = json.loads((RESULTS / "h200.bench.json").read_text())
    (bench,) = data["data"]["bench"]
    for row, source in zip(bench["rows"], document["rows"], strict=True):
        timed = {each["name"]: each["timing"] for each in source["contenders"] if each["timing"]}
        assert {each["name"]: each["tflops"] for each in row["contenders"]} == {
            name: timing["tflops"] for name, timing in timed.items()
        }
        peers = [timed[name]["median_us"] for name in timed if name in ("cudnn", "fa2", "fa3", "fa4", "flex")]
        assert row["over_peer"] == min(peers) / (timed.get("tuned") or timed["untuned"])["median_us"]


def test_ladder_winners_and_replays_are_those_of_their_files(data: dict[str, Any]) -> None:
    page = data["data"]
    steps = json.loads((SHIPPED / "h200.ladder.json").read_text())["rows"][0]["steps"]
    assert [step["time_us"] for step in page["ladder"][0]["rows"][0]["steps"]] == [
        step["timing"] and step["timing"]["median_us"] for step in steps
    ]
    bests = json.loads((SHIPPED / "h200.json").read_text())["bests"]
    assert sorted(winner["time_us"] for winner in page["winners"]) == sorted(best["time_us"] for best in bests)
    replay = json.loads((RESULTS / "h200.replay.json").read_text())
    assert page["replay"][0]["strategies"]["guided"]["regret"] == replay["strategies"]["guided"]["regret"]


def test_cells_that_cannot_exist_say_why(data: dict[str, Any]) -> None:
    empty = data["sweep-1"]["empty_cells"]
    tried = set(zip(*(data["sweep-1"]["columns"][name] for name in PLACE), strict=True))
    assert empty
    assert all(cell["reason"] for cell in empty)
    assert not {tuple(cell[name] for name in PLACE) for cell in empty} & tried


PLACE = ("kernel", "block_m", "block_n", "num_warps", "num_stages")


def test_the_file_is_small_and_loads_nothing(report_file: Path) -> None:
    text = report_file.read_text(encoding="utf-8")
    assert len(text.encode()) < MAX_BYTES
    assert not re.search(r"<(?:link|img|iframe)\b|<script[^>]+src=", text.split("<script", 1)[0])
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])  # type: ignore[index]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy


def test_the_policy_names_every_script_that_runs(report_file: Path) -> None:
    text = report_file.read_text(encoding="utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in text


def test_a_hostile_text_goes_through_the_door_and_is_no_markup(tmp_path: Path) -> None:
    bench = hostile_bench(tmp_path)
    out = write_report(tmp_path / "hostile.html", bench)
    (view,) = blocks(out)["data"]["bench"]
    assert view["device"] == HOSTILE.replace("\x1b", "\\x1b")
    assert "alert(" not in BLOCK.sub("", out.read_text(encoding="utf-8")).split("<script>", 1)[0]


def test_the_door_spells_control_characters_wherever_they_stand() -> None:
    assert door({"a\x07": ["b\x1b", {"c": "d\x00"}], "n": 1.5}) == {"a\\x07": ["b\\x1b", {"c": "d\\x00"}], "n": 1.5}


@pytest.mark.parametrize("name", ["data", "sweep-0", "sweep-1"])
def test_every_block_can_be_read(data: dict[str, Any], name: str) -> None:
    assert data[name]


def test_without_a_database_what_ships_is_shown(tune: Any, tmp_path: Path) -> None:
    pytest.importorskip("altair", reason="charts need altair")
    result = tune("report", "--out", tmp_path / "r.html", "--json")
    assert result.exit_code == 0, result.output
    counts = json.loads(result.stdout)
    assert counts["sweeps"] == 0
    assert counts["winners"] > 100
    assert blocks(tmp_path / "r.html")["data"]["ladder"]


def test_calls_without_a_measurement_are_counted(tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("altair", reason="charts need altair")
    shape = complete_shape(777, 64)
    append_misses(tmp_path / "misses.jsonl", {(device_named("h200").key, shape): 3})
    monkeypatch.setenv("BLOCKTUNE_MISSES", str(tmp_path / "misses.jsonl"))
    assert tune("report", "--out", tmp_path / "r.html").exit_code == 0
    (missed,) = blocks(tmp_path / "r.html")["data"]["misses"]
    assert (missed["label"], missed["calls"]) == (shape.label, 3)


def test_only_the_sweeps_of_a_shape_are_kept(tune: Any, tmp_path: Path) -> None:
    pytest.importorskip("altair", reason="charts need altair")
    words = ("report", DENSE, WIDE, "--out", tmp_path / "r.html", "--json")
    assert json.loads(tune(*words, "--seq", 8192, "--dim", 64).stdout)["sweeps"] == 1
    refused = tune(*words, "--seq", 100, "--dim", 64)
    assert refused.exit_code == 2
    assert "There is no sweep of" in refused.stderr


def test_two_stores_are_compared(tmp_path: Path, tune: Any, winner: Any) -> None:
    pytest.importorskip("altair", reason="charts need altair")
    tune.store(winner())
    out = tmp_path / "r.html"
    assert tune("report", SHIPPED / "h200.json", "--against", tune.db, "--out", out).exit_code == 0
    found = {each["label"]: each for each in blocks(out)["data"]["differences"]}
    changed = found["b2 h32 s8192 d64 bf16"]
    assert (changed["change"], changed["before_us"]) == ("config", 812.5)
    assert changed["ratio"] == changed["after_us"] / 812.5


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.json", "[]", "is not a file that a report shows"),
        ("a.json", '{"format": "other", "schema": 1}', "is not a file that a report shows"),
        ("a.json", '{"format": "blocktune-bench", "schema": 9}', "which has format blocktune-bench and schema 1"),
        ("a.json", '{"format": "blocktune-bench", "schema": 1, "rows": [{}]}', "as blocktune writes it: KeyError"),
        ("a.sweep.json.gz", "no gzip", "is not JSON in gzip"),
    ],
)
def test_a_bad_file_is_one_paragraph(tune: Any, tmp_path: Path, name: str, text: str, words: str) -> None:
    pytest.importorskip("altair", reason="charts need altair")
    path = tmp_path / name
    path.write_text(text)
    result = tune("report", path, "--out", tmp_path / "r.html")
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("missing", ["altair", "vl_convert"])
def test_a_library_that_is_missing_is_named_with_the_way_to_get_it(
    tune: Any, tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("altair", "vl_convert"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else ModuleType(name))
    result = tune("report", "--out", tmp_path / "r.html")
    assert result.exit_code == 2
    assert 'pip install "blocktune[report]"' in result.stderr
    assert 'pip install "blocktune[ui]"' in tune("ui").stderr
    assert not (tmp_path / "r.html").exists()


def test_under_a_limit_of_memory_the_limit_is_named(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="charts need vl-convert-python")
    result = python_of_few_addresses("-m", "blocktune", "report", DENSE, "--out", tmp_path / "r.html")
    assert result.returncode == 2, result.stderr
    assert "this process may have 6.0 GiB. Raise that limit: ulimit -v unlimited" in result.stderr
    assert not (tmp_path / "r.html").exists()


def test_places_without_results_are_refused(tune: Any, tmp_path: Path) -> None:
    pytest.importorskip("altair", reason="charts need altair")
    assert "holds neither sweeps nor" in tune("report", tmp_path).stderr
    assert "cannot be read" in tune("report", tmp_path / "missing.json").stderr
    assert "cannot be read" in tune("report", tmp_path / "missing.db").stderr


def test_a_database_can_be_a_place(tune: Any, tmp_path: Path, winner: Any) -> None:
    pytest.importorskip("altair", reason="charts need altair")
    tune.store(winner())
    out = tmp_path / "r.html"
    assert tune("report", tune.db, "--out", out).exit_code == 0
    assert [found["time_us"] for found in blocks(out)["data"]["winners"]] == [812.5]


@pytest.mark.parametrize(("number", "said"), [("NaN", "NaN is no JSON number"), ("1e999", "not finite")])
def test_numbers_that_are_not_finite_are_refused(tune: Any, tmp_path: Path, number: str, said: str) -> None:
    pytest.importorskip("altair", reason="charts need altair")
    path = tmp_path / "a.ladder.json"
    path.write_text(
        re.sub(r'"predicted_us": [0-9.]+', f'"predicted_us": {number}', (SHIPPED / "h200.ladder.json").read_text())
    )
    result = tune("report", path, "--out", tmp_path / "r.html")
    assert result.exit_code == 2
    assert said in result.stderr


def test_all_documents_of_the_fixture_are_shown(data: dict[str, Any]) -> None:
    page = data["data"]
    shown = {view["name"] for kind in ("bench", "ladder", "replay", "noise") for view in page[kind]}
    assert shown == set(DOCUMENTS) - {"h200.json"}


def test_a_place_may_be_the_url_of_a_database(tune: Any, winner: Any) -> None:
    tune.store(winner())
    sources = Sources()
    sources.add(f"sqlite:///{tune.db}")
    assert [best.config for best in sources.winners] == [winner().config]


def test_a_report_of_many_sweeps_keeps_those_with_the_most_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = min((RESULTS / "dense-sweeps").glob("*.sweep.json.gz"), key=lambda path: path.stat().st_size)
    monkeypatch.setattr("blocktune.cli.report.report.MAX_SWEEPS", 1)
    (sweep,) = blocks(write_report(tmp_path / "r.html", small, DENSE))["data"]["sweeps"]
    assert sweep["shape_label"] == load_sweep(DENSE).shape.label
