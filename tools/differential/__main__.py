"""`python -P -m tools.differential`: runs drawn cases for a time, or one case that was written down."""

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blocktune.kernels.values.errors import BlocktuneError
from blocktune.tuner.measure.environment import source_commit
from tools.differential.cases.case import Case
from tools.differential.cases.enums import Entry
from tools.differential.runs.jobs import case_of, planned_jobs
from tools.differential.runs.parent import Pool, Setup
from tools.differential.runs.report import Report, write
from tools.differential.runs.shrinking import Shrinking
from tools.differential.truth.verdict import FAILURES
from tools.pages.checks.differential_tables import read_differential, tables

SPEAK_EVERY_S = 20.0


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a case failed, and 2 where no case can run."""
    options = _options().parse_args(arguments)
    try:
        return _run(options)
    except BlocktuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    setup = Setup(device=options.device, subject=options.subject, pretend=options.pretend, timeout_s=options.timeout)
    if options.case or options.failures:
        return _again(options, setup)
    return fuzz(
        setup,
        seed=options.seed,
        seconds=options.seconds,
        cases=options.cases,
        per_class=options.per_class,
        jobs=options.jobs,
        entry=options.entry,
        out=options.out,
    )


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="differential", description="Drawn calls against attention in float64.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to go on")
    parser.add_argument("--cases", type=int, help="how many cases at most")
    parser.add_argument("--per-class", type=int, help="how many cases at most for which the same is compiled")
    parser.add_argument("--jobs", type=int, default=4, help="processes at once")
    parser.add_argument("--seed", type=int, default=1, help="the same seed draws the same cases")
    parser.add_argument("--entry", choices=[str(entry) for entry in Entry], help="calls of one function alone")
    parser.add_argument("--out", type=Path, help="write the report there; one that is there is added to")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--pretend", default="", help="the CPU as this device, with TRITON_INTERPRET=1")
    parser.add_argument("--subject", default="blocktune", help="the module whose functions are checked")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds that a case may take")
    parser.add_argument("--case", help="run this case alone: its number, or a JSON document")
    parser.add_argument("--failures", type=Path, help="run the failures of this report again")
    parser.add_argument("--shrink", action="store_true", help="and look for the smallest case that fails so")
    return parser


def fuzz(
    setup: Setup,
    *,
    seed: int,
    seconds: float,
    cases: int | None = None,
    per_class: int | None = None,
    jobs: int = 4,
    entry: str | None = None,
    out: Path | None = None,
) -> int:
    """Runs drawn cases until the time is up, or so many have run. Returns 1 if a case failed, or none has run."""
    run = Run(setup.device, seed=seed, jobs=jobs, out=out)
    pool = Pool(setup, jobs, run.started + seconds, run.add)
    run.problems = pool.problems
    pool.run(planned_jobs(seed, entry, cases, per_class, small=setup.device == "cpu"))
    run.write()
    run.show()
    return 1 if run.report.failed or not run.report.cases else 0


class Run:
    """A run's report, written and spoken of from time to time: whoever ends the process keeps most of it."""

    def __init__(self, device: str, *, seed: int, jobs: int, out: Path | None) -> None:
        self.started = self._said = time.monotonic()
        self.report = Report.begun(out, _device_name(device))
        self.problems: list[str] = []
        self._seed, self._jobs, self._out = seed, jobs, out

    def add(self, record: dict[str, Any]) -> None:
        """Counts a case."""
        if self.report.add(record | {"seed": self._seed}):
            print(json.dumps(record), flush=True)
        if time.monotonic() - self._said > SPEAK_EVERY_S:
            self._said = time.monotonic()
            seconds = self._said - self.started
            print(f"{seconds:.0f} s: {self.report.cases} cases, {self.report.failed} failed", flush=True)
            self.write()

    def write(self) -> None:
        """Puts the report in its file, if it has one."""
        if self._out:
            write(self._out, self.document())

    def show(self) -> None:
        """Prints what the documents would say."""
        print(tables(self.document()))
        print(*self.problems, sep="\n", file=sys.stderr)

    def document(self) -> dict[str, Any]:
        """The report."""
        run = {
            "seed": self._seed,
            "jobs": self._jobs,
            "seconds": round(time.monotonic() - self.started, 1),
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": source_commit(),
        }
        return self.report.document(run, self.problems)


def _again(options: argparse.Namespace, setup: Setup) -> int:
    """Runs cases that were written down, and prints what comes of each."""
    documents = [_document(options)] if options.case else []
    if options.failures:
        documents += [failure["case"] for failure in read_differential(options.failures)["failures"]]
    records: list[dict[str, Any]] = []

    def show(record: dict[str, Any]) -> None:
        records.append(record)
        print(json.dumps(record), flush=True)

    deadline = time.monotonic() + options.seconds
    pool = Pool(setup, options.jobs, deadline, show)
    pool.run(iter([{"case": Case.from_json(document).to_json()} for document in documents]))
    print(*pool.problems, sep="\n", file=sys.stderr)
    failed = [record for record in records if record["verdict"] in FAILURES]
    for record in failed if options.shrink else ():
        shrinking = Shrinking(record)
        Pool(setup, 1, deadline, shrinking.add).run(shrinking.jobs())
        print(f"smallest: {json.dumps(shrinking.smallest)}", flush=True)
    return 1 if failed or len(records) < len(documents) else 0


def _document(options: argparse.Namespace) -> dict[str, Any]:
    """The case of an option: the one of a number, or what was written down."""
    if not options.case.isdecimal():
        document: dict[str, Any] = json.loads(options.case)
        return document
    return case_of(options.seed, int(options.case), small=options.device == "cpu").to_json()


def _device_name(device: str) -> str:
    if device != "cuda":
        return device
    from blocktune.kernels.hardware.device import current_device

    return current_device().name


if __name__ == "__main__":
    sys.exit(main())
