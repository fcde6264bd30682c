"""Blocks of the page of targets: an overview of each device, the tables of each topic, and the files of all figures."""

from collections.abc import Sequence
from pathlib import Path

from blocktune.cli.tune.bench import geometric_mean
from tools.pages.document_tables import markdown_table, short_commits
from tools.pages.targets.backwards import BACKWARD_FEATURES, BACKWARDS
from tools.pages.targets.cells import Record
from tools.pages.targets.decoding import DECODING
from tools.pages.targets.forwards import BIASED_FORWARDS, CAPPED_FORWARDS, EIGHT_BIT_FORWARDS, FORWARDS
from tools.pages.targets.standings import Standing, standings
from tools.pages.targets.target import DEVICES, OVER_BEST, Target, Topic

FILE = "targets"
"""What stands in place of a file's name; `targets#TOPIC` has the tables of a topic."""

TOPICS = {
    "forward": Topic(title="Forward", targets=FORWARDS),
    "forward_features": Topic(title="Forward with features", targets=(*CAPPED_FORWARDS, *BIASED_FORWARDS)),
    "forward_8_bits": Topic(title="Forward in 8 bits", targets=EIGHT_BIT_FORWARDS),
    "backward": Topic(title="Backward", targets=BACKWARDS),
    "backward_features": Topic(title="Backward with features", targets=BACKWARD_FEATURES),
    "decoding": Topic(title="Decoding", targets=DECODING),
}
FILES = "files"
"""The part that names the files."""
LOSSES = "losses"
"""The part that names every shape for which a rival is faster."""

OVERVIEW = ("topic", "targets met", "cells at their target", "mean over the fastest rival", "furthest below its target")
COLUMNS = ("what", "target", "GPU", "next to", "cells", "lowest", "mean", "highest", "below")
MISSES = ("below its target", "target", "GPU", "shape", "measured", "next to")
REASONS = ("what", "what limits it, and what was tried")
SOURCES = ("file", "GPU", "day", "commit", "cells")
LOST = ("topic", "kind", "GPU", "shape", "speed over the rival", "rival")

NOT_PROFILED = "Not profiled."


def block(part: str | None, results: Path) -> str:
    """Return a part of the page, made of a folder of results: a topic, the files, the losses, or without a name the
    overviews."""
    if part is None:
        return _overview(results)
    if part == LOSSES:
        return _losses(results)
    return _files(results) if part == FILES else _topic(TOPICS[part], results)


def _overview(results: Path) -> str:
    """Return where the topics stand on each device, next to the software that took part."""
    tables = (_overview_of(device, results) for device in DEVICES)
    return "\n\n".join(table for table in tables if table)


def _overview_of(device: str, results: Path) -> str:
    """Return where the topics stand on one device; empty if nothing was measured there."""
    stand = {
        topic: [each for each in standings(topic.targets, results) if each.measured.device.lower().startswith(device)]
        for topic in TOPICS.values()
    }
    if not any(stand.values()):
        return ""
    lines = [_overview_line(topic, found) for topic, found in stand.items() if found]
    caption = f"{device.upper()}, with {_software([each for found in stand.values() for each in found])}:"
    return f"{caption}\n\n{markdown_table(OVERVIEW, lines, words=(0, 4))}"


def _overview_line(topic: Topic, found: Sequence[Standing]) -> tuple[str, ...]:
    cells = sum(len(each.measured.cells) for each in found)
    below = sum(len(each.below) for each in found)
    over_best = [ratio for each in found if each.target.ratio == OVER_BEST for ratio in each.ratios]
    worst = min(found, key=lambda each: each.lowest.ratio / each.target.least)
    return (
        topic.title,
        f"{sum(each.is_met for each in found)} of {len(found)}",
        f"{cells - below} of {cells}",
        f"{geometric_mean(over_best):.3f}" if over_best else "-",
        f"{worst.target.kind}: {worst.lowest.ratio:.3f} for {worst.target.least:.2f}" if worst.below else "-",
    )


def _software(found: Sequence[Standing]) -> str:
    versions: dict[str, set[str]] = {}
    for each in found:
        for name, numbers in each.measured.software.items():
            versions.setdefault(name, set()).update(numbers)
    return ", ".join(f"{name} {' and '.join(sorted(versions[name]))}" for name in sorted(versions))


def _topic(topic: Topic, results: Path) -> str:
    """Return three tables: the targets, the cells below them, and what limits those."""
    found = standings(topic.targets, results)
    measured = {each.target for each in found}
    lines = [_line(each) for each in found]
    lines += [_missing_words(target) for target in topic.targets if target not in measured]
    tables = [markdown_table(COLUMNS, lines, words=(0, 1, 2, 3))]
    if misses := [line for each in found for line in _misses(each)]:
        tables.append(markdown_table(MISSES, misses, words=(0, 1, 2, 3, 5)))
        tables.append(markdown_table(REASONS, _reasons(found), words=(0, 1)))
    return "\n\n".join(tables)


def _line(standing: Standing) -> tuple[str, ...]:
    target, measured = standing.target, standing.measured
    lowest, mean, highest = (f"{ratio:.3f}" for ratio in (min(standing.ratios), standing.mean, max(standing.ratios)))
    return (
        target.kind,
        target.label,
        measured.device,
        ", ".join(measured.rivals),
        str(len(measured.cells)),
        f"**{lowest}**" if standing.below else lowest,
        f"**{mean}**" if standing.mean_is_below else mean,
        highest,
        str(len(standing.below)),
    )


def _losses(results: Path) -> str:
    """Return one line for every shape for which a rival is faster, the slowest of each topic first."""
    lines = [
        (topic.title, each.target.kind, each.measured.device, cell.label, f"{cell.ratio:.3f}", cell.rival)
        for topic in TOPICS.values()
        for each in standings(topic.targets, results)
        for cell in sorted(each.measured.cells, key=lambda cell: cell.ratio)
        if each.target.ratio == OVER_BEST and cell.ratio < 1
    ]
    return markdown_table(LOST, lines, words=(0, 1, 2, 3, 5))


def _missing_words(target: Target) -> tuple[str, ...]:
    return (target.kind, target.label, "not measured", *("-",) * (len(COLUMNS) - 3))


def _misses(standing: Standing) -> list[list[str]]:
    """Return one line for every cell that is below the target, and one for the mean if it is."""
    target, device = standing.target, standing.measured.device
    least = f"{target.least:.2f}{target.suffix}"
    lines = [[target.kind, least, device, cell.label, f"{cell.ratio:.3f}", cell.rival] for cell in standing.below]
    if standing.mean_is_below:
        lines.append(
            [target.kind, f"mean {target.mean:.2f}{target.suffix}", device, "all", f"{standing.mean:.3f}", "-"]
        )
    return lines


def _reasons(found: Sequence[Standing]) -> list[tuple[str, str]]:
    """Return what limits what is below its target, each reason once."""
    missed = (each.target for each in found if not each.is_met)
    return list(dict.fromkeys((_kind_words(target), target.limit or NOT_PROFILED) for target in missed))


def _kind_words(target: Target) -> str:
    """Return the kind of a target, and its ratio unless that is over the fastest rival: kinds may have several."""
    return target.kind if target.ratio == OVER_BEST else f"{target.kind}, {target.ratio}"


def _files(results: Path) -> str:
    """Return one line for every file, with the days and commits of its cells on this page."""
    records: dict[tuple[str, str], list[Record]] = {}
    for topic in TOPICS.values():
        for each in standings(topic.targets, results):
            for cell in each.measured.cells:
                records.setdefault((cell.record.file, each.measured.device), []).append(cell.record)
    lines = [
        (f"`{file}`", device, _days(found), _commits(found), str(len(found)))
        for (file, device), found in sorted(records.items(), reverse=True)
    ]
    return markdown_table(SOURCES, lines, words=(0, 1, 2, 3))


def _days(records: Sequence[Record]) -> str:
    days = sorted({record.taken_at[:10] for record in records})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _commits(records: Sequence[Record]) -> str:
    return ", ".join(short_commits(record.commit for record in records)) or "-"
