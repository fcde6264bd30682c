"""Fits the cost model's constants to recorded sweeps: `python -m tools.lab.calibrate [PLACE]... [--out FILE]`.

Every head dimension is left out once: the constants are fitted to the others, from a start that knows no sweep, and
judged on the one left out, next to the present constants. Then they are fitted to all. Nothing is changed: what is
better is for a person to judge, round and write down in tuner/cost/constants.py.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blocktune.cli.lab.replay_file import MODEL_COLUMNS, model_cells
from blocktune.cli.lab.untuned import DEFAULT_PLACE
from blocktune.cli.output.json_files import write_atomically
from blocktune.cli.output.render import note, print_table
from blocktune.tuner.cost.constants import CONSTANTS, CostConstants
from blocktune.tuner.lab.replay import Replay
from blocktune.tuner.lab.replay_report import model_rows
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep, sweep_files
from tools.lab.calibration import BOUNDS, calibrate
from tools.lab.calibration_file import calibration_document


def _middle_values() -> CostConstants:
    """Return the geometric middle of every bound."""
    return CostConstants(**{name: (low * high) ** 0.5 for name, (low, high) in BOUNDS.items()})


def _judge(title: str, sweeps: Sequence[Sweep], constants: CostConstants) -> list[dict[str, Any]]:
    """Print how the model ranks with these constants, and return the rows."""
    rows = model_rows(Replay(sweep, constants) for sweep in sweeps)
    print_table(MODEL_COLUMNS, (model_cells(row) for row in rows), title=f"\n{title}")
    return rows


def _hold_out(sweeps: Sequence[Sweep], dim: int) -> dict[str, Any]:
    """Return how the model ranks the sweeps of one head dimension, fitted to the others and as it is."""
    held_out = [sweep for sweep in sweeps if sweep.shape.head_dim == dim]
    others = [sweep for sweep in sweeps if sweep.shape.head_dim != dim]
    note(f"fitting to {len(others)} sweeps without head dimension {dim}")
    fitted = calibrate(others, start=_middle_values(), on_round=lambda misfit: note(f"misfit {misfit:.4f}"))
    return {
        "head_dim": dim,
        "fitted": _judge(f"head dimension {dim}, fitted to the others", held_out, fitted),
        "as_it_is": _judge(f"head dimension {dim}, as it is", held_out, CONSTANTS),
    }


def main() -> None:
    """Print the model's rows as it is, with every head dimension left out, and the constants fitted to all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", type=Path, nargs="*", default=[DEFAULT_PLACE], help="Sweeps, or folders of them.")
    parser.add_argument("--out", type=Path, help="Keep how the model ranks what was left out: DEVICE.calibration.json.")
    given = parser.parse_args()
    sweeps = [load_sweep(path) for path in sweep_files(given.places)]
    _judge("as it is, all sweeps", sweeps, CONSTANTS)
    dims = sorted({sweep.shape.head_dim for sweep in sweeps})
    judged = [_hold_out(sweeps, dim) for dim in dims if len(dims) > 1]
    if given.out is not None:
        document = calibration_document(sweeps, judged)
        write_atomically(given.out, json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")
    note(f"fitting to all {len(sweeps)} sweeps")
    fitted = calibrate(sweeps, on_round=lambda misfit: note(f"misfit {misfit:.4f}"))
    rows = [(name, f"{getattr(CONSTANTS, name):g}", f"{getattr(fitted, name):.4g}") for name in BOUNDS]
    print_table(("constant", "as it is", "fitted"), rows)


if __name__ == "__main__":
    main()
