"""The file of `python -m tools.lab.transfer --out`, and the tables that are made of it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from blocktune.cli.output.json_files import read_document
from tools.pages.document_tables import markdown_table

SUFFIX = ".transfer.json"
"""How the names of such files in results/ end."""

FORMAT, SCHEMA = "blocktune-transfer", 1

ALL = "all"
LIMITS = (1.01, 1.02, 1.05)
WINNER_COLUMNS = ("on", "winners of", "family", "shapes", "the same config", "never met", "mean", "worst",
                  *(f"over {100 * (limit - 1):.0f} % slower" for limit in LIMITS))  # fmt: skip
DECISION_COLUMNS = ("on", "what is taken for a shape that is not tuned", "sweeps", "mean", "95th percentile", "worst",
                    "decoding")  # fmt: skip
NOTHING = (
    "Two devices were not compared yet: `python -m tools.lab.transfer ONE OTHER --out "
    "results/ONE-OTHER.transfer.json` does it, `make results` shows it."
)


def block(path: Path) -> str:
    """Return the tables of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return NOTHING
    ways = read_document(path, "comparison of devices", FORMAT, SCHEMA)["ways"]
    return "\n\n".join(
        (
            "Time of the other device's winner over that of the own one, in the same rounds, for shapes that both were "
            "tuned for; equal configs count as 1, and different ones that never met there are left out of the means:",
            markdown_table(WINNER_COLUMNS, (cells for way in ways for cells in winner_rows(way)), words=(0, 1, 2)),
            *map(retuning_sentence, ways),
            "Time of what an untuned shape gets over the best of its recorded sweep, with the shape left out of what "
            "is known, as geometric mean, 95th percentile and worst; `decoding` is the mean of shapes with at most 16 "
            "queries:",
            markdown_table(DECISION_COLUMNS, (cells for way in ways for cells in decision_rows(way)), words=(0, 1)),
        )
    )


def winner_rows(way: Mapping[str, Any]) -> Iterable[list[str]]:
    """Yield the cells of each family of shapes, and of all."""
    families = sorted({row["family"] for row in way["winners"]})
    for family in (*families, ALL):
        rows = [row for row in way["winners"] if family in (ALL, row["family"])]
        slowdowns = [row["slowdown"] for row in rows if row["slowdown"] is not None]
        same, unmet = sum(row["own"] == row["other"] for row in rows), len(rows) - len(slowdowns)
        over = [str(sum(slowdown > limit for slowdown in slowdowns)) for limit in LIMITS]
        mean, worst = geometric_mean(slowdowns), max(slowdowns)
        counts = [str(count) for count in (len(rows), same, unmet)]
        yield [way["device"], way["other"], family, *counts, f"{mean:.3f}", f"{worst:.3f}", *over]


def retuning_sentence(way: Mapping[str, Any]) -> str:
    """Return the sentence that says where tuning again gains more than 2 %."""
    met = [row for row in way["winners"] if row["slowdown"] is not None]
    gains = sorted((row for row in met if row["slowdown"] > LIMITS[1]), key=lambda row: -row["slowdown"])
    named = "; ".join(f"{row['shape']['label']} {row['slowdown']:.3f}" for row in gains)
    where = f"On the {way['device']} its own winner is more than 2 % faster than the {way['other']}'s on"
    return f"{where} {len(gains)} of {len(met)} shapes{f': {named}' if named else ''}."


def decision_rows(way: Mapping[str, Any]) -> Iterable[list[str]]:
    """Yield the cells of everything that may be taken for an untuned shape."""
    rules: dict[str, Callable[[Mapping[str, Any]], float]] = {
        f"the one decision, by measurements of the {way['device']}": lambda row: row["own"],
        f"the one decision, by those of the {way['other']}": lambda row: row["other"],
        "the default": lambda row: row["default"],
    }
    for name in way["decisions"][0]["model"]:
        rules[f"the model alone, fitted to the {name}"] = lambda row, name=name: row["model"][name]  # type: ignore[misc]
    for title, rule in rules.items():
        yield [way["device"], title, *_spread([(row["family"], rule(row)) for row in way["decisions"]])]


def _spread(slowdowns: Sequence[tuple[str, float]]) -> list[str]:
    ratios = sorted(ratio for _, ratio in slowdowns)
    decoding = [ratio for family, ratio in slowdowns if family == "decoding"]
    found = (geometric_mean(ratios), ratios[math.ceil(0.95 * len(ratios)) - 1], ratios[-1])
    told = f"{geometric_mean(decoding):.3f} ({len(decoding)})" if decoding else "-"
    return [str(len(ratios)), *(f"{number:.3f}" for number in found), told]
