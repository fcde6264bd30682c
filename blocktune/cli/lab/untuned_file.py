"""The file of `tune lab replay --untuned --out`, and its rows in tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blocktune.tuner.lab.untuned import Case

SUFFIX = ".untuned.json"
"""How the names of such files in results/ end."""

FORMAT, SCHEMA = "blocktune-untuned", 1

RULES = {"expected": "the one decision", "nearest": "the nearest winner", "default": "the default alone"}
HIDDEN = {"shape": "the shape", "family": "its family"}
COLUMNS = ("what is taken", "left out", "shapes", "mean", "95th percentile", "worst", "decoding")


def untuned_document(device: str, cases: "Mapping[str, Sequence[Case]]") -> dict[str, Any]:
    """Return the document of a study: by what was left out, every rule's summary and every shape."""
    from blocktune.tuner.lab.untuned import summary

    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "device": device,
        "left_out": {
            hidden: {
                "rules": {rule: summary(found, rule) for rule in RULES},
                "cases": [case.to_json() for case in found],
            }
            for hidden, found in cases.items()
        },
    }


def untuned_rows(document: Mapping[str, Any]) -> Iterable[list[str]]:
    """Yield the cells of a row for every rule and for what was left out."""
    for hidden in HIDDEN:
        for rule in RULES:
            row = document["left_out"][hidden]["rules"][rule]
            numbers = [f"{row[name]:.3f}" for name in ("mean", "p95", "worst")]
            decoding = f"{row['decoding']:.3f} ({row['decoding_shapes']})" if row["decoding_shapes"] else "-"
            yield [RULES[rule], HIDDEN[hidden], str(row["shapes"]), *numbers, decoding]
