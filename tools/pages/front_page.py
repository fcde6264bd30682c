"""The figures that lead the README: one table of attention's speed, one sentence of the tuner, both from results/."""

import statistics
from pathlib import Path

from blocktune.cli.output.json_files import read_document
from blocktune.cli.tune.bench import geometric_mean
from blocktune.cli.tune.bench_file import read_bench
from blocktune.cli.tune.bench_verdicts import COLUMNS, verdict_of
from tools.pages.bench_tables import BEST, BenchRow
from tools.pages.document_tables import markdown_table
from tools.pages.readme_rivals import with_todays_rivals
from tools.pages.recorded.library_tables import FORMAT, SCHEMA
from tools.pages.targets.backwards import BACKWARDS
from tools.pages.targets.standings import standings
from tools.pages.targets.target import DEVICES, OVER_BEST

VERDICT_OF = "b2 h32 s8192 d64 bf16"
"""The shape that the README times."""

BENCHES = {
    "forward": ".bench.json",
    "forward, sustained": "-sustained.bench.json",
    "decoding": "-decode-peers.bench.json",
}
"""Benches of the rows, by what they measure; the backward comes from the targets."""


def attention_speed(results: Path) -> str:
    """Return the speed over the fastest rival: mean, lowest and highest of the shapes, and how many are slower."""
    ratios = {
        name: [_bench_ratios(results / f"{device}{file}") for device in DEVICES] for name, file in BENCHES.items()
    }
    ratios["backward"] = [_backward_ratios(device, results) for device in DEVICES]
    rows = ([name, *map(_cell, found)] for name, found in ratios.items())
    header = ("speed over the fastest rival", *(device.upper() for device in DEVICES))
    return markdown_table(header, rows, words=(0, 1, 2))


def tuner_speed(results: Path) -> str:
    """Return what the tuner of any Triton kernel gains over Triton's own, and what was different meanwhile."""
    document = read_document(results / "h200.libraries.json", "results", FORMAT, SCHEMA)
    seconds = {(row["model"], row["start"], row["tuner"]): row["step_seconds"] for row in document["starts"]}
    fla, liger = (
        [f"{seconds[model, start, tuner]:.1f} s" for start in ("cold", "second") for tuner in ("stock", "blocktune")]
        for model in ("fla", "liger")
    )
    same, kernels = sum(row.get("same_of_repeats", 0) for row in document["kernels"]), len(document["kernels"])
    added = statistics.median(
        (row["ours_us"] - row["launch_us"]) / (row["stock_us"] - row["launch_us"]) for row in document["calls"]
    )
    return (
        f"First step on an {document['device']} with empty caches: fla-core {fla[0]} by Triton's tuner, {fla[1]} by "
        f"this one; liger-kernel {liger[0]} and {liger[1]}. Second start: {fla[2]} and {fla[3]} (fla-core turns "
        f"Triton's disk cache on), {liger[2]} and {liger[3]}. Triton's two starts ran at the same time, on one core "
        f"each. {same} of {10 * kernels} searches from nothing found the usual winner. A known launch has "
        f"{added:.2f} of the overhead."
    )


def verdict(results: Path) -> str:
    """Return what `tune bench` prints at the end for one shape of the recorded bench."""
    document = with_todays_rivals(read_bench(results / "h200.bench.json"))
    row = next(row for row in document["rows"] if row["label"] == VERDICT_OF)
    cells = verdict_of(row)
    assert cells is not None  # both were timed
    widths = [max(map(len, pair)) for pair in zip(COLUMNS, cells, strict=True)]
    lines = (
        "   ".join(word.ljust(width) for word, width in zip(words, widths, strict=True)).rstrip()
        for words in (COLUMNS, cells)
    )
    shown = "\n".join(lines)
    day = document["created_at"][:10]
    return f"```console\n$ tune bench --seq 8192 --dim 64       # {document['device']['name']}, {day}\n{shown}\n```"


def _bench_ratios(path: Path) -> list[float]:
    if not path.exists():
        return []
    rows = [BenchRow(row) for row in with_todays_rivals(read_bench(path))["rows"]]
    return [ratio for row in rows if (ratio := row.ratio(BEST)) is not None]


def _backward_ratios(device: str, results: Path) -> list[float]:
    found = [each for each in standings(BACKWARDS, results) if each.measured.device.lower() == device]
    return [ratio for each in found if each.target.ratio == OVER_BEST for ratio in each.ratios]


def _cell(ratios: list[float]) -> str:
    if not ratios:
        return "not measured"
    slower = sum(ratio < 1 for ratio in ratios)
    return (
        f"{geometric_mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); "
        f"slower in {slower} of {len(ratios)} shapes"
    )
