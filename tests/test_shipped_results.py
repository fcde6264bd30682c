"""The results that ship with the package belong to the kernels that ship with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.exchange.document import load_document
from blocktune.db.exchange.importing import records_from
from blocktune.db.rivals import with_todays_rivals
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.fallback import ConfigTable, climb_down
from blocktune.runtime.selection.ladder import Candidate, Rung
from blocktune.runtime.store_reader.provenance import Reuse
from blocktune.runtime.store_reader.sources import JsonConfigs, read_source

ROOT = Path(__file__).parents[1]
SHIPPED, RECORDED = ROOT / "blocktune" / "results", ROOT / "results"
COMPUTED = ("results", "bands", "replay", "correction", "untuned", "transfer")
"""Formats without a commit: winners name the source of their kernel, and the others are computed from sweeps."""
BEFORE_COMMITS = {
    *(f"h200{part}.bench.json" for part in ("", "-backward-wide", "-decode", "-features", "-passes", "-portable")),
    *(f"h200{part}.bench.json" for part in ("-sparse-features", "-wide")),
    *(f"h200.{kind}.json" for kind in ("differential", "gpu-tests", "ladder", "noise", "rematch")),
    *("h200.sanitizer.json", "store.faults.json", "cpu.ui.json"),
}
"""Records that were made before records named their commit. No record is added here."""
EXPORTS = sorted(path for path in SHIPPED.glob("*.json") if "." not in path.stem)  # the others name what they hold


@pytest.mark.parametrize("path", EXPORTS, ids=lambda path: path.stem)
def test_every_shipped_winner_was_measured_and_runs_on_its_device(path: Path) -> None:
    document = json.loads(path.read_text())
    limits = DeviceSpec.from_json(document["device"]).limits
    assert document["bests"]
    for best in document["bests"]:
        config, shape = KernelConfig.from_json(best["config"]), AttentionShape.from_json(best["shape"])
        kernel = get_kernel(config.kernel)
        assert kernel.violations(config, shape, limits) == ()
        assert best["origin"] == "measured"


@pytest.mark.parametrize("path", EXPORTS, ids=lambda path: path.stem)
def test_winners_of_earlier_kernel_sources_are_borrowed_and_counted_in_the_documents(path: Path) -> None:
    bests, _ = records_from(load_document(path))
    device = bests[0].device
    rows, problems = read_source(JsonConfigs(path), device)
    assert problems == []
    measured = {best.shape: best.kernel_hash == get_kernel(best.config.kernel).source_hash for best in bests}
    earlier = [row for row in rows if not measured[row.shape]]
    assert {row.reuse for row in earlier} <= {Reuse.OTHER_SOURCE}
    assert {row.origin for row in earlier} <= {Origin.BORROWED}
    sentence = (
        f"{sum(measured.values())} were measured with the kernels as they are now, and {len(earlier)} with earlier"
    )
    assert sentence in (ROOT / "docs" / "benchmarks" / "index.md").read_text()


@pytest.mark.parametrize("path", EXPORTS, ids=lambda path: path.stem)
def test_every_shipped_winner_is_compared_with_what_the_code_has(path: Path) -> None:
    bests, _ = records_from(load_document(path))
    for best in bests:
        assert with_todays_rivals(best) == best, (
            f"{best.shape.label}: the default or FlashAttention's heuristic of {path.name} is not the code's. "
            "Measure it again by `tune verify --unknown-speedup`, or export it again."
        )


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_a_call_gets_the_winner_of_its_own_device_before_another_one_s(name: str) -> None:
    device = device_named(name)
    rows = JsonConfigs().configs(device)
    own = {row.shape: row.config for row in rows if row.reuse is not Reuse.SAME_CAPABILITY}
    others = {row.shape: row.config for row in rows if row.reuse is Reuse.SAME_CAPABILITY}
    assert any(own[shape] != others[shape] for shape in own.keys() & others.keys())
    table = ConfigTable(rows)
    for shape in own.keys() | others.keys():
        first = next(step for step in climb_down(table, shape, device.limits) if isinstance(step, Candidate))
        assert first.config == own.get(shape, others.get(shape))
        assert (first.rung is Rung.SAME_CAPABILITY) == (shape not in own)


def commits(document: dict[str, Any]) -> list[str]:
    """The commits that a record names, for the whole of it and for its parts."""
    kinds = (document.get(name) for name in ("rows", "runs", "cases"))
    parts = [document, *(part for kind in kinds if isinstance(kind, list) for part in kind)]
    named = [part.get("commit") for part in parts if isinstance(part, dict)]
    return [commit for commit in (*named, *document.get("commits", ())) if commit]


def test_every_record_names_the_commit_that_made_it() -> None:
    documents = {
        path.name: json.loads(path.read_text()) for path in (*SHIPPED.glob("*.json"), *RECORDED.glob("*.json"))
    }
    records = {name for name, each in documents.items() if each["format"].removeprefix("blocktune-") not in COMPUTED}
    assert records
    assert sorted(name for name in records - BEFORE_COMMITS if not commits(documents[name])) == []


def test_a_commit_is_found_in_every_kind_of_record() -> None:
    assert commits({"commit": "a", "rows": [{"commit": "b"}, {}], "cases": [{"commit": "c"}]}) == ["a", "b", "c"]
    assert commits({"runs": [{"commit": "a"}], "cases": 5}) == ["a"]
    assert commits({"commits": ["a", ""], "rows": {"flash_fwd": {}}}) == ["a"]
    assert commits({"rows": []}) == []


def test_a_result_with_another_default_than_the_code_s_is_refused(tmp_path: Path) -> None:
    document = json.loads(EXPORTS[0].read_text())
    document["bests"][0]["default"]["num_stages"] += 1
    document["bests"][0].pop("checksum", None)  # as of a row that was edited on purpose
    (tmp_path / "other.json").write_text(json.dumps(document))
    with pytest.raises(AssertionError, match="is not the code's"):
        test_every_shipped_winner_is_compared_with_what_the_code_has(tmp_path / "other.json")
