"""`tune diff`: which winners differ between two sets of results, and by how much; or two versions of a kernel."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.output.render import microseconds, note, print_json, print_table
from blocktune.cli.output.winners import config_json
from blocktune.cli.results.kernel_diff import diff_kernel
from blocktune.cli.shared.options import AsJson, Database, DeviceName
from blocktune.db.records.records import problem_json, problem_label
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.db.exchange.differences import WinnerDifference
    from blocktune.db.records.records import AnyBest

_BEFORE = "A database (path or URL), an export or a frozen file; or MODULE:KERNEL."
_AFTER = "The same; or a git revision or file with another version of the kernel."
_KERNEL = re.compile(r"[\w.]+:[\w.]+")
COLUMNS = ("", "device", "shape", "before", "time", "after", "time", "after / before")


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help=_BEFORE)],
    after: Annotated[str, typer.Argument(metavar="B", help=_AFTER)],
    device: DeviceName = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Compare the winners of two databases or files.

    added: only the second one has the shape. removed: only the first one has it. config: another config won. retimed:
    the same config has another time, origin or software.

    Of a kernel, the version of B is compared with today's: source, winners, times and machine code.

    \b
    tune diff before.json after.json
    tune diff h200.json fleet.db --json
    tune diff my_kernels:softmax HEAD~1
    """
    if _KERNEL.fullmatch(before) and not Path(before).exists():
        diff_kernel(before, after, choose_device(device), db, as_json=as_json)
        return
    if device is not None:
        raise UsageError(f"`--device` is of MODULE:KERNEL, but A is {before}. Leave it out.")

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
