"""`tune run`: search the block sizes of one shape or many, or predict them for a device that is not here."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.output.progress import show_progress
from blocktune.cli.output.render import INTERRUPTED, note
from blocktune.cli.shared import completion
from blocktune.cli.shared.gpu_count import gpus_for, wanted_gpus
from blocktune.cli.shared.grid import Grid, with_grid_flags
from blocktune.cli.shared.kernel_arguments import ArgumentsOf, Expand, Space
from blocktune.cli.shared.kernels import KernelName
from blocktune.cli.shared.options import AsJson, Database, DeviceName, Verbose
from blocktune.cli.shared.shapes_file import ShapesFile, flags_of_file, part_of
from blocktune.cli.tune.cluster import FleetEngine, cluster_of, run_on_cluster
from blocktune.cli.tune.foreign_flags import refuse
from blocktune.cli.tune.kernel_call import KernelCallFlags, device_of, show_offline
from blocktune.cli.tune.known_result import known_result
from blocktune.cli.tune.misses import missed_shapes
from blocktune.cli.tune.report_text import wait_text
from blocktune.cli.tune.run_many import run_many
from blocktune.cli.tune.run_output import RunOutput
from blocktune.cli.tune.target import Target
from blocktune.db.records.records import Objective, Regime
from blocktune.tuner.cluster.connection import ANY
from blocktune.tuner.measure.device_choice import choose_device, is_present
from blocktune.tuner.measure.protocol import DEFAULT_REGIME
from blocktune.tuner.search.report import MEASURED_BUDGET, PREDICTED_BUDGET, Budget
from blocktune.tuner.search.strategies import DEFAULT, STRATEGIES, require_strategy

if TYPE_CHECKING:
    from blocktune.kernels.hardware.device import DeviceSpec


_DEFAULT_TRIALS = f"{MEASURED_BUDGET.trials}, predicted {PREDICTED_BUDGET.trials}"
_DEFAULT_SECONDS = f"{MEASURED_BUDGET.seconds:g}, predicted {PREDICTED_BUDGET.seconds:g}"


@with_grid_flags
def run(
    grid: Grid,
    autotuned: KernelName = None,
    make_args: ArgumentsOf = None,
    param: Space = None,
    expand: Expand = 0,
    trials: Annotated[
        int | None, typer.Option("--trials", help=f"Maximum number of configs to try.  [default: {_DEFAULT_TRIALS}]")
    ] = None,
    time_budget: Annotated[
        float | None,
        typer.Option("--time-budget", help=f"Maximum seconds to search.  [default: {_DEFAULT_SECONDS}]"),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", help="Search only this kernel; may be repeated.", autocompletion=completion.kernels),
    ] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Try every config, whatever the time.")] = False,
    regime: Annotated[
        Regime | None,
        typer.Option(
            "--regime",
            help=f"burst lets the GPU rest between rounds; sustained never pauses.  [default: {DEFAULT_REGIME}]",
        ),
    ] = None,
    objective: Annotated[
        Objective, typer.Option("--objective", help="Choose the winner by the time or by the energy of a launch.")
    ] = Objective.TIME,
    sampler: Annotated[
        str,
        typer.Option(
            "--sampler",
            help=f"Strategy that chooses the next config: {', '.join(STRATEGIES)}, "
            "or an Optuna sampler as package.module:Class.",
            autocompletion=completion.samplers,
        ),
    ] = DEFAULT,
    study: Annotated[
        str | None,
        typer.Option("--study", metavar="URL", help="Also keep the Optuna study, in a separate file or database."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed for the sampler and the test data.")] = 0,
    from_misses: Annotated[
        bool,
        typer.Option("--from-misses", help="Tune the shapes that the dispatcher missed, most frequent first."),
    ] = False,
    shapes_file: ShapesFile = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="N|all", help="How many GPUs of one kind share many shapes.  [default: all]"),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard", metavar="I/N", help="Only every Nth shape from the Ith on: the part of one of N machines."
        ),
    ] = None,
    executor: Annotated[
        FleetEngine, typer.Option("--executor", help="Where to tune many shapes: on this machine, or on a Ray cluster.")
    ] = FleetEngine.LOCAL,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", help="Address of the Ray cluster; auto is the one on this machine.  [default: a new one]"
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude", metavar="NAME=VERSION", help="Use no node with this version of triton, torch or driver."
        ),
    ] = None,
    device: DeviceName = None,
    db: Database = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest config for a shape on this GPU.

    For a device that is not in this machine, times are predicted from compiled code and a cost model. Every trial is
    stored when it ends: Ctrl-C keeps all results, and the same command continues from there. An autotuned kernel is
    tuned for each size of --grid; --args names the function that makes its arguments. For a --device that is not here,
    its configs are compiled, and a table ranks them by resources.

    \b
    tune run --seq 8192 --dim 64
    tune run --seq 4096 --dim 128 --causal --heads 32 --kv-heads 8 --time-budget 60
    tune run --seq 8192 --dim 64 --device a100 --json
    tune run --grid "seq=512,1024 dim=64,128 causal=0,1" --time-budget 60
    tune run --shapes shapes.toml --gpus 2
    tune run --shapes shapes.toml --shard 3/16
    blocktune run --shapes shapes.toml --executor ray --address auto --device any
    tune run --seq 8192 --dim 128 --direction backward
    tune run --seq 8192 --dim 128 --causal --features "window=1023:0 softcap"
    tune run --from-misses --time-budget 60
    tune run --seq 8192 --dim 64 --objective energy
    tune run --seq 8192 --dim 64 --sampler tpe --study search.db
    tune run my_kernels:matmul --args my_kernels:make_args --grid "M=512,4096 N=4096 K=4096"
    """
    # Before heavy imports, so that wrong use fails at once.
    require_strategy(sampler)
    cluster = cluster_of(executor, address, exclude, device=device, gpus=gpus, study=study)
    wanted = wanted_gpus(gpus)
    targets: tuple[Target, ...]
    if autotuned is not None:
        refuse({"--kernel": kernel}, f"{autotuned} names the kernel.")
        call = KernelCallFlags(autotuned, make_args, param or [], expand)
        spec = device_of(autotuned, device, on_cluster=cluster is not None)
        requests, many = call.requests(grid.text, shapes_file, spec if from_misses else None)
        if cluster is None and device is not None and not is_present(spec):
            flags = {"--trials": trials, "--time-budget": time_budget, "--expand": expand, "--study": study}
            flags |= {"--gpus": gpus, "--regime": regime, "--objective": objective is not Objective.TIME}
            flags |= {"--sampler": sampler != DEFAULT, "--seed": seed, "--exhaustive": exhaustive}
            refuse(flags, f"{spec.name} is not in this machine, so the configs are compiled and not searched.")
            show_offline(requests if shard is None else part_of(requests, shard), spec, as_json=as_json)
            return
        targets = requests
    else:
        refuse({"--args": make_args, "--param": param, "--expand": expand}, "Name an autotuned kernel, MODULE:KERNEL.")
        if shapes_file is not None:
            grid = Grid(flags_of_file(shapes_file), many=True)
        targets, many = grid.shapes(), grid.many
        spec = choose_device(device if cluster is None or device != ANY else None)
        if from_misses:
            targets = missed_shapes(spec, db)
    if shard is not None:
        targets = part_of(targets, shard)
    devices = gpus_for(spec, wanted, len(targets)) if cluster is None else ()

    from blocktune.kernels.registry import get_kernel

    search: dict[str, Any] = {
        "device": spec,
        "budget": Budget(trials=trials, seconds=time_budget),
        "kernels": [get_kernel(name) for name in kernel] if kernel else None,
        "exhaustive": exhaustive,
        "regime": regime,
        "objective": objective,
        "sampler": sampler,
        "study": study,
        "seed": seed,
    }
    assumed = "" if autotuned is not None else grid.assumed()
    if (many or verbose) and cluster is None and autotuned is None:
        _announce(spec)
    if assumed and (many or verbose or as_json):
        note(assumed)
    if cluster is not None:
        interrupted = run_on_cluster(targets, db, as_json, search, cluster)
    elif not many:
        output = RunOutput(as_json=as_json, verbose=verbose, assumed=assumed, db=db)
        interrupted = _run_one(targets[0], search, output)
    else:
        interrupted = run_many(targets, db, as_json, search, devices)
    if interrupted:
        note("interrupted; all trials are kept, and the same command goes on from here")
        raise typer.Exit(INTERRUPTED)


def _run_one(target: "Target", search: dict[str, Any], output: RunOutput) -> bool:
    """Tune a shape or a call and show what came of it; returns whether the user cut it short."""
    from blocktune.cli.tune.target import tune_target
    from blocktune.db.store import ResultStore
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.tuner.search.arguments import require_possible
    from blocktune.tuner.search.run import farm_for

    device, known = search["device"], None
    if isinstance(target, AttentionShape):
        require_possible(target, device, search["regime"], search["objective"])
    with ResultStore.open(output.db) as store, farm_for(device) as compiler:
        if isinstance(target, AttentionShape):
            known = None if is_present(device) else known_result(store, output.db, device, target)
            if known is not None:
                output.show_known(known, compiler)
            note(wait_text(search["budget"], present=is_present(device), exhaustive=search["exhaustive"]))
        with show_progress() as show:
            report = tune_target(target, search, store, show, compiler)
        output.show_end(report, known, store)
    return report.interrupted


def _announce(spec: "DeviceSpec") -> None:
    """Say what will be done, first of all."""
    from blocktune.kernels.hardware.device import present_devices

    if is_present(spec):
        note(f"measuring on {spec.name}")
        return
    missing = spec.name if present_devices() else "GPU"
    where = f"{spec.name} (compute capability {spec.limits.name})"
    note(f"no {missing} in this machine: compiling for {where} and predicting, not measuring")
