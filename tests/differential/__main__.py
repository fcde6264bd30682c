"""`python -P -m tests.differential`: runs drawn cases for a time, or one case that was written down."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blocktune.cli.pages.checks.differential_tables import read_differential, tables
from blocktune.kernels.values.errors import BlocktuneError
from blocktune.tuner.measure.environment import source_commit
from tests.differential.cases.case import Case, Entry, class_to_json
from tests.differential.cases.classes import cases_in, planned_classes
from tests.differential.runs.parent import Pool, Setup
from tests.differential.runs.report import Report, write
from tests.differential.truth.verdict import FAILURES

SPEAK_EVERY_S = 20.0
CLASSES_APART = 1_000_003


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
    parser.add_argument("--case", help="run this case alone, a JSON document")
    parser.add_argument("--failures", type=Path, help="run the failures of this report again")
    return parser


def planned_jobs(
    seed: int, entry: str | None = None, most: int | None = None, per_class: int | None = None
) -> Iterator[dict[str, Any]]:
    """Jobs of drawn classes until there are `most` cases: without end by default. per_class: cases of one at most."""
    left = sys.maxsize if most is None else most
    for number, kind in enumerate(planned_classes(seed)):
        if left <= 0:
            return
        if entry is None or kind.entry == entry:
            cases = min(cases_in(kind), left, per_class or left)
            left -= cases
            yield {"kind": class_to_json(kind), "seed": seed * CLASSES_APART + number, "count": cases}


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
    pool.run(planned_jobs(seed, entry, cases, per_class))
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
        self.report.add(record)
        if record["verdict"] in FAILURES:
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
    documents = [json.loads(options.case)] if options.case else []
    if options.failures:
        documents += [failure["case"] for failure in read_differential(options.failures)["failures"]]
    verdicts = []

    def show(record: dict[str, Any]) -> None:
        verdicts.append(record["verdict"])
        print(json.dumps(record), flush=True)

    pool = Pool(setup, options.jobs, time.monotonic() + options.seconds, show)
    pool.run(iter([{"case": Case.from_json(document).to_json()} for document in documents]))
    print(*pool.problems, sep="\n", file=sys.stderr)
    return 1 if FAILURES.intersection(verdicts) or len(verdicts) < len(documents) else 0


def _device_name(device: str) -> str:
    if device != "cuda":
        return device
    from blocktune.kernels.hardware.device import current_device

    return current_device().name


if __name__ == "__main__":
    sys.exit(main())
