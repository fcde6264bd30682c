"""Benches as pages may show them: without figures of a default or a paper's rule that the kernels no longer have."""

from collections.abc import Mapping
from typing import Any

from blocktune.kernels.base.paper_rule import first_paper_config
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import kernels_for
from blocktune.kernels.values.shape import AttentionShape

WORDS = {"default": "the default", "paper": "FlashAttention's heuristic"}


def with_todays_rivals(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a bench without the contenders `default` and `paper` of rows where today's kernels have other configs.

    Only the kernels that the bench knew count, so that a bench of some kernels is compared with the default of these.
    """
    limits = DeviceSpec.from_json(document["device"]).limits
    return dict(document) | {"rows": [_row(row, limits, document["kernels"]) for row in document["rows"]]}


def omissions_sentence(document: Mapping[str, Any]) -> str:
    """Return a sentence that says for how many rows a rival was left out; empty for none."""
    counts = {
        words: count
        for name, words in WORDS.items()
        if (count := sum(name in row.get("left_out", ()) for row in document["rows"]))
    }
    if not counts:
        return ""
    told = " and ".join(f"{words} in {count} rows" for words, count in counts.items())
    return f" No figure, until it is measured again, of {told}: the kernels have another config for it now."


def _row(row: Mapping[str, Any], limits: Any, names: list[str]) -> dict[str, Any]:
    shape = AttentionShape.from_json(row["shape"])
    able = [kernel for kernel in kernels_for(shape, limits) if kernel.name in names]
    todays = {"default": able[0].default_config(shape, limits) if able else None}
    todays["paper"] = first_paper_config(able, shape, limits)
    stale = [
        entry["name"]
        for entry in row["contenders"]
        if entry["name"] in todays and entry.get("config") and not _is(entry["config"], todays[entry["name"]])
    ]
    kept = [entry for entry in row["contenders"] if entry["name"] not in stale]
    return dict(row) | {"contenders": kept, "left_out": stale}


def _is(config: Mapping[str, Any], todays: Any) -> bool:
    return todays is not None and dict(config) == todays.to_json()
