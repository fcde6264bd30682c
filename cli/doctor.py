"""`tune doctor`: what of this machine matters to tuning, what is wrong with it, and how to mend that."""

from dataclasses import asdict

import typer

from blocktune.cli.checks import Level, examine
from blocktune.cli.options import AsJson, Database
from blocktune.cli.render import print_json, print_table
from blocktune.kernels.errors import StoreError


def doctor(db: Database = None, as_json: AsJson = False) -> None:
    """Report what matters here, and what is wrong.

    Driver, CUDA, ptxas, torch, triton, SQLite, database and GPU state, with what each problem means.
    Ends with exit code 5 when the database cannot serve, else with 0: a machine without a GPU is no fault.

    \b
    tune doctor
    tune doctor --json
    """
    findings = examine(db)
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        print_table(("", "what", "is"), [(_MARKS[each.level], each.name, each.value) for each in findings])
        for finding in findings:
            if finding.meaning:
                typer.echo(f"{_MARKS[finding.level]} {finding.name}: {finding.meaning}\n  {finding.fix}\n")
    if any(finding.name.startswith("database") and finding.level is Level.PROBLEM for finding in findings):
        raise typer.Exit(StoreError.exit_code)


_MARKS = {Level.OK: "ok", Level.WARNING: "warning", Level.PROBLEM: "problem"}
