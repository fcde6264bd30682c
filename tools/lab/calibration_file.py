"""The file of `python -m tools.lab.calibrate --out`, and the table that is made of it."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocktune.cli.lab.replay_file import model_cells
from blocktune.cli.output.json_files import read_document

if TYPE_CHECKING:
    from blocktune.tuner.lab.sweep_file import Sweep

SUFFIX = ".calibration.json"
"""How the names of such files in results/ end."""

FORMAT, SCHEMA = "blocktune-calibration", 1

COLUMNS = ("judged on head dimension", "constants", "shapes", "rank correlation", "first choice", "best of 8")
CONSTANTS = {"fitted": "fitted to the others", "as_it_is": "as they are"}
NOT_FITTED = (
    "Head dimensions were not left out yet: `python -m tools.lab.calibrate --out "
    "results/DEVICE.calibration.json` does it, `make results` shows it."
)


def calibration_document(sweeps: "Sequence[Sweep]", judged: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the document of a calibration.

    Args:
        sweeps: what the constants were fitted to.
        judged: by head dimension that was left out, the rows of the fitted constants and of the present ones.
    """
    from blocktune.tuner.measure.environment import source_commit

    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "commit": source_commit(),
        "sweeps": sorted(sweep.label for sweep in sweeps),
        "rows": list(judged),
    }


def block(path: Path) -> str:
    """Return the table of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return NOT_FITTED
    document = read_document(path, "calibration", FORMAT, SCHEMA)
    lines = [_line(COLUMNS), _line(["---", "---", *["---:"] * (len(COLUMNS) - 2)])]
    for judged in document["rows"]:
        for name, words in CONSTANTS.items():
            lines += [
                _line([f"{judged['head_dim']}, {row['kind']}", words, *model_cells(row)[1:5]])
                for row in judged[name]
                if row["kernel"] is None
            ]
    caption = (
        f"{len(document['sweeps'])} sweeps, every config, all kernels together: medians over the shapes, and the worst "
        "in brackets. How much slower the model's choice and the best of its first eight are than the fastest:"
    )
    return f"{caption}\n\n" + "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
