"""`tune lab rematch`: the winners of several searches against each other, to see whether searches agree."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.lab.noise_file import REMATCH_COLUMNS, REMATCH_FORMAT, SCHEMA, rematch_cells
from blocktune.cli.output.json_files import writable, write_atomically
from blocktune.cli.output.render import note, print_json, print_table, say
from blocktune.cli.shared.options import AsJson
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError

if TYPE_CHECKING:
    from blocktune.db.records.records import Best, Regime
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.kernels.values.shape import AttentionShape


def rematch(
    places: Annotated[
        list[str], typer.Argument(metavar="STORE...", help="Databases (paths or URLs) or exports, one per search.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", callback=writable, help="Write the JSON object to this file too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time the winners of repeated searches against each other.

    The default takes part, in one run of finals per shape. It shows how many searches found the same winner or one
    within the tie band of it, and whether any winner is slower than the default. Only shapes that all stores hold as
    measured on this kind of GPU, under one regime, take part.

    \b
    for i in 0 1 2 3 4 5 6 7 8 9; do tune run --seq 8192 --dim 64 --seed $i --db search$i.db; done
    tune lab rematch search*.db
    tune lab rematch search*.db --out results/h200.rematch.json
    """
    if len(places) < 2:
        raise UsageError(f"A rematch needs the winners of at least two searches, but got {len(places)}. Name more.")
    from blocktune.kernels.hardware.device import current_device
    from blocktune.tuner.measure.environment import source_commit

    device = current_device()
    rows = [_rematch(shape, regime, winners, device) for (shape, regime), winners in _common(places, device).items()]
    document = {
        "format": REMATCH_FORMAT,
        "schema": SCHEMA,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "device": device.name,
        "rows": rows,
    }
    if out is not None:
        write_atomically(out, json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")
    if as_json:
        print_json(document)
        return
    print_table(REMATCH_COLUMNS, [rematch_cells(row) for row in rows])
    for row in rows:
        for entry in row["winners"]:
            told = f"{entry['over_default']:.3f} of the default's time" if entry["time_us"] else entry["problem"]
            say(f"{row['label']}: {entry['searches']} x {entry['label']}, {told}")


def _common(places: Sequence[str], device: "DeviceSpec") -> "Mapping[tuple[AttentionShape, Regime], list[Best]]":
    """Return the winners that every place has for this kind of GPU, by shape and regime.

    Raises:
        NoFeasibleConfigError: there is none that all have.
    """
    from blocktune.db.records.records import of_attention
    from blocktune.db.sources import read_results
    from blocktune.kernels.values.config import Origin
    from blocktune.tuner.upkeep.is_current import is_live

    found: dict[tuple[AttentionShape, Regime], list[Best]] = {}
    for place in places:
        for best in of_attention(read_results(place, trials=False).bests):
            if best.device.key == device.key and best.origin is Origin.MEASURED and is_live(best):
                found.setdefault((best.shape, best.environment.regime), []).append(best)
    common = {key: bests for key, bests in found.items() if len(bests) == len(places)}
    for shape, regime in found.keys() - common.keys():
        note(f"left out: {shape.label}, {regime}, which only {len(found[shape, regime])} of {len(places)} have")
    if not common:
        raise NoFeasibleConfigError(
            f"The {len(places)} stores have no shape in common that was measured on {device.name} under one regime "
            "and with the present kernels. Make the searches by `tune run --db`."
        )
    return common


def _rematch(
    shape: "AttentionShape", regime: "Regime", winners: "Sequence[Best]", device: "DeviceSpec"
) -> dict[str, Any]:
    from blocktune.kernels.registry import competing
    from blocktune.tuner.candidates.starting_configs import find_contenders
    from blocktune.tuner.measure.locked_runner import gpu_runner
    from blocktune.tuner.measure.measurement import Terms
    from blocktune.tuner.measure.telemetry import GpuMonitor
    from blocktune.tuner.upkeep.agreement import rematch

    note(f"{shape.label}, {regime}: winners of {len(winners)} searches")
    default = find_contenders(shape, device, competing(), ()).default
    monitor = GpuMonitor(device.uuid, own_processes=1)
    with gpu_runner(shape, device, monitor, note, Terms(regime=regime, race=False)) as runner:
        found = rematch([best.config for best in winners], default, runner)
    return {"label": shape.label, "shape": shape.to_json(), "regime": str(regime)} | found.to_json()
