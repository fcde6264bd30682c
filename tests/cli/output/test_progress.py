"""The progress of a search where there is no terminal, and the words of a line."""

from dataclasses import replace

import pytest

from blocktune.cli.output.progress import LINE_SECONDS, Lines, describe, show_progress
from blocktune.db.records.records import Outcome
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.search.report import Progress

SEARCH = Progress(
    phase="search",
    done=31,
    total=160,
    outcomes={Outcome.OK: 29, Outcome.COMPILE_ERROR: 2, Outcome.RUN_ERROR: 0},
    best=KernelConfig("flash_fwd", 128, 64, 4, 3),
    best_us=812.46,
    eta_seconds=55.2,
)


def test_a_line_has_the_best_the_outcomes_and_the_time_left() -> None:
    text = "search | 55 s left | best 812.5 µs flash_fwd 128x64 w4 s3 | 29 ok, 2 compile error"
    assert describe(SEARCH) == text
    predicted = describe(replace(SEARCH, outcomes={Outcome.PREDICTED: 29}))
    assert predicted == "search | 55 s left | best predicted 812.5 µs flash_fwd 128x64 w4 s3 | 29 predicted"


def test_nothing_known_yet_is_not_made_up() -> None:
    assert describe(Progress(phase="compile", done=0, total=0)) == "compile"


def test_lines_come_with_a_new_phase_and_then_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter((0.0, 1.0, LINE_SECONDS + 1, LINE_SECONDS + 2, LINE_SECONDS + 3))
    show = Lines(clock=lambda: next(times))
    for _ in range(4):
        show(SEARCH)
    show(Progress(phase="finals", done=1, total=3))
    output = capsys.readouterr()
    assert output.out == ""
    assert [line.split(" | ")[0] for line in output.err.splitlines()] == [
        "31/160 search",
        "31/160 search",
        "1/3 finals",
    ]


def test_no_animation_where_stderr_is_no_terminal() -> None:
    with show_progress() as show:
        assert isinstance(show, Lines)


def test_no_animation_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    with show_progress() as show:
        assert isinstance(show, Lines)
