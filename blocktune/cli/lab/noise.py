"""`tune lab noise`: how much the times of this GPU vary, and what of two equal configs finals would say."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.lab.noise_file import NOISE_COLUMNS, noise_cells, noise_notes
from blocktune.cli.output.json_files import writable, write_atomically
from blocktune.cli.output.render import note, print_json, print_table, say
from blocktune.cli.shared.options import AsJson, Database, ShapeFlags, with_shape_flags

if TYPE_CHECKING:
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.kernels.values.config import KernelConfig
    from blocktune.kernels.values.shape import AttentionShape


@with_shape_flags
def noise(
    flags: ShapeFlags,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.5, max=600, help="Minutes to run, compiling included.")
    ] = 3.0,
    out: Annotated[
        Path | None, typer.Option("--out", callback=writable, help="Write the JSON object to this file too.")
    ] = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Repeat a search's measurements for minutes, to see the noise.

    They run in bursts and under sustained load in turns. The configs are the stored winner, or the default, and three
    near it. The command shows how much repeated measurements and finals of one config differ, how they drift, whether
    both regimes rank the configs alike, and how often finals of a config against itself have a winner.

    \b
    tune lab noise --seq 8192 --dim 64
    tune lab noise --seq 8192 --dim 64 --minutes 1
    tune lab noise --seq 8192 --dim 64 --out results/h200.noise.json
    """
    shape = flags.shape()  # before heavy imports, so that wrong use fails at once
    assumed = flags.assumed()
    if assumed:
        note(assumed)

    from blocktune.kernels.hardware.device import current_device
    from blocktune.tuner.lab.noise_document import noise_document
    from blocktune.tuner.measure.telemetry import gpu_lock

    device = current_device()
    configs = _configs(shape, device, db)
    with gpu_lock(device.uuid, note):
        document = noise_document(shape, device, configs, 60 * minutes, on_progress=note)
    if out is not None:
        write_atomically(out, json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n")
    if as_json:
        print_json(document)
        return
    rows = [noise_cells(name, row) for name, row in document["summary"]["regimes"].items()]
    print_table(NOISE_COLUMNS, rows, title=f"{shape.label} on {device.name}")
    say("\n" + "\n".join(noise_notes(document)))


def _configs(shape: "AttentionShape", device: "DeviceSpec", db: str | None) -> "tuple[KernelConfig, ...]":
    """Return the config that is studied, then those that may be studied with it."""
    from blocktune.db.store import ResultStore
    from blocktune.kernels.registry import competing
    from blocktune.kernels.values.config import Origin
    from blocktune.tuner.candidates.starting_configs import find_contenders
    from blocktune.tuner.lab.noise import near_configs
    from blocktune.tuner.upkeep.is_current import is_live

    contenders = find_contenders(shape, device, competing(), ())
    with ResultStore.open(db) as store:
        best = store.best(device, shape)
        live = [trial for trial in store.trials(device, shape) if is_live(trial)]
    tuned = best is not None and best.origin is Origin.MEASURED and is_live(best)
    config = best.config if best is not None and tuned else contenders.default
    return near_configs(config, live, contenders.space.feasible)
