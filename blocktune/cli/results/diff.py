"""`tune diff`: which winners differ between two sets of results, and by how much."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.output.render import microseconds, note, print_json, print_table
from blocktune.cli.output.winners import config_json
from blocktune.cli.shared.options import AsJson
from blocktune.db.records.records import problem_json, problem_label

if TYPE_CHECKING:
    from blocktune.db.exchange.differences import WinnerDifference
    from blocktune.db.records.records import AnyBest

_HELP = "A database (path or URL), an export or a frozen file."
COLUMNS = ("", "device", "shape", "before", "time", "after", "time", "after / before")


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help=_HELP)],
    after: Annotated[str, typer.Argument(metavar="B", help=_HELP)],
    as_json: AsJson = False,
) -> None:
    """Compare the winners of two databases or files.

    added: only the second one has the shape. removed: only the first one has it. config: another config won. retimed:
    the same config has another time, origin or software.

    \b
    tune diff before.json after.json
    tune diff h200.json ~/.local/share/blocktune/blocktune.db --json
    """
    from blocktune.db.exchange.differences import differences
    from blocktune.db.exchange.merging import winner_key
    from blocktune.db.sources import read_results

    old, new = (read_results(place, trials=False).bests for place in (before, after))
    found = differences(old, new)
    if as_json:
        print_json({"differences": [_json(each) for each in found]})
        return
    if found:
        print_table(COLUMNS, [_row(each) for each in found])
    note(f"{len(found)} of {len(set(map(winner_key, (*old, *new))))} shapes differ")


def _row(each: "WinnerDifference") -> tuple[object, ...]:
    winner = each.winner
    ratio = "-" if each.ratio is None else f"{each.ratio:.3f}"
    return (
        each.change,
        winner.device.name,
        problem_label(winner.shape),
        *_cells(each.before),
        *_cells(each.after),
        ratio,
    )


def _cells(best: "AnyBest | None") -> tuple[str, str]:
    return ("-", "-") if best is None else (f"{best.config.label} ({best.origin})", microseconds(best.time_us))


def _json(each: "WinnerDifference") -> dict[str, Any]:
    winner = each.winner
    return {
        "change": str(each.change),
        "device": winner.device.key,
        "shape": problem_json(winner.shape),
        "before": _side(each.before),
        "after": _side(each.after),
        "ratio": each.ratio,
    }


def _side(best: "AnyBest | None") -> dict[str, Any] | None:
    return None if best is None else config_json(best.config, time_us=best.time_us, origin=str(best.origin))
