"""The progress of many searches, and what stays on the screen of it."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from blocktune.cli.output.progress import LINE_SECONDS
from blocktune.cli.output.progress_jobs import JobLines, show_jobs
from blocktune.db.records.records import Outcome
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.fleet.job import Advanced, Failed, Finished, Job, Started, WorkerLost
from blocktune.tuner.search.report import Progress

JOB = Job(shape=complete_shape(512, 64), device="nvidia h200|9.0|132")
OTHER = Job(shape=complete_shape(1024, 64), device="nvidia h200|9.0|132")
SEARCH = Progress(phase="search", done=31, total=160, outcomes={Outcome.OK: 31})


def test_without_a_terminal_what_begins_or_fails_has_a_line_and_the_rest_one_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    lines = JobLines(2, clock=lambda: now)
    lines.show(Started(JOB, "GPU 0"))
    lines.show(Started(OTHER, "GPU 1"))
    lines.show(Advanced(JOB, "GPU 0", SEARCH))
    now = LINE_SECONDS
    for _ in range(3):
        lines.show(Advanced(JOB, "GPU 0", SEARCH))
    lines.show(WorkerLost(JOB, "GPU 0", "killed by SIGKILL", retired=True))
    lines.show(Started(JOB, "GPU 1"))
    lines.show(Finished(JOB, "GPU 1", {"interrupted": False}))
    lines.show(Finished(OTHER, "GPU 1", {"interrupted": True}))
    lines.show(Failed(OTHER, "nothing fits", 3))
    lines.print("a result")
    output = capsys.readouterr()
    assert output.out == "a result\n"
    assert output.err.splitlines() == [
        "1/2 b32 h32 s512 d64 bf16 on GPU 0",
        "2/2 b16 h32 s1024 d64 bf16 on GPU 1",
        "GPU 0 b32 h32 s512 d64 bf16 31/160 search | 31 ok",
        "GPU 0 died of b32 h32 s512 d64 bf16, which another worker takes over; GPU 0 gets nothing more: "
        "killed by SIGKILL",
        "1/2 b32 h32 s512 d64 bf16 on GPU 1",
        "b16 h32 s1024 d64 bf16 was cut short",
        "error: b16 h32 s1024 d64 bf16: nothing fits",
    ]


def test_no_animation_where_stderr_is_no_terminal() -> None:
    with show_jobs(3) as progress:
        assert isinstance(progress, JobLines)


BARS = """
from blocktune.cli.output.progress_jobs import show_jobs
from tests_events import JOB, SEARCH, Advanced, Failed, Finished, Started

with show_jobs(2) as progress:
    progress.show(Started(JOB, "GPU 0"))
    progress.show(Advanced(JOB, "GPU 0", SEARCH))
    progress.print("a result")
    progress.show(Failed(JOB, "nothing fits", 3))
    progress.show(Finished(JOB, "GPU 0", {"interrupted": False}))
"""


def test_on_a_terminal_results_go_to_stdout_and_the_bars_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "tests_events.py").write_text(Path(__file__).read_text(), encoding="utf-8")
    terminal, end = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{BARS}"],
        stdout=subprocess.PIPE, stderr=end, env={"TERM": "xterm", "COLUMNS": "100", "PATH": "", "HOME": str(tmp_path)},
        check=True,
    )  # fmt: skip
    os.close(end)
    with open(terminal, "rb", buffering=0) as screen:
        shown = screen.read(1 << 16).decode()
    assert done.stdout == b"a result\n"
    for part in ("0/2", "1/2", "2/2", "31/160", "GPU 0 | b32 h32 s512 d64 bf16 | search", "error: b32", "GPU 0 | idle"):
        assert part in shown, part
