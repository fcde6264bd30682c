"""Checks `generate_batch` of transformers and times blocks of diffusers on a GPU, in a minute or two.

python -m tools.hugging_face --out results/DEVICE.hugging-face.json
"""

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
import triton

from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.values.errors import NoDeviceError
from tools.end_to_end.rows import Lab
from tools.hugging_face.batches import FAMILIES, Workload, batch_row
from tools.hugging_face.blocks import SIZES, block_rows, import_diffusers

ROUNDS, STEPS = 5, 3
TIMED = "llama"


def main() -> None:
    """Measure all rows, print each as it is there, and write them down; end with 1 where a text is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="DEVICE.hugging-face.json")
    parser.add_argument("--only", choices=["blocks", "batches"], help="One of the two parts.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"Rounds of turns.  [default: {ROUNDS}]")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"Steps of a turn.  [default: {STEPS}]")
    arguments = parser.parse_args()
    try:
        device = current_device().name
    except NoDeviceError as error:
        sys.exit(f"error: {error}")
    lab = Lab(torch.device("cuda"), torch.bfloat16, arguments.rounds, arguments.steps)
    document: dict[str, Any] = {
        "device": device,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "packages": {package.__name__: package.__version__ for package in (torch, triton, transformers)},
    }
    if arguments.only != "batches":
        document["packages"]["diffusers"] = import_diffusers()
        document["blocks"] = [printed(asdict(row)) for row in block_rows(lab, SIZES)]
    if arguments.only != "blocks":
        rows = (batch_row(each, Workload(), lab.device, lab.dtype, is_timed=each == TIMED) for each in FAMILIES)
        document["batches"] = [printed(asdict(row)) for row in rows]
    arguments.out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    wrong = [row["family"] for row in document.get("batches", ()) if row["wrong"]]
    if wrong:
        sys.exit(f"error: texts of {', '.join(wrong)} are not those of eager attention")


def printed(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row and return it."""
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
