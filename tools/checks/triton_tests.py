"""Triton's own tests of its autotuner, in three ways: with Triton's tuner, under `blocktune.install()`, and with
`triton.autotune = blocktune.autotune`. What Triton's tuner passes must pass in all of them.

python -m tools.checks.triton_tests TEST_FILE... [--out results/h200.triton-tests.json] [--stand-in]

The files are Triton's (python/test/unit/runtime/test_autotuner.py of a release), and are no part of this repository.
Each way has a process of its own, with an empty store and an empty cache of Triton's; all three run at once. Exits with
1 where a test fails that passes with Triton's tuner. `--stand-in` needs no GPU: code is compiled for an H200, and
launches are computed by Triton's interpreter.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tools import ROOT

WAYS = ("stock", "install", "autotune")
WAY, ANSWERS, STAND_IN = "TRITON_TESTS_WAY", "TRITON_TESTS_ANSWERS", "TRITON_TESTS_STAND_IN"
"""The variables of a process that runs tests in one way."""

TIMEOUT_SECONDS = 300.0

PROCESSORS = 6
"""What the tests of a file keep busy: those of several files run at once where there are more."""

OPTIONS = ("-q", "--tb=short", "-c", os.devnull, "-p", "tools.checks.triton_tests", "-p", "no:cacheprovider")
"""Of pytest: our plugin, and nothing of the folders that the files are in."""

Outcomes = dict[str, str]
"""How tests ended, by name: passed, failed or skipped."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """How the tests of a file ended. counts: by way and outcome. worse: tests by way that Triton's tuner passes and
    that way does not. better: the other way round."""

    file: str
    counts: dict[str, dict[str, int]]
    worse: dict[str, list[str]]
    better: dict[str, list[str]]

    @classmethod
    def of(cls, file: Path, ended: dict[str, Outcomes]) -> "FileRecord":
        """Return the record of the outcomes of each way."""
        stock = ended["stock"]
        others = {way: outcomes for way, outcomes in ended.items() if way != "stock"}
        return cls(
            file=f"{file.parent.name}/{file.name}",
            counts={way: dict(Counter(outcomes.values())) for way, outcomes in ended.items()},
            worse={way: _passed_only_in(stock, outcomes) for way, outcomes in others.items()},
            better={way: _passed_only_in(outcomes, stock) for way, outcomes in others.items()},
        )


def _passed_only_in(one: Outcomes, other: Outcomes) -> list[str]:
    return sorted(test for test, outcome in one.items() if outcome == "passed" and other.get(test) != "passed")


def outcomes_of(file: Path, way: str, *, stands_in: bool) -> Outcomes:
    """Return how the tests of a file end in one way, in a process of its own.

    Raises:
        RuntimeError: no test ran.
    """
    with tempfile.TemporaryDirectory(prefix="triton-tests-") as name:
        folder = Path(name)
        environment = os.environ | {
            WAY: way,
            ANSWERS: str(folder / "answers.json"),
            STAND_IN: "1" if stands_in else "",
            "BLOCKTUNE_DB": str(folder / "store.db"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pytest", *OPTIONS, "--rootdir", name, str(file)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        sys.stderr.write(f"--- {file} {way}\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
        answers = folder / "answers.json"
        outcomes: Outcomes = json.loads(answers.read_text()) if answers.exists() else {}
        if not outcomes:
            raise RuntimeError(f"No test of {file} ran in the way {way}.")
        return outcomes


def record_of(file: Path, *, stands_in: bool) -> FileRecord:
    """Return how the tests of a file end in all ways, which run at once."""
    with ThreadPoolExecutor(len(WAYS)) as pool:
        ended = pool.map(lambda way: outcomes_of(file, way, stands_in=stands_in), WAYS)
        return FileRecord.of(file, dict(zip(WAYS, ended, strict=True)))


_outcomes: Outcomes = {}
_entered = ExitStack()


def pytest_configure() -> None:
    """Let Triton's decorator be what the way of this process says. Tests of a newer Triton ask for devices that this
    one does not know."""
    import triton

    if os.environ[STAND_IN]:
        from tests.support.fakes.computing_gpu import as_on_a_computing_h200

        _entered.enter_context(as_on_a_computing_h200())
    import triton._internal_testing as testing

    import blocktune

    if not hasattr(testing, "is_rubin"):
        testing.is_rubin = lambda: False
    if os.environ[WAY] == "install":
        blocktune.install()
    if os.environ[WAY] == "autotune":
        triton.autotune = blocktune.autotune


def pytest_runtest_logreport(report: Any) -> None:
    """Note how a test ended: by its worst part."""
    name = report.nodeid.partition("::")[2]
    if report.when == "call" or report.outcome != "passed":
        _outcomes[name] = report.outcome


def pytest_sessionfinish() -> None:
    """Tell the outcomes."""
    Path(os.environ[ANSWERS]).write_text(json.dumps(_outcomes))
    _entered.close()


@pytest.fixture
def device() -> str:
    """Return where tensors are, as Triton's tests ask for it."""
    return "cpu" if os.environ[STAND_IN] else "cuda"


@pytest.fixture
def fresh_knobs() -> Iterator[Any]:
    """Yield Triton's knobs as they are without an environment, as Triton's tests ask for them."""
    from triton._internal_testing import _fresh_knobs_impl

    fresh, reset = _fresh_knobs_impl()
    try:
        yield fresh()
    finally:
        reset()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests, print their record and return 1 where ours fail."""
    parser = argparse.ArgumentParser(description="Triton's own tests of its autotuner, in three ways")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stand-in", action="store_true")
    given = parser.parse_args(arguments)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // PROCESSORS)) as pool:
        records = [*pool.map(lambda file: record_of(file.resolve(), stands_in=given.stand_in), given.files)]
    document = {
        "triton": version("triton"),
        "gpu": "stand-in" if given.stand_in else "here",
        "files": [asdict(record) for record in records],
    }
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    if given.out is not None:
        given.out.write_text(text)
    sys.stdout.write(text)
    return int(any(tests for record in records for tests in record.worse.values()))


if __name__ == "__main__":
    sys.exit(main())
