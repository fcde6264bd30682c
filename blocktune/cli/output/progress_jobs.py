"""Many searches as they go: one bar for all and one for each GPU on a terminal, a line now and then elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from blocktune.cli.output.progress import LINE_SECONDS, describe
from blocktune.cli.output.render import note, say

if TYPE_CHECKING:
    from blocktune.tuner.fleet.job import Event


class JobsProgress(Protocol):
    """Shows events on stderr and lets results pass to stdout between them."""

    def show(self, event: "Event") -> None: ...

    def print(self, line: str) -> None: ...


@contextmanager
def show_jobs(total: int) -> Iterator[JobsProgress]:
    """Yield what shows the progress of `total` jobs."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield JobLines(total)
        return
    bars = JobBars(total)
    try:
        yield bars
    finally:
        bars.stop()


def event_line(event: "Event", number: int, total: int) -> str:
    """Return what is said of an event for good; empty for what only moves a bar."""
    from blocktune.tuner.fleet.job import Failed, Finished, Started, WorkerLost

    label = event.job.shape.label
    match event:
        case Started():
            return f"{number}/{total} {label} on {event.worker}"
        case WorkerLost():
            fate = f"; {event.worker} gets nothing more" if event.retired else ""
            return f"{event.worker} died of {label}, which another worker takes over{fate}: {event.reason}"
        case Failed():
            return f"error: {label}: {event.error}"
        case Finished() if event.report["interrupted"]:
            return f"{label} was cut short"
        case _:
            return ""


class JobLines:
    """A line for what begins, ends or fails, and every `LINE_SECONDS` one for each GPU."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._begun: dict[Any, int] = {}
        self._next: dict[str, float] = {}

    def show(self, event: "Event") -> None:
        from blocktune.tuner.fleet.job import Advanced, Started

        number = self._begun.setdefault(event.job, len(self._begun) + 1)
        line = event_line(event, number, self._total)
        if line:
            note(line)
        if isinstance(event, Started):
            self._next[event.worker] = self._clock() + LINE_SECONDS
        elif isinstance(event, Advanced) and self._clock() >= self._next[event.worker]:
            self._next[event.worker] = self._clock() + LINE_SECONDS
            progress = event.progress
            note(f"{event.worker} {event.job.shape.label} {progress.done}/{progress.total} {describe(progress)}")

    def print(self, line: str) -> None:
        say(line)


class JobBars:
    """Bars on the terminal's last lines; what is said for good stands above them."""

    def __init__(self, total: int) -> None:
        from rich import progress as bars
        from rich.console import Console
        from rich.table import Column

        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # a narrow terminal cuts the words, not the bars
        self._bars = bars.Progress(
            bars.BarColumn(bar_width=16),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.description}", markup=False, table_column=rest),
            console=Console(stderr=True, highlight=False),
            transient=True,
            expand=True,
            redirect_stdout=False,
        )
        self._total = total
        self._begun: dict[Any, int] = {}
        self._all = self._bars.add_task("shapes", total=total)
        self._workers: dict[str, Any] = {}
        self._bars.start()

    def show(self, event: "Event") -> None:
        from blocktune.tuner.fleet.job import Advanced, Failed, Finished, Started

        number = self._begun.setdefault(event.job, len(self._begun) + 1)
        match event:
            case Started():
                bar = self._workers.get(event.worker)
                if bar is None:
                    bar = self._workers[event.worker] = self._bars.add_task("", total=None)
                description = f"{event.worker} | {event.job.shape.label} | starting"
                self._bars.reset(bar, total=None, description=description)
                return
            case Advanced():
                progress = event.progress
                self._bars.update(
                    self._workers[event.worker],
                    completed=progress.done,
                    total=progress.total or None,
                    description=f"{event.worker} | {event.job.shape.label} | {describe(progress)}",
                )
                return
            case Finished():
                self._bars.reset(self._workers[event.worker], total=None, description=f"{event.worker} | idle")
                self._bars.advance(self._all)
            case Failed():
                self._bars.advance(self._all)
        line = event_line(event, number, self._total)
        if line:
            self._aside(lambda: note(line))

    def print(self, line: str) -> None:
        self._aside(lambda: say(line))

    def stop(self) -> None:
        self._bars.stop()

    def _aside(self, say: Callable[[], None]) -> None:
        """Say something where the bars stand; they come back below it."""
        self._bars.stop()
        say()
        self._bars.start()
