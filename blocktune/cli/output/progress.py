"""A search as it goes: a bar on a terminal, a line now and then elsewhere, always on stderr."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from blocktune.cli.output.render import counts, microseconds, note
from blocktune.db.records.records import Outcome

if TYPE_CHECKING:
    from blocktune.tuner.search.report import Progress

LINE_SECONDS = 10.0
"""Time between two lines where there is no terminal to animate."""


@contextmanager
def show_progress() -> Iterator[Callable[["Progress"], None]]:
    """Yield a function that shows the progress it is called with."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield Lines()
        return
    from rich import progress as bars
    from rich.console import Console
    from rich.table import Column

    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # a narrow terminal cuts the words, not the bar
    columns = (
        bars.BarColumn(bar_width=16),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.description}", markup=False, table_column=rest),
    )
    console = Console(stderr=True, highlight=False)
    with bars.Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(progress: "Progress") -> None:
            bar.update(task, completed=progress.done, total=progress.total or None, description=describe(progress))

        yield show


class Lines:
    """Prints a line when the phase changes and every `LINE_SECONDS` within one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase = ""
        self._next = 0.0

    def __call__(self, progress: "Progress") -> None:
        now = self._clock()
        if progress.phase == self._phase and now < self._next:
            return
        self._phase, self._next = progress.phase, now + LINE_SECONDS
        note(f"{progress.done}/{progress.total} {describe(progress)}")


def describe(progress: "Progress") -> str:
    """Return phase, remaining time, best so far and outcomes in one line."""
    parts = [progress.phase]
    if progress.message:
        parts.append(progress.message)
    if progress.eta_seconds is not None:
        parts.append(f"{progress.eta_seconds:.0f} s left")
    if progress.best is not None:
        best = "best predicted" if Outcome.PREDICTED in progress.outcomes else "best"
        parts.append(f"{best} {microseconds(progress.best_us)} {progress.best.label}")
    if progress.outcomes:
        parts.append(counts(progress.outcomes))
    return " | ".join(parts)
