"""Fits the cost model's constants to recorded sweeps: `python -m blocktune.cli.lab.calibrate [PLACE]...`.

Every head dimension is left out once: the constants are fitted to the others, from a start that knows no sweep, and
judged on the one left out, next to the present constants. Then they are fitted to all. Nothing is changed: what is
better is for a person to judge, round and write down in tuner/cost/constants.py.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from blocktune.cli.lab.replay_file import MODEL_COLUMNS, model_cells
from blocktune.cli.lab.untuned import DEFAULT_PLACE
from blocktune.cli.shared.render import note, print_table
from blocktune.tuner.cost.constants import CONSTANTS, CostConstants
from blocktune.tuner.lab.calibration import BOUNDS, calibrate
from blocktune.tuner.lab.replay import Replay
from blocktune.tuner.lab.replay_report import model_rows
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep, sweep_files


def _unfitted() -> CostConstants:
    """Return the geometric middle of every bound."""
    return CostConstants(**{name: (low * high) ** 0.5 for name, (low, high) in BOUNDS.items()})


def _judge(title: str, sweeps: Sequence[Sweep], constants: CostConstants) -> None:
    rows = model_rows(Replay(sweep, constants) for sweep in sweeps)
    print_table(MODEL_COLUMNS, (model_cells(row) for row in rows), title=f"\n{title}")


def main() -> None:
    """Print the model's rows as it is, with every head dimension left out, and the constants fitted to all."""
    places = [Path(word) for word in sys.argv[1:]] or [DEFAULT_PLACE]
    sweeps = [load_sweep(path) for path in sweep_files(places)]
    _judge("as it is, all sweeps", sweeps, CONSTANTS)
    for dim in sorted({sweep.shape.head_dim for sweep in sweeps}):
        held_out = [sweep for sweep in sweeps if sweep.shape.head_dim == dim]
        others = [sweep for sweep in sweeps if sweep.shape.head_dim != dim]
        if others:
            note(f"fitting to {len(others)} sweeps without head dimension {dim}")
            fitted = calibrate(others, start=_unfitted(), on_round=lambda misfit: note(f"misfit {misfit:.4f}"))
            _judge(f"head dimension {dim}, fitted to the others", held_out, fitted)
            _judge(f"head dimension {dim}, as it is", held_out, CONSTANTS)
    note(f"fitting to all {len(sweeps)} sweeps")
    fitted = calibrate(sweeps, on_round=lambda misfit: note(f"misfit {misfit:.4f}"))
    rows = [(name, f"{getattr(CONSTANTS, name):g}", f"{getattr(fitted, name):.4g}") for name in BOUNDS]
    print_table(("constant", "as it is", "fitted"), rows)


if __name__ == "__main__":
    main()
