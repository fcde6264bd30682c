"""The tables that are made of results/DEVICE.backward-peers.json: groups in parts, a fixed order of additions, and
scores that run ahead."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blocktune.cli.output.document_tables import markdown_table
from blocktune.cli.output.json_files import read_document
from blocktune.cli.output.render import commit_sentence
from blocktune.kernels.hopper.backward.parts import default_parts
from blocktune.kernels.values.shape import AttentionShape

SUFFIX = ".backward-peers.json"
FORMAT, SCHEMA = "blocktune-backward-peers", 1
PEERS = {"cuDNN": "cuDNN", "flash-attn-4": "FlashAttention-4"}
PARTS, DEFAULT, ANY_ORDER, NOT_AHEAD = "parts ", "default", "in any order", "scores not ahead"

GROUPS = ("shape", "whole groups, µs", "parts", "ours, µs", *(f"{name}, µs" for name in PEERS.values()), "over best")
ORDERS = ("shape", "fixed order, µs", "any order, µs", "costs", "FlashAttention-4 in a fixed order, another run, µs")

AHEAD = ("shape", "scores not ahead, µs", "ours, µs", "cuDNN, µs", "gain", "over cuDNN")


def block(path: Path) -> str:
    """Return the tables of a file; nothing where it is missing.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return "The backward was not measured next to its peers yet."
    document = read_document(path, "results", FORMAT, SCHEMA)
    environment = document["environment"]
    software = ", ".join(f"{name} {version}" for name, version in sorted(environment.items()))
    caption = (
        f"{document['device']}, {document['created_at'][:10]} ({software}): medians of 11 or 12 rounds in turns, the "
        f"L2 cache overwritten before every launch.{commit_sentence(row['commit'] for row in document['rows'])}"
    )
    rows = document["rows"]
    tables = (GROUPS, list(_groups(rows))), (ORDERS, list(_orders(rows))), (AHEAD, list(_ahead(rows)))
    return "\n\n".join((caption, *(markdown_table(names, lines) for names, lines in tables if lines)))


def _groups(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        shape, times = AttentionShape.from_json(row["shape"]), row["time_us"]
        if shape.features.deterministic or not set(PEERS) <= set(times):
            continue
        by_parts = {int(name.removeprefix(PARTS)): us for name, us in times.items() if name.startswith(PARTS)}
        parts = default_parts(shape, tuple(by_parts)) if by_parts else 1
        ours, best = by_parts.get(parts, times.get(DEFAULT)), min(times[name] for name in PEERS)
        yield [
            shape.label, _us(by_parts.get(1)), str(parts), _us(ours), *(_us(times[name]) for name in PEERS),
            f"{best / ours:.3f}",
        ]  # fmt: skip


def _orders(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    ordered = [(AttentionShape.from_json(row["shape"]), row["time_us"]) for row in rows]
    theirs = {shape: times["flash-attn-4"] for shape, times in ordered if "flash-attn-4" in times}
    for shape, times in ordered:
        if shape.features.deterministic and DEFAULT in times:
            cost = times[DEFAULT] / times[ANY_ORDER] - 1
            yield [
                shape.label, _us(times[DEFAULT]), _us(times[ANY_ORDER]), f"{cost:.0%}", _us(theirs.get(shape)),
            ]  # fmt: skip


def _ahead(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        times = row["time_us"]
        if NOT_AHEAD in times:
            before, ours, peer = (times[name] for name in (NOT_AHEAD, DEFAULT, "cuDNN"))
            label = AttentionShape.from_json(row["shape"]).label
            yield [label, _us(before), _us(ours), _us(peer), f"{before / ours:.3f}", f"{peer / ours:.3f}"]


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
