"""Help of a command with many options: the usual ones by `--help`, all of them by `--help-all`."""

from typing import Any

from typer.core import TyperCommand

ALL = "--help-all"
MANY = 20
"""More options than this are too many for a first look."""

USUAL = {
    *("--seq", "--dim", "--causal", "--dtype", "--direction", "--grid", "--device"),
    *("--time-budget", "--out", "--verbose", "--json", "--help"),
}
"""What most people type."""


class ShortHelp(TyperCommand):
    """A command whose help leaves out what few people need, if it has many options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line; `--help-all` is a help without anything left out."""
        if ALL in args:
            ctx.meta[ALL] = True
            args = ["--help"]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options that are shown."""
        records: dict[str, list[Any]] = {"argument": [], "option": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                records[parameter.param_type_name].append((parameter, record))
        options, shown = records["option"], records["option"]
        if len(options) > MANY and ALL not in ctx.meta:
            shown = [each for each in options if USUAL.intersection(each[0].opts)]
        for title, found in (("Arguments", records["argument"]), ("Options", shown)):
            if found:
                with formatter.section(title):
                    formatter.write_dl([record for _, record in found])
        if len(shown) < len(options):
            formatter.write_paragraph()
            formatter.write_text(f"{len(options) - len(shown)} more options: {ctx.command_path} {ALL}")
