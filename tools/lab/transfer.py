"""The transfer of winners to another device: `python -m tools.lab.transfer h100 h200 --out FILE`.

Of each of two devices it reads winners (blocktune/results/NAME.json), finals of both winners there, if they met
(NAME-elsewhere.rematch.json, which `python -m tools.bench.winners_elsewhere` writes on such a GPU), and
recorded sweeps. It needs no GPU.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktune.cli.lab.noise_file import REMATCH_FORMAT
from blocktune.cli.lab.noise_file import SCHEMA as REMATCH_SCHEMA
from blocktune.cli.lab.untuned import DEFAULT_PLACE, DENSE_PLACE
from blocktune.cli.output.json_files import read_document, write_atomically
from blocktune.cli.output.render import note
from blocktune.db.records.records import Best, of_attention
from blocktune.db.sources import read_results
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.cost.constants import CONSTANTS, CostConstants
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep, sweep_files
from blocktune.tuner.lab.untuned import UntunedStudy
from tools.lab.calibration import calibrate
from tools.lab.transfer_file import FORMAT, SCHEMA
from tools.lab.transfer_losses import RoundsOfShape, decisions, shared_shapes
from tools.pages.recorded.places import place_of

FITTED_TO = "h200"
"""The device whose sweeps the model's constants were fitted to."""

SEARCHED_PLACE = Path("results/h100-sweeps")
"""What searches of an H100 measured, which is the most promising part of every space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two devices: its name, winners that today's kernels take, sweeps, and finals of both winners there."""

    name: str
    bests: tuple[Best, ...]
    sweeps: tuple[Sweep, ...]
    rounds: RoundsOfShape

    @property
    def study(self) -> UntunedStudy:
        return UntunedStudy(self.sweeps, self.bests)


def side(name: str, folder: Path) -> Side:
    """Return what results/ holds of a device."""
    key = device_named(name).key
    winners = read_results(place_of(f"{name}.json", folder), trials=False).bests
    places = [folder / place.name for place in (DEFAULT_PLACE, DENSE_PLACE, SEARCHED_PLACE)]
    sweeps = [load_sweep(path) for path in sweep_files(places)]
    return Side(
        name=name,
        bests=tuple(filter(still_runs, of_attention(winners))),
        sweeps=tuple(sweep for sweep in sweeps if sweep.device.key == key),
        rounds=rematch_ratios(folder / f"{name}-elsewhere.rematch.json"),
    )


def still_runs(best: Best) -> bool:
    """Return whether today's kernel takes the config for the shape, whatever source it was measured with."""
    kernel, shape, limits = KERNELS.get(best.config.kernel), best.shape, best.device.limits
    if kernel is None or kernel.unsupported(shape, limits) is not None:
        return False
    return not kernel.violations(best.config, shape, limits)


def rematch_ratios(path: Path) -> RoundsOfShape:
    """Return the times over the default's of a rematch; none where there was none."""
    if not path.exists():
        return {}
    document = read_document(path, "results", REMATCH_FORMAT, REMATCH_SCHEMA)
    return {
        row["label"]: {
            KernelConfig.from_json(entry["config"]): entry["over_default"]
            for entry in row["winners"]
            if entry["over_default"] is not None
        }
        for row in document["rows"]
    }


def compare_devices(here: Side, there: Side, fitted: Mapping[str, CostConstants]) -> dict[str, Any]:
    """Return what winners and decisions of the one device lose on the other."""
    note(f"{there.name} on {here.name}: {len(here.sweeps)} sweeps")
    return {
        "device": here.name,
        "other": there.name,
        "winners": [one.to_json() for one in shared_shapes(here.bests, there.bests, here.rounds)],
        "decisions": [one.to_json() for one in decisions(here.study, there.study, here.sweeps, fitted)],
    }


def main() -> None:
    """Compare two devices both ways and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs=2, metavar="NAME", help="Two devices that results/ knows: h100 h200.")
    parser.add_argument("--results", type=Path, default=DEFAULT_PLACE.parent, help="The folder of results.")
    parser.add_argument("--out", type=Path, required=True, help="The JSON file.")
    given = parser.parse_args()
    one, other = (side(name, given.results) for name in given.names)
    fitted = {
        each.name: CONSTANTS if each.name == FITTED_TO else calibrate(each.sweeps, start=CONSTANTS)
        for each in (one, other)
    }
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "ways": [compare_devices(one, other, fitted), compare_devices(other, one, fitted)],
    }
    write_atomically(given.out, json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
