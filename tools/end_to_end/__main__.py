"""Times training and decoding steps on a GPU: `python -m tools.end_to_end --out results/DEVICE.models.json`."""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.values.errors import NoDeviceError
from blocktune.tuner.measure.environment import source_commit
from tools.differential.runs.report import environment
from tools.end_to_end.gpt import GptSizes
from tools.end_to_end.llama import LlamaSizes
from tools.end_to_end.rows import Lab, rows
from tools.pages.recorded.model_tables import FORMAT, SCHEMA

ROUNDS, STEPS = 21, 16


def main() -> None:
    """Measure all rows, print each as it is there, and write them down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="DEVICE.models.json")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"Rounds of turns.  [default: {ROUNDS}]")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"Steps of a turn.  [default: {STEPS}]")
    arguments = parser.parse_args()
    try:
        device = current_device().name
    except NoDeviceError as error:
        sys.exit(f"error: {error}")
    lab = Lab(torch.device("cuda"), torch.bfloat16, arguments.rounds, arguments.steps)
    found = []
    for row in rows(lab, GptSizes(), LlamaSizes()):
        found.append(row.to_json())
        print(json.dumps(found[-1]), flush=True)
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "device": device,
        "environment": environment(),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "rounds": lab.rounds,
        "steps": lab.steps,
        "rows": found,
    }
    arguments.out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
