"""`tune profile`: counters of Nsight Compute next to what the models predict, and the instructions of the loop."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.explain.kernel_profile import profile_kernel
from blocktune.cli.offline.tables import print_mix
from blocktune.cli.output.json_files import writable, write_atomically
from blocktune.cli.output.render import note, print_json, print_table, say
from blocktune.cli.shared.chosen_config import analyse_choice, choose_config
from blocktune.cli.shared.compiled_config import BlockM, BlockN, DefaultOf, OwnParameters, Stages, Warps
from blocktune.cli.shared.kernel_arguments import ArgumentsOf
from blocktune.cli.shared.kernels import KernelName
from blocktune.cli.shared.options import (
    AsJson,
    Database,
    DeviceName,
    ShapeFlags,
    kernel_instead,
    require_flags,
    with_optional_shape_flags,
)
from blocktune.cli.shared.stores import existing_store
from blocktune.kernels.values.errors import NoDeviceError, UsageError
from blocktune.tuner.measure.device_choice import choose_device, is_present

if TYPE_CHECKING:
    from blocktune.cli.shared.compiled_config import CompileRequest
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.tuner.cost.analysis import Analysis
    from blocktune.tuner.profile.comparison import Row, Stall
    from blocktune.tuner.profile.counters import Counters
    from blocktune.tuner.profile.instruction_mix import InstructionMix


@with_optional_shape_flags
def profile(
    flags: ShapeFlags | None,
    autotuned: KernelName = None,
    make_args: ArgumentsOf = None,
    grid: Annotated[str | None, typer.Option("--grid", help="Its sizes, as in 'M=512 N=4096'.")] = None,
    kernel: DefaultOf = None,
    block_m: BlockM = None,
    block_n: BlockN = None,
    warps: Warps = None,
    stages: Stages = None,
    param: OwnParameters = None,
    from_file: Annotated[
        Path | None,
        typer.Option("--from", help="Counters recorded elsewhere: a CSV of `ncu --csv`, or a report (.ncu-rep)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", callback=writable, help="Keep the counters and their config: NAME.counters.csv."),
    ] = None,
    sass: Annotated[bool, typer.Option("--sass", help="Add the instructions of the compiled loop, by kind.")] = False,
    device: DeviceName = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Put counters of Nsight Compute next to what models predict.

    The config is chosen as in `tune explain`. It runs here under `ncu`, or its counters come from a file. --sass counts
    the instructions of one round of its loop by kind, and reloads of spilled registers by source line; this needs no
    GPU. Of an autotuned kernel, it is the winner of one call.

    \b
    tune profile --seq 8192 --dim 64
    tune profile --seq 8192 --dim 64 --kernel flash_fwd --out h200.counters.csv
    tune profile --seq 8192 --dim 64 --kernel flash_fwd --device h200 --from h200.counters.csv
    tune profile --seq 8192 --dim 64 --device h200 --sass
    tune profile my_kernels:scale --args my_kernels:make_args --grid n=4096
    """
    spec = choose_device(device)
    if autotuned is not None:
        if sass or from_file is not None or out is not None:
            raise UsageError(f"`--sass`, `--from` and `--out` are of a shape, but not of {autotuned}. Leave them out.")
        profile_kernel(kernel_instead(flags, autotuned), make_args, grid, spec, db, as_json=as_json)
        return
    flags = require_flags(flags)
    shape = flags.shape()

    from blocktune.tuner.profile.counter_file import CounterFile
    from blocktune.tuner.profile.counters import Counters

    choices = {"block_m": block_m, "block_n": block_n, "num_warps": warps, "num_stages": stages}
    with existing_store(db) as store:
        chosen = choose_config(store, db, spec, shape, kernel, choices, param or [])
    text = _read_or_count(chosen.request, spec, from_file, needed=not sass or out is not None)
    counters = None if text is None else Counters.parse(text)
    if text is not None and CounterFile.names_config(text):
        _require_same(CounterFile.parse(text, str(from_file)).analysis, chosen.request)
    analysis = analyse_choice(chosen, spec)
    if out is not None and text is not None:
        today = "" if from_file is not None else datetime.now(UTC).date().isoformat()
        write_atomically(out, CounterFile(analysis, text, today).text())
    mix = _mix(chosen.request) if sass else None
    if as_json:
        print_json(_json(analysis, counters, mix))
        return
    if flags.assumed():
        note(flags.assumed())
    say(f"{shape.label} on {spec.name}\n{chosen.request.config.label}: {chosen.source}\n")
    if counters is not None:
        _show_counters(analysis, counters)
    if mix is not None:
        print_mix(mix)


def _read_or_count(
    request: "CompileRequest", device: "DeviceSpec", from_file: Path | None, *, needed: bool
) -> str | None:
    """Return the counters of a file, or of a run here, as text; None where there can be none and they are not needed.

    Raises:
        NoDeviceError: they are needed, and the device or `ncu` is not here.
        UsageError: the file cannot be read, or the launch failed.
    """
    from blocktune.tuner.profile.nsight_compute import read_counters, record_counters

    try:
        if from_file is not None:
            return read_counters(from_file)
        _require_present(device)
        return record_counters(request.shape, request.config)
    except NoDeviceError as error:
        if needed or from_file is not None:
            raise
        note(f"without counters: {error}")
        return None


def _require_same(recorded: "Analysis", request: "CompileRequest") -> None:
    """Check that counters are of the config and shape that the flags name.

    Raises:
        UsageError: they are of another one.
    """
    if (recorded.config, recorded.shape) != (request.config, request.shape):
        raise UsageError(
            f"The counters of `--from` are of {recorded.config.label} for {recorded.shape.label}, but the flags name "
            f"{request.config.label} for {request.shape.label}. Change the flags."
        )


def _require_present(device: "DeviceSpec") -> None:
    if not is_present(device):
        raise NoDeviceError(
            f"{device.name} is not in this machine, so no counters can be recorded. Read what was recorded there by "
            "`--from counters.csv`, or look at the instructions alone by `--sass`."
        )


def _mix(request: "CompileRequest") -> "InstructionMix":
    from blocktune.tuner.profile.instruction_mix import instruction_mix

    return instruction_mix(request.kernel, request.config, request.shape, request.limits)


def _json(analysis: "Analysis", counters: "Counters | None", mix: "InstructionMix | None") -> dict[str, Any]:
    from blocktune.tuner.profile.comparison import comparison, stalls_of

    found: dict[str, Any] = {
        "device": analysis.device.to_json(),
        "shape": analysis.shape.to_json() | {"label": analysis.shape.label},
        "config": analysis.config.to_json(),
        "rows": None,
        "stalls": None,
        "launches": None,
        "instructions": mix and mix.to_json(),
    }
    if counters is not None:
        found["rows"] = [row.to_json() for row in comparison(analysis, counters)]
        found["stalls"] = [stall.to_json() for stall in stalls_of(analysis, counters)]
        found["launches"] = counters.to_json()
    return found


def _show_counters(analysis: "Analysis", counters: "Counters") -> None:
    from blocktune.tuner.profile.comparison import comparison, stalls_of

    say("Counted: " + ", ".join(launch.kernel for launch in counters.launches))
    print_table(
        ("", "predicted", "counted", "ratio", "remark"),
        [_row(row) for row in comparison(analysis, counters)],
        optional=("remark",),
    )
    say("")
    stalls = stalls_of(analysis, counters)
    if stalls:
        print_table(
            ("warps wait for", "warps", "share", "term of the model", "alone"), [_stall(stall) for stall in stalls]
        )
        say("")


def _row(row: "Row") -> tuple[str, ...]:
    from blocktune.tuner.profile.comparison import in_words

    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    return row.name, in_words(row.predicted, row.unit), in_words(row.counted, row.unit), ratio, row.remark


def _stall(stall: "Stall") -> tuple[str, ...]:
    alone = "-" if stall.term_us is None else f"{stall.term_us:,.1f} µs"
    return stall.reason.replace("_", " "), f"{stall.warps:.2f}", f"{100 * stall.share:.0f} %", stall.term or "-", alone
