"""Gives shipped winners the hash of today's kernel source where it compiles to the machine code that was measured.

    git worktree add ../before REVISION
    PYTHONPATH=. python -P -m tools.checks.same_code blocktune/results/h200.json ../before

What was measured is machine code. A change of the source often leaves the instructions of a config as they were, such
as a new feature that a constant leaves out, and takes nothing from the measurement then. Both sources are compiled,
the earlier one by a process of its own, and instructions, shared memory and warps of every launch are compared.
Winners that compile to something else keep the earlier hash: `tune verify` times them again on a GPU.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blocktune.cli.output.json_files import write_atomically
from blocktune.kernels.files.checksums import CHECKSUM
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.store_reader.export_file import exported_checksum
from tools.checks import compiled_winners
from tools.checks.compiled_winners import Code, Winner, source_and_code

Ask = Callable[[Winner], tuple[str, Code]]


@contextmanager
def asking(tree: Path, cc: str) -> Iterator[Ask]:
    """Yield a function that asks a process of the sources in another folder."""
    command = [sys.executable, "-P", str(compiled_winners.__file__)]
    path = os.pathsep.join(filter(None, (str(tree.resolve()), os.environ.get("PYTHONPATH"))))  # it may name a Triton
    environment = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def ask(winner: Winner) -> tuple[str, Code]:
            questions.write(json.dumps([winner, cc]) + "\n")
            questions.flush()
            source, code = json.loads(answers.readline())
            return source, code

        yield ask
        questions.close()


def carry(document: dict[str, Any], ask: Ask) -> dict[str, int]:
    """Give winners of a record today's hash where the code is the same; return how many had which end."""
    device = DeviceSpec.from_json(document["device"])
    ends = dict.fromkeys(("present", "same code", "other code", "of neither source"), 0)
    for winner in document["bests"]:
        end = _end(winner, device.limits.cc, ask)
        if end == "same code":
            winner["kernel_hash"] = get_kernel(winner["config"]["kernel"]).source_hash
            if CHECKSUM in winner:
                environment = document["environments"][winner["environment"]]
                winner[CHECKSUM] = exported_checksum(winner, device.key, environment)
        ends[end] += 1
        label = AttentionShape.from_json(winner["shape"]).label
        print(f"{end:18} {KernelConfig.from_json(winner['config']).label}  {label}", flush=True)
    return ends


def _end(winner: Winner, cc: tuple[int, int], ask: Ask) -> str:
    if winner["kernel_hash"] == get_kernel(winner["config"]["kernel"]).source_hash:
        return "present"
    measured, code = ask(winner)
    if winner["kernel_hash"] != measured:
        return "of neither source"
    return "same code" if source_and_code(winner, cc)[1] == code else "other code"


def main(record: Path, before: Path) -> None:
    document = json.loads(record.read_text())
    with asking(before, document["device"]["cc"]) as ask:
        ends = carry(document, ask)
    write_atomically(record, json.dumps(document, indent=1, sort_keys=True) + "\n")
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
