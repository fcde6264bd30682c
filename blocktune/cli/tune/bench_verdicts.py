"""One verdict a shape, at the end of `tune bench`: is ours faster than the fastest rival?"""

from collections.abc import Iterable, Mapping
from typing import Any

from blocktune.cli.output.render import microseconds, print_table

COLUMNS = ("shape", "ours", "fastest rival", "its time", "verdict")


def show_verdicts(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print a row for every shape in which ours and a rival were timed."""
    found = [verdict for row in rows if (verdict := verdict_of(row)) is not None]
    if found:
        print_table(COLUMNS, found)


def verdict_of(row: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return shape, times and verdict; None where one of the two was not timed."""
    from blocktune.tuner.compare.report import fastest_peer, out_of_the_box, peer_title

    timed = {entry["name"]: entry["timing"] for entry in row["contenders"] if entry["timing"]}
    own = timed.get(out_of_the_box(timed))
    rival = fastest_peer({name: timing["median_us"] for name, timing in timed.items()})
    if own is None or rival is None:
        return None
    rival_us = timed[rival]["median_us"]
    ratio = rival_us / own["median_us"]
    over = own.get("over_best") or {"median": ratio, "low": ratio, "high": ratio}  # absent from older files
    word = "faster" if over["low"] > 1 else "slower" if over["high"] < 1 else "level"
    times = (microseconds(own["median_us"]), peer_title(rival), microseconds(rival_us))
    return row["label"], *times, f"{word}, {over['median']:.3f}x"
