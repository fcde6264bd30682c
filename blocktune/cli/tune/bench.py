"""`tune bench`: the tuned kernels against all others that compute attention, in one run per shape, in turns."""

import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.output.json_files import writable
from blocktune.cli.output.render import note, print_json, print_table, say
from blocktune.cli.shared.grid import Grid, with_grid_flags
from blocktune.cli.shared.kernel_arguments import importable_from_here
from blocktune.cli.shared.options import AsJson, Database
from blocktune.cli.shared.shapes_file import ShapesFile, flags_of_file
from blocktune.cli.tune.bench_file import BenchFile, software
from blocktune.cli.tune.bench_verdicts import show_verdicts
from blocktune.cli.tune.misses import missed_shapes
from blocktune.db.records.records import Regime
from blocktune.kernels.values.errors import VerificationError

if TYPE_CHECKING:
    from blocktune.kernels.values.shape import AttentionShape

PLACES = ("--out", "--db")
"""Flags that name files of this machine."""

COLUMNS = ("", "time", "5 % to 95 %", "TFLOP/s", "over fastest rival", "config")
KEY_RATE = "keys, values"
"""A further column where there are few queries."""


@with_grid_flags
def bench(
    grid: Grid,
    autotune: Annotated[bool, typer.Option("--autotune", help="Let stock @triton.autotune take part; slow.")] = False,
    standard: Annotated[bool, typer.Option("--standard", help="Let standard attention take part.")] = False,
    flex: Annotated[
        bool, typer.Option("--flex", help="Let PyTorch's FlexAttention take part; slow to compile.")
    ] = False,
    regime: Annotated[
        Regime, typer.Option("--regime", help="burst lets the GPU rest between rounds; sustained never pauses.")
    ] = Regime.BURST,
    out: Annotated[
        Path | None, typer.Option("--out", callback=writable, help="JSON file, complete after every shape.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed for the test data.")] = 0,
    rivals: Annotated[
        Path | None,
        typer.Option(
            "--rivals", help="TOML tables of functions that take part: function, causal, scale, layout, gradients."
        ),
    ] = None,
    shapes_file: ShapesFile = None,
    from_misses: Annotated[
        bool, typer.Option("--from-misses", help="Time the shapes that your program called without a result.")
    ] = False,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Time the tuned config against its rivals.

    They are the default, FlashAttention's heuristic, other kernels, cuDNN and FlashAttention-2, -3, -4.

    All are checked first, then timed in turns. For a shape that was not tuned, the config that its calls get takes
    part. An existing file is extended, so a long bench can run in parts. At the end, each shape has a verdict: ours is
    faster, level or slower than the fastest rival. If a config that calls get is wrong, the command ends with 7 after
    all shapes.

    \b
    tune bench --seq 8192 --dim 64
    tune bench --grid "seq=512,1024 dim=64,128 causal=0,1" --out h200.bench.json
    tune bench --grid "seq=2048,8192 dim=64,128 direction=backward"
    tune bench --shapes shapes.toml
    tune bench --from-misses
    tune bench --seq 8192 --dim 128 --causal --rivals rivals.toml
    """
    if shapes_file is not None:
        grid = Grid(flags_of_file(shapes_file), many=True)
    shapes = grid.shapes()  # before heavy imports, so that wrong use fails at once

    from blocktune.db.store import ResultStore
    from blocktune.kernels.hardware.device import current_device
    from blocktune.tuner.compare.compare import compare, compile_ahead
    from blocktune.tuner.compare.rivals_file import rivals_in
    from blocktune.tuner.compile_server.farm import CompileFarm
    from blocktune.tuner.measure.clock import CudaClock
    from blocktune.tuner.measure.environment import measuring_environment
    from blocktune.tuner.measure.telemetry import GpuMonitor, gpu_lock

    with importable_from_here():
        others = {} if rivals is None else rivals_in(rivals)
    device = current_device()
    if from_misses:
        shapes = missed_shapes(device, db)
    file = BenchFile(out, device, measuring_environment(device, GpuMonitor(device.uuid)), regime)
    if not as_json:
        say(f"{device.name} with {software(file.document)}")
    with (
        importable_from_here(),
        ResultStore.open(db) as store,
        gpu_lock(device.uuid, note),
        CompileFarm(need_code=True) as farm,
    ):
        compile_ahead(store, device, shapes, farm)  # a winner of other sources ends the run before it begins
        clock = CudaClock()
        wrong: list[str] = []
        for number, shape in enumerate(shapes, start=1):
            note(f"{number}/{len(shapes)} {shape.label}")
            comparison = compare(
                shape,
                store=store,
                device=device,
                regime=regime,
                compiler=farm if autotune else None,
                standard=standard,
                flex=flex,
                rivals=others,
                seed=seed,
                clock=clock,
            )
            file.add(comparison, _command(), datetime.now(UTC).isoformat(timespec="seconds"))
            own = comparison.own
            if own is not None and own.problem:
                wrong.append(f"{shape.label}: {own.problem}")
            if not as_json:
                _show(comparison.to_json())
    _conclude(file, shapes, wrong, as_json)


def _conclude(file: BenchFile, shapes: "Sequence[AttentionShape]", wrong: list[str], as_json: bool) -> None:
    """Print the document, or the summary of these shapes.

    Raises:
        VerificationError: configs computed wrong results.
    """
    if as_json:
        print_json(file.document)
    else:
        labels = {shape.label for shape in shapes}
        rows = [row for row in file.document["rows"] if row["label"] in labels]
        show_verdicts(rows)
        _summarize(rows)
    if wrong:
        raise VerificationError(
            f"Configs that calls get compute wrong results: {'; '.join(wrong)}. Tune the shapes again by `tune run`."
        )


def _command() -> str:
    """Return what was typed, as it can be typed again elsewhere: without the files that are here."""
    words = ["tune"]
    arguments = iter(sys.argv[1:])
    for argument in arguments:
        if argument in PLACES:
            next(arguments, None)
        elif not argument.startswith(tuple(f"{flag}=" for flag in PLACES)):
            words.append(argument)
    return shlex.join(words)


def _show(row: Mapping[str, Any]) -> None:
    timed = [entry for entry in row["contenders"] if entry["timing"]]
    rates = [entry["timing"].get("key_gbs") for entry in timed]  # absent from older files
    columns: tuple[str, ...] = COLUMNS
    rows = [_cells(entry) for entry in timed]
    if any(rate is not None for rate in rates):
        columns = (*COLUMNS[:4], KEY_RATE, *COLUMNS[4:])
        rows = [(*cells[:4], _key_rate(rate), *cells[4:]) for cells, rate in zip(rows, rates, strict=True)]
    print_table(columns, rows, title=_title(row, [entry["name"] for entry in timed]))
    for entry in row["contenders"]:
        if entry["problem"]:
            say(f"{entry['name']} was not timed: {entry['problem']}")
        if entry["tuning"]:
            tuning = entry["tuning"]
            say(
                f"{entry['name']} tried {tuning['configs']} configs in {tuning['seconds']:.0f} s, compiling "
                f"{tuning['compiled']} of them; about {tuning['cold_seconds']:.0f} s with an empty cache"
            )
    say("")


def _title(row: Mapping[str, Any], timed: Sequence[str]) -> str:
    """Return what stands above the table of a shape: among the rest the fastest rival, and the rivals that it lacks."""
    from blocktune.cli.output.missing_peers import missing
    from blocktune.tuner.compare.report import peer_title

    best = row.get("best_peer")  # absent from older files
    words = [row["label"], row["regime"], f"{row['rounds']} rounds"]
    words += [f"fastest rival {peer_title(best)}"] if best else []
    words += [f"without {lacking}"] if (lacking := missing(timed)) else []
    return ", ".join(words)


def _key_rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f} GB/s"


def _cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    timing, config = entry["timing"], entry["config"]
    over = timing.get("over_best")  # absent from older files
    return (
        entry["name"],
        f"{timing['median_us']:,.1f} µs",
        f"{timing['low_us']:,.1f} to {timing['high_us']:,.1f}",
        f"{timing['tflops']:.1f}",
        f"{over['median']:.3f}x ({over['low']:.3f} to {over['high']:.3f})" if over else "-",
        " ".join(f"{name}={value}" if name != "kernel" else value for name, value in (config or {}).items()),
    )


def _summarize(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print the geometric means of the tuned config over the others, each over the shapes that have both."""
    from blocktune.tuner.compare.report import is_peer, out_of_the_box

    times = [
        {entry["name"]: entry["timing"]["median_us"] for entry in row["contenders"] if entry["timing"]} for row in rows
    ]
    for row in times:
        row |= {"fastest rival": min(peers)} if (peers := [row[name] for name in row if is_peer(name)]) else {}
    own = [(row, row.pop(out_of_the_box(row), None)) for row in times]
    for rival in dict.fromkeys(name for row in times for name in row):
        ratios = [row[rival] / time_us for row, time_us in own if rival in row and time_us is not None]
        if ratios:
            say(f"ours over {rival}: {geometric_mean(ratios):.3f}x (geometric mean of {len(ratios)} shapes)")


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the n-th root of the product of n positive numbers."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms))
