"""`tune doctor`: what of this machine matters to tuning, what is wrong with it, and how to fix that."""

from dataclasses import asdict
from typing import Annotated

import typer

from blocktune.cli.explain.checks import examine
from blocktune.cli.explain.findings import Level
from blocktune.cli.output.render import note, print_json, print_table, say
from blocktune.cli.shared.options import AsJson, Database
from blocktune.kernels.values.errors import StoreError, UsageError, VerificationError
from blocktune.kernels.values.text import counted


def doctor(
    recover: Annotated[
        bool, typer.Option("--recover", help="Save every readable row of a damaged database in a fresh one.")
    ] = False,
    restore: Annotated[
        bool, typer.Option("--restore", help="Restore the newest backup, with every readable later row.")
    ] = False,
    drill: Annotated[
        bool, typer.Option("--drill", help="Damage 200 copies of the database, recover each, and count what is lost.")
    ] = False,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Report the state of this machine, and what is wrong with it.

    Driver, CUDA, ptxas, torch, triton, SQLite, database and GPU state, with what each problem means.
    Ends with exit code 5 when the database cannot serve, else with 0: a machine without a GPU is no fault.
    --recover replaces a damaged database by a fresh one with every row that can still be read, and keeps the damaged
    file next to it. A sound database is left alone. Measurements that wait in files next to it are stored.

    \b
    tune doctor
    tune doctor --json
    tune doctor --recover
    tune doctor --restore
    tune doctor --drill
    """
    if recover + restore + drill > 1:
        raise UsageError(
            "--recover, --restore and --drill exclude each other, but several are given. Leave all but one out."
        )
    for asked, act in ((recover, _recover), (restore, _restore), (drill, _drill)):
        if asked:
            act(db, as_json)
            return
    findings = examine(db)
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        print_table(("", "what", "is"), [(_MARKS[each.level], each.name, each.value) for each in findings])
        for finding in findings:
            if finding.meaning:
                say(f"{_MARKS[finding.level]} {finding.name}: {finding.meaning}\n  {finding.fix}\n")
    if any(
        finding.name.startswith(("database", "results file")) and finding.level is Level.PROBLEM for finding in findings
    ):
        raise typer.Exit(StoreError.exit_code)


def _recover(db: str | None, as_json: bool) -> None:
    from blocktune.db.recovery.rebuild import recover

    found = recover(db)
    if as_json:
        print_json({"recovered": found is not None} | (found.to_json() if found else {}))
    elif found is None:
        note("The database is sound; nothing was changed.")
    else:
        rows = f"{counted(found.bests, 'winner')} and {counted(found.trials, 'trial')}"
        note(f"saved {rows} in {found.place}; {found.losses}")
        note(f"the damaged database is {found.kept}")


def _restore(db: str | None, as_json: bool) -> None:
    from blocktune.db.recovery.restoring import restore

    found = restore(db)
    if as_json:
        print_json(asdict(found))
        return
    note(f"restored {counted(found.rows, 'row')} from {found.backup}, and {found.newer} that came later")
    if found.kept:
        note(f"what was there before is {found.kept}")


def _drill(db: str | None, as_json: bool) -> None:
    from blocktune.db.recovery.drill import WAYS, drill

    def show(done: int) -> None:
        if done % 20 == 0:
            note(f"{done}/{WAYS} copies")

    counts = drill(db, on_progress=show)
    if as_json:
        print_json(counts.to_json())
    else:
        say(
            f"{counts.rows} trials and winners; {counts.copies} damaged copies: the damage met nothing in "
            f"{counts.untouched}, {counts.whole} were recovered whole, {counts.refused} could not be recovered\n"
            f"lost: {counts.lost / counts.copies:.2f} rows of a copy on average, {counts.worst} at worst\n"
            f"losses that were understated: {counts.understated}; wrong rows that were believed: {counts.wrong}"
        )
    if counts.wrong or counts.understated:
        raise VerificationError(
            "Some recovered copies hold rows that the store never had, or hide a loss, as shown above. Keep exports "
            "(`tune export`), and report it."
        )


_MARKS = {Level.OK: "ok", Level.WARNING: "warning", Level.PROBLEM: "problem"}
