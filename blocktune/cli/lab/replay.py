"""`tune lab replay`: compare search strategies on recorded sweeps, without a GPU."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from blocktune.cli.lab.replay_file import (
    MODEL_COLUMNS,
    RACING_COLUMNS,
    STRATEGY_COLUMNS,
    join_replay,
    model_cells,
    racing_cells,
    strategy_cells,
)
from blocktune.cli.lab.untuned import DEFAULT_PLACE, DENSE_PLACE, replay_untuned
from blocktune.cli.output.json_files import writable, write_atomically
from blocktune.cli.output.render import note, percent, print_json, print_table, say


def replay(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PLACE]...", help=f"Sweep files, or folders of them.  [default: {DEFAULT_PLACE}]"),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", help="Only this one; may be repeated.  [default: all that are installed]"),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="Leave out this kernel, as on a GPU that cannot run it; may be repeated."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Searches per random strategy.")] = 20,
    untuned: Annotated[
        bool,
        typer.Option("--untuned", help="Compare what shapes get without tuning, each sweep left out in turn."),
    ] = False,
    winners: Annotated[
        Path | None, typer.Option("--winners", help="With --untuned: stored winners, as `tune export` writes them.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", callback=writable, help="JSON file; one for the same sweeps is extended.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Search recorded sweeps with several strategies, and compare.

    The searches are those of `tune run`, with the recorded times in place of a compiler and a GPU.

    \b
    tune lab replay
    tune lab replay results/sweeps/h200-b2-h32-s8192-d64-bf16.sweep.json.gz --strategy guided --strategy random
    tune lab replay --out results/h200.replay.json
    tune lab replay --without flash_fwd_hopper --without flash_bwd_hopper
    tune lab replay --untuned --winners blocktune/results/h200.json --out results/h200.untuned.json
    """
    if untuned:
        replay_untuned(places or [DEFAULT_PLACE, DENSE_PLACE], winners, out, as_json)
        return
    from blocktune.kernels.registry import get_kernel
    from blocktune.tuner.compile_server.farm import default_workers
    from blocktune.tuner.lab.replay_report import compare_strategies
    from blocktune.tuner.lab.sweep_file import load_sweep, sweep_files
    from blocktune.tuner.search.strategies import installed_strategies, require_strategy

    for name in strategy or ():
        require_strategy(name)
    left_out = sorted({get_kernel(name).name for name in without or ()})
    sweeps = [load_sweep(path).without(left_out) for path in sweep_files(places or [DEFAULT_PLACE])]
    compared = compare_strategies(
        sweeps, strategy or installed_strategies(), seeds=seeds, workers=default_workers(), on_run=note
    )
    report = {**compared.to_json(), "without": left_out}
    if out is not None:
        report = join_replay(report, out)
        write_atomically(out, json.dumps(report, indent=1, sort_keys=True, allow_nan=False) + "\n")
    if as_json:
        print_json(report)
    else:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    print_table(STRATEGY_COLUMNS, (strategy_cells(name, row) for name, row in report["strategies"].items()))
    say("")
    print_table(MODEL_COLUMNS, (model_cells(row) for row in report["model"]))
    say("")
    print_table(RACING_COLUMNS, map(racing_cells, report["racing"]))
    for name in report["random_as_good"]:
        note(f"random configs are as good as the default strategy after 20 measurements on {name}")
    goal = report["strategies"].get(report["default"])
    if goal is not None:
        regret = goal["regret"]["20"]
        note(f"{report['default']}: {percent(round(regret['median'], 4))} from the best after 20 measurements")
