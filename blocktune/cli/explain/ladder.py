"""`tune ladder`: how attention became fast, from standard attention to the kernel for Hopper, each step explained."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.explain.ladder_file import HEADER, LadderFile, ShippedLadder, shipped_ladder
from blocktune.cli.output.json_files import writable
from blocktune.cli.output.render import microseconds, note, percent, print_json, print_table, say
from blocktune.cli.shared.lookup import look_up
from blocktune.cli.shared.options import AsJson, Database, DeviceName, ShapeFlags, with_optional_shape_flags
from blocktune.cli.shared.stores import existing_store
from blocktune.db.records.records import problem_json
from blocktune.kernels.values.errors import UsageError, VerificationError
from blocktune.tuner.measure.device_choice import choose_device, is_present

if TYPE_CHECKING:
    from blocktune.db.records.records import Environment
    from blocktune.db.store import ResultStore
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.kernels.values.config import KernelConfig
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.tuner.compare.ladder import Ladder
    from blocktune.tuner.compare.ladder_presets import Preset
    from blocktune.tuner.compare.ladder_steps import LadderStep

WRONG = "WrongResultError"
"""How the problem of a step begins whose result differs from the reference."""

OPTIONAL = ("tensor cores", "limited by", "bank conflicts", "occupancy", "over v2", "device memory")
"""Columns that a narrow terminal goes without, the first ones first."""


@with_optional_shape_flags
def ladder(
    flags: ShapeFlags | None,
    device: DeviceName = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", help="A known problem with its device and blocks: rtx2070.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", callback=writable, help="JSON file; a shape of it is replaced.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed for the test data.")] = 0,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Climb from standard attention to the fastest kernel, by steps.

    It leads over FlashAttention v1 and v2, and shows what each step gains. The backward has its own ladder: matrices of
    probabilities, two passes, one pass, the kernel for Hopper.

    On the GPU here, every step is checked and timed in turns with the others. For another --device, all times are
    predicted; measured times that ship for that device and shape are shown first. A step that cannot run is listed with
    the reason. A step with a wrong result ends the command with 7.

    \b
    tune ladder --seq 8192 --dim 64
    tune ladder --seq 8192 --dim 64 --direction backward
    tune ladder --seq 1024 --dim 64 --dtype fp16 --device rtx2070
    tune ladder --preset rtx2070
    """
    chosen = _preset(preset, flags, device)
    shape = chosen.shape if chosen else _require_flags(flags).shape()
    spec = choose_device(chosen.device if chosen else device)

    from blocktune.tuner.compare.ladder import climb
    from blocktune.tuner.compile_server.farm import CompileFarm
    from blocktune.tuner.cost.roofline import require_units
    from blocktune.tuner.measure.telemetry import gpu_lock

    require_units(shape.dtype, spec)
    here = is_present(spec)
    file = None if out is None else LadderFile(out, spec, _environment(spec))
    with existing_store(db) as store:
        known = known_configs(store, db, spec, shape)
    if flags is not None and flags.assumed():
        note(flags.assumed())
    with gpu_lock(spec.uuid, note), CompileFarm(need_code=here) as farm:
        note(f"{'measuring' if here else 'predicting'} on {spec.name}: {shape.label}")
        clock = None
        if here:
            from blocktune.tuner.measure.clock import CudaClock

            clock = CudaClock()
        climbed = climb(shape, spec, compiler=farm, known=known, clock=clock, seed=seed, preset=chosen)
    shipped = None if here else shipped_ladder(spec, shape)
    if file is not None:
        file.add(climbed.to_json(), _command(), datetime.now(UTC).isoformat(timespec="seconds"))
    if as_json:
        print_json(climbed.to_json() | {"shape": problem_json(shape), "shipped": shipped and shipped.to_json()})
    else:
        if chosen is not None:
            say(f"{chosen.teaches}\n")
        if shipped is not None:
            _show_shipped_ladder(shipped, climbed)
        show(climbed)
    wrong = [f"{step.name}: {step.problem}" for step in climbed.steps if step.problem.startswith(WRONG)]
    if wrong:
        raise VerificationError(f"Some steps compute wrong results: {'; '.join(wrong)}. Please report it.")


def _preset(name: str | None, flags: ShapeFlags | None, device: str | None) -> "Preset | None":
    """Return the preset that is named.

    Raises:
        UsageError: no preset has this name, or a flag repeats what it says.
    """
    from blocktune.tuner.compare.ladder_presets import PRESETS

    if name is None:
        return None
    if name not in PRESETS:
        raise UsageError(f"No such preset: {name!r}. The presets are {', '.join(PRESETS)}.")
    if flags is not None or device is not None:
        raise UsageError(f"The preset {name} has a shape and a device of its own. Leave out `--device` and the sizes.")
    return PRESETS[name]


def _require_flags(flags: ShapeFlags | None) -> ShapeFlags:
    """Return the flags.

    Raises:
        UsageError: none was given.
    """
    if flags is None:
        raise UsageError("The ladder needs a shape: give `--seq` and `--dim`, or `--preset rtx2070`.")
    return flags


def known_configs(
    store: "ResultStore | None", db: str | None, device: "DeviceSpec", shape: "AttentionShape"
) -> tuple["KernelConfig", ...]:
    """Return the configs that were tuned for this shape on this device, the fastest first, then what the dispatcher
    would take."""
    found = list(_measured_configs(store, device, shape)) if store is not None else []
    candidate = look_up(store, db, device, shape).candidate
    return tuple(dict.fromkeys([*found, *([] if candidate is None else [candidate.config])]))


def show(climbed: "Ladder") -> None:
    """Show the steps as a table, then each in words."""
    what = f"measured, {climbed.rounds} rounds" if climbed.measured else "predicted by the models, nothing was measured"
    columns = ("step", "config", "time" if climbed.measured else "predicted", "TFLOP/s", "over the step before",
               "over v2", "device memory", "occupancy", "limited by", "bank conflicts", "tensor cores")  # fmt: skip
    rows = [_cells(step, climbed) for step in climbed.steps]
    print_table(columns, rows, title=f"{climbed.shape.label} on {climbed.device.name}, {what}", optional=OPTIONAL)
    say("")
    for step in climbed.steps:
        say(_words(step))


def _show_shipped_ladder(shipped: ShippedLadder, climbed: "Ladder") -> None:
    title = f"{climbed.shape.label} on {climbed.device.name}, {shipped.source}"
    print_table(HEADER, shipped.cells, title=title, optional=OPTIONAL)
    say("\nWhat follows is predicted, for the steps of today; where the two disagree, the measurement is right.\n")


def _measured_configs(store: "ResultStore", device: "DeviceSpec", shape: "AttentionShape") -> Iterator["KernelConfig"]:
    from blocktune.kernels.registry import KERNELS

    trials = [
        trial
        for trial in store.trials(device, shape)
        if trial.config.kernel in KERNELS and trial.kernel_hash == KERNELS[trial.config.kernel].source_hash
    ]
    timed = sorted((trial.time_us, number) for number, trial in enumerate(trials) if trial.time_us is not None)
    return (trials[number].config for _, number in timed)


def _environment(device: "DeviceSpec") -> "Environment":
    from blocktune.tuner.measure.environment import measuring_environment, predicting_environment
    from blocktune.tuner.measure.telemetry import GpuMonitor

    if is_present(device):
        return measuring_environment(device, GpuMonitor(device.uuid))
    return predicting_environment(device)


def _cells(step: "LadderStep", climbed: "Ladder") -> tuple[str, ...]:
    from blocktune.tuner.compare.ladder_ideas import PYTORCH
    from blocktune.tuner.compare.ladder_steps import size

    timing = step.timing
    time_us = timing.median_us if timing else None if climbed.measured else step.predicted_us
    occupied, traffic = step.occupied, step.traffic
    return (
        step.name,
        step.config.label if step.config else "PyTorch" if step.name in PYTORCH else "-",
        microseconds(time_us) if timing else _predicted(step, climbed),
        f"{1e-6 * climbed.shape.flops / time_us:.1f}" if time_us else "-",
        _ratio(step.over_before),
        _ratio(step.over_v2),
        "-" if traffic is None else size(traffic.least),
        percent(occupied.fraction if occupied else None),
        ", ".join(str(name).replace("_", " ") for name in occupied.limiters) if occupied else "-",
        _conflicts(step),
        step.tensor_cores or "-",
    )


def _predicted(step: "LadderStep", climbed: "Ladder") -> str:
    from blocktune.tuner.cost.bands import predicted_text

    time_us = None if climbed.measured else step.predicted_us
    return predicted_text(time_us, step.config.kernel if step.config else step.name, climbed.shape, climbed.device)


def _conflicts(step: "LadderStep") -> str:
    """Return the wavefronts per load of the loop, as a profiler calls them; `-` if it loads nothing that can be
    counted."""
    shared = step.shared
    if shared is None or not shared.loads:
        return "-"
    return f"{shared.ways:.1f}-way" if shared.load_excess else "none"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _words(step: "LadderStep") -> str:
    words = f"{step.name}: {step.idea}."
    if step.why:
        words += f" By the models: {step.why}."
    return f"{words} Not run: {step.problem}" if step.problem else words


def _command(arguments: Sequence[str] | None = None) -> str:
    """Return what was typed, as it can be typed again elsewhere: without the files that are here."""
    words, rest = ["tune"], iter(sys.argv[1:] if arguments is None else arguments)
    for word in rest:
        if word in ("--out", "--db"):
            next(rest, None)
        elif not word.startswith(("--out=", "--db=")):
            words.append(word)
    return shlex.join(words)
