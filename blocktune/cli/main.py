"""The command line: `blocktune`, and `tune` as a short name for it.

Exit codes: 0 done, 2 wrong use, 3 no kernel or config runs, 4 no GPU or driver where one is required, 5 the database
cannot serve, 6 nothing was measured that could be shown or written, 7 a result differs from the reference, 130
interrupted.
"""

import codecs
import gc as garbage
import logging
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from blocktune.cli.explain import devices, doctor, explain, ladder, occupancy, profile, roofline
from blocktune.cli.lab import commands as lab
from blocktune.cli.lab import contribute
from blocktune.cli.output.render import INTERRUPTED, note, print_content
from blocktune.cli.report import report
from blocktune.cli.results import best, buckets, diff, freeze, gc, kernels, merge, store, verify
from blocktune.cli.shared.short_help import ShortHelp
from blocktune.cli.tune import bench, run
from blocktune.cli.ui import ui
from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.values.errors import BlocktuneError, UsageError

NEW_OBJECTS = 50_000
"""How many may be made before Python looks for cycles among them. It begins with 700, and a command that reads
thousands of rows, none of which is in a cycle, would spend a tenth of its time on that."""


MOVED = ("calibrate", "noise", "record", "rematch", "replay", "sweeps")
"""Commands of the lab that had no `lab` in front of them. Version 0.3 no longer knows these names."""


class CommandGroup(TyperGroup):
    """The commands in groups; an error that blocktune raises on purpose becomes one paragraph and its exit code."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands under the titles of `COMMANDS`."""
        width = max(map(len, self.commands))
        for panel in COMMANDS:
            rows = [
                (name.ljust(width), command.get_short_help_str(formatter.width - width - 6))
                for name, command in self.commands.items()
                if vars(command)["rich_help_panel"] == panel
            ]
            with formatter.section(panel):
                formatter.write_dl(rows)

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Return what click does; an option that is unknown here is refused before `invoke`."""
        with _words_as_shown():
            return super().make_context(*args, **options)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return what click does, or refuse a command that has moved.

        Raises:
            UsageError: the command has moved.
        """
        if args[0] in MOVED:
            raise UsageError(f"`tune {args[0]}` is `tune lab {args[0]}` now.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _words_as_shown():
                return super().invoke(ctx)
        except BlocktuneError as error:
            note(f"error: {error}")
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as interrupt:
            note("interrupted")
            raise typer.Exit(INTERRUPTED) from interrupt
        except BrokenPipeError as error:
            if not _reader_has_left(sys.stdout):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
            raise typer.Exit from error


@contextmanager
def _words_as_shown() -> Iterator[None]:
    """Let a message of wrong use, which typer reports, repeat words of the command line as people may see them."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):
            vars(error)["message"] = shown(str(vars(error).get("message", "")))
        raise


def _reader_has_left(stream: TextIO) -> bool:
    """Return whether the reader of a pipe has closed it, as `head` does when it has seen enough."""
    poll = select.poll()
    poll.register(stream, 0)  # errors are always reported
    return any(events & select.POLLERR for _, events in poll.poll(0))


app = typer.Typer(
    cls=CommandGroup,
    name="tune",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would double its time
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print_content(f"blocktune {version('blocktune')}\n")
        raise typer.Exit


@app.callback()
def tune(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Autotune attention and other Triton kernels, and explain the result.

    Data goes to stdout, progress and messages go to stderr. Exit codes: 0 done, 2 wrong use, 3 no kernel or config
    runs, 4 no GPU or driver, 5 database, 6 nothing measured yet, 7 wrong result, 8 a config that --fail-on does not
    allow, 130 interrupted.
    """


COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Tune": {"run": run.run, "bench": bench.bench, "devices": devices.devices, "doctor": doctor.doctor},
    "Results": {
        "best": best.best,
        "list": store.list_bests,
        "kernels": kernels.kernels,
        "buckets": buckets.buckets,
        "export": store.export,
        "import": store.import_,
        "freeze": freeze.freeze,
        "merge": merge.merge,
        "diff": diff.diff,
        "verify": verify.verify,
        "gc": gc.gc,
        "contribute": contribute.contribute,
    },
    "Explain": {
        "occupancy": occupancy.occupancy,
        "explain": explain.explain,
        "profile": profile.profile,
        "roofline": roofline.roofline,
        "ladder": ladder.ladder,
        "report": report.report,
        "ui": ui.ui,
    },
    "Lab": {},
}
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        app.command(name, cls=ShortHelp, rich_help_panel=panel)(command)
app.add_typer(lab.app, name="lab", rich_help_panel="Lab")


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning to the person at the terminal: what it says, not where in the code it was raised."""
    note(f"warning: {message}")


class Notes(logging.Handler):
    """Shows what is logged to the person at the terminal, as wide as that."""

    def emit(self, record: logging.LogRecord) -> None:
        note(self.format(record))


def interrupt_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Have Ctrl-C raised once more where Python ignored it, since it came while an object was taken away."""
    if isinstance(ignored.exc_value, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.01)  # no thread: its start would wait, and be interrupted
    else:
        sys.__unraisablehook__(ignored)


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise the Ctrl-C that was ignored, but not in the hook itself, where Python would print it and go on.

    Raises:
        KeyboardInterrupt: the hook has ended; else the next tick raises it.
    """
    if frame is None or frame.f_code is not interrupt_again.__code__:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt


def print_in_any_encoding(stream: TextIO | None) -> None:
    """Let a stream of another encoding than UTF-8 print `?` for a sign that it has not, such as that of micro."""
    if isinstance(stream, TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
        stream.reconfigure(errors="replace")


def main() -> None:
    """Run the command line, as the console commands do."""
    print_in_any_encoding(sys.stdout)
    garbage.set_threshold(NEW_OBJECTS)
    warnings.showwarning = show_warning
    logging.basicConfig(handlers=[Notes()], format="%(message)s")
    sys.unraisablehook = interrupt_again
    signal.signal(signal.SIGALRM, raise_interrupt)
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)  # it writes a traceback of Ctrl-C in a close
    app()


if __name__ == "__main__":
    main()
