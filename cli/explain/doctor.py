"""`tune doctor`: what of this machine matters to tuning, what is wrong with it, and how to fix that."""

from dataclasses import asdict
from typing import Annotated

import typer

from blocktune.cli.explain.checks import examine
from blocktune.cli.explain.findings import Level
from blocktune.cli.shared.options import AsJson, Database
from blocktune.cli.shared.render import note, print_json, print_table, say
from blocktune.kernels.values.errors import StoreError


def doctor(
    recover: Annotated[
        bool, typer.Option("--recover", help="Save what can be read of a damaged database, in a fresh one.")
    ] = False,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Report what matters here, and what is wrong.

    Driver, CUDA, ptxas, torch, triton, SQLite, database and GPU state, with what each problem means.
    Ends with exit code 5 when the database cannot serve, else with 0: a machine without a GPU is no fault.
    With --recover a damaged database is replaced by a fresh one with the rows that can still be read; the damaged file
    is kept next to it. A sound database is left alone.

    \b
    tune doctor
    tune doctor --json
    tune doctor --recover
    """
    if recover:
        _recover(db, as_json)
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
        note(f"saved {found.bests} winners and {found.trials} trials in {found.place}; {found.losses}")
        if found.user_rows:
            note(f"saved {found.user_rows} trials and winners of tuned functions")
        note(f"the damaged database is {found.kept}")


_MARKS = {Level.OK: "ok", Level.WARNING: "warning", Level.PROBLEM: "problem"}
