"""`--call MODULE:FUNCTION`: the kernels that a function launches, with every config of their lists, without a GPU."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.offline.gate import junit_text, require_no_flaws
from blocktune.cli.offline.tables import print_config_tables
from blocktune.cli.output.json_files import write_atomically
from blocktune.cli.output.render import note, print_json
from blocktune.cli.shared.kernel_arguments import importable_from_here
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.tuner.dry_run.config_table import OfflineTable

Call = Annotated[
    str | None,
    typer.Option(
        "--call",
        metavar="MODULE:FUNCTION",
        help="Compile the kernels that a function launches.",
    ),
]
FailOn = Annotated[
    str | None,
    typer.Option("--fail-on", metavar="FLAWS", help="With --call: exit code 8 on spills,unfit,duplicates."),
]
JunitFile = Annotated[Path | None, typer.Option("--junit", help="With --call: write JUnit's XML.")]
FillCache = Annotated[
    Path | None, typer.Option("--fill-cache", help="With --call: keep the code in this Triton cache.")
]

_OF_CALLS = ("call", "device", "as_json", "fail_on", "junit", "fill_cache")
"""Parameters of commands that a call heeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutput:
    """The forms in which tables are given out. brief: only what blocks take."""

    as_json: bool
    brief: bool = False
    fail_on: str | None = None
    junit: Path | None = None
    cache: Path | None = None


def require_call(call: str | None, output: CallOutput) -> None:
    """Require a call where flags are given that only a call has.

    Raises:
        UsageError: there is none.
    """
    flags = {"--fail-on": output.fail_on, "--junit": output.junit, "--fill-cache": output.cache}
    given = [name for name, value in flags.items() if value is not None]
    if given and call is None:
        raise UsageError(
            f"{given[0]} is about the kernels of a `--call`, but there is none. Add --call MODULE:FUNCTION."
        )


def refuse_beside_call(context: typer.Context) -> None:
    """Refuse arguments of a command that has a `--call` which a call would silently ignore.

    Raises:
        UsageError: some are given.
    """
    surplus = [
        _spelling(parameter)
        for parameter in context.command.params
        if parameter.name not in _OF_CALLS and _is_given(context, parameter.name)
    ]
    if surplus:
        words = " and ".join(surplus)
        raise UsageError(
            f"A `--call` compiles every config of the kernels that it launches, but {words} "
            f"{'is' if len(surplus) == 1 else 'are'} given too. Leave out --call or {words}."
        )


def _is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"


def _spelling(parameter: Any) -> str:
    """Return what users know an argument by: the flag, or the word in capitals."""
    return str(max(parameter.opts, key=len)) if parameter.param_type_name == "option" else str(parameter.metavar)


def explain_call(call: str, devices: str | None, output: CallOutput) -> None:
    """Compile what a function launches for each device, in a process of its own.

    Raises:
        ConfigFlawError: a config has a flaw that is not allowed.
        UsageError: a flaw or a device is none, or the function fails.
    """
    from blocktune.tuner.dry_run.config_row import flaws_named

    kinds = () if output.fail_on is None else flaws_named(output.fail_on)
    tables: list[OfflineTable] = []
    for spec in [choose_device(name.strip()) for name in devices.split(",")] if devices else [choose_device()]:
        note(f"compiling what {call} launches on {spec.name}")
        tables += _tables_apart(call, spec, output.cache)
    if output.junit is not None:
        write_atomically(output.junit, junit_text(tables, kinds))
    if output.as_json:
        print_json({"call": call, "tables": [table.to_json() for table in tables]})
    else:
        print_config_tables(tables, brief=output.brief)
    require_no_flaws(tables, kinds)


def _tables_apart(call: str, device: "DeviceSpec", cache: Path | None) -> "tuple[OfflineTable, ...]":
    """Return the tables of a call, whose code is kept in a folder of Triton's if one is given."""
    from blocktune.tuner.dry_run.explain import explain_by_name

    variables = {} if cache is None else {"TRITON_CACHE_DIR": str(cache.resolve())}
    with importable_from_here():
        return explain_by_name(call, device, variables).tables
