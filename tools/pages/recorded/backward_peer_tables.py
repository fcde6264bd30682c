"""The tables that are made of results/DEVICE.backward-peers.json: our times next to those of rivals, groups in parts, a
fixed order of additions, scores that run ahead, and block masks."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blocktune.cli.output.json_files import read_document
from blocktune.cli.output.missing_peers import peers_in, sentence_without
from blocktune.kernels.hopper.backward.parts import default_parts
from blocktune.kernels.values.shape import AttentionShape
from tools.pages.document_tables import commit_sentence, markdown_table

SUFFIX = ".backward-peers.json"
FORMAT, SCHEMA = "blocktune-backward-peers", 1
PEERS = {"cuDNN": "cuDNN", "flash-attn-4": "FlashAttention-4"}
"""The names of rivals in a file, and in tables."""

PARTS, DEFAULT, ANY_ORDER, NOT_AHEAD = "parts ", "default", "in any order", "scores not ahead"
DENSE, PORTABLE, FIXED_ORDER = "dense", "flash_bwd_sparse", "in a fixed order"

OF_PEERS = tuple(f"{name}, µs" for name in PEERS.values())
BESIDE = ("shape", "ours, µs", *OF_PEERS, "over best")
GROUPS = ("shape", "whole groups, µs", "parts", "ours, µs", *OF_PEERS, "over best")
ORDERS = ("shape", "fixed order, µs", "any order, µs", "costs", "FlashAttention-4 in a fixed order, µs")
AHEAD = ("shape", "scores not ahead, µs", "ours, µs", "gain", *OF_PEERS, "over best")
SPARSE = (
    "shape", "pairs that take part", "ours, µs", "in a fixed order, µs", "portable kernel, µs", "FlashAttention-4, µs",
    "without the mask, µs", "of the rate without", "over FlashAttention-4",
)  # fmt: skip

Rows = Sequence[Mapping[str, Any]]


def block(path: Path) -> str:
    """Return the tables of a file; nothing where it is missing.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return "The backward was not measured next to its rivals yet."
    document = read_document(path, "results", FORMAT, SCHEMA)
    environment = document["environment"]
    software = ", ".join(f"{name} {version}" for name, version in sorted(environment.items()))
    timed = peers_in(PEERS.get(name, name) for row in document["rows"] for name in row["time_us"])
    caption = (
        f"{sentence_without(timed)}{document['device']}, {document['created_at'][:10]} ({software}): "
        "medians of 7 to 12 rounds in turns, the L2 cache overwritten before every launch."
        f"{commit_sentence(row['commit'] for row in document['rows'])}"
    )
    rows = document["rows"]
    tables = (
        (BESIDE, list(_beside(rows))), (GROUPS, list(_groups(rows))), (ORDERS, list(_orders(rows))),
        (AHEAD, list(_ahead(rows))), (SPARSE, list(_sparse(rows))),
    )  # fmt: skip
    return "\n\n".join((caption, *(markdown_table(names, lines) for names, lines in tables if lines)))


def _beside(rows: Rows) -> Iterator[list[str]]:
    for row in rows:
        shape, times = AttentionShape.from_json(row["shape"]), row["time_us"]
        if DEFAULT in times and times.keys() <= {DEFAULT, *PEERS}:
            yield [shape.label, _us(times[DEFAULT]), *_peers(times, times[DEFAULT])]


def _groups(rows: Rows) -> Iterator[list[str]]:
    for row in rows:
        shape, times = AttentionShape.from_json(row["shape"]), row["time_us"]
        by_parts = {int(name.removeprefix(PARTS)): us for name, us in times.items() if name.startswith(PARTS)}
        if by_parts:
            parts = default_parts(shape, tuple(by_parts))
            ours = by_parts[parts]
            yield [shape.label, _us(by_parts.get(1)), str(parts), _us(ours), *_peers(times, ours)]


def _orders(rows: Rows) -> Iterator[list[str]]:
    ordered = [(AttentionShape.from_json(row["shape"]), row["time_us"]) for row in rows]
    theirs = {shape: times["flash-attn-4"] for shape, times in ordered if "flash-attn-4" in times}
    for shape, times in ordered:
        if shape.features.deterministic and {DEFAULT, ANY_ORDER} <= times.keys():
            cost = times[DEFAULT] / times[ANY_ORDER] - 1
            yield [
                shape.label, _us(times[DEFAULT]), _us(times[ANY_ORDER]), f"{cost:.0%}", _us(theirs.get(shape)),
            ]  # fmt: skip


def _ahead(rows: Rows) -> Iterator[list[str]]:
    for row in rows:
        times = row["time_us"]
        if NOT_AHEAD in times:
            before, ours = times[NOT_AHEAD], times[DEFAULT]
            label = AttentionShape.from_json(row["shape"]).label
            yield [label, _us(before), _us(ours), f"{before / ours:.3f}", *_peers(times, ours)]


def _sparse(rows: Rows) -> Iterator[list[str]]:
    for row in rows:
        times = row["time_us"]
        if DENSE in times:
            ours, flash = times[DEFAULT], times.get("flash-attn-4")
            shown = (_us(times.get(name)) for name in (DEFAULT, FIXED_ORDER, PORTABLE, "flash-attn-4", DENSE))
            yield [
                AttentionShape.from_json(row["shape"]).label, f"{row['share']:.1%}", *shown,
                f"{times[DENSE] * row['share'] / ours:.2f}", "-" if flash is None else f"{flash / ours:.2f}",
            ]  # fmt: skip


def _peers(times: Mapping[str, float], ours: float) -> list[str]:
    """Return the times of the rivals, and how much longer the faster one takes."""
    found = [times[name] for name in PEERS if name in times]
    return [*(_us(times.get(name)) for name in PEERS), f"{min(found) / ours:.3f}" if found else "-"]


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
