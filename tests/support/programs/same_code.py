"""Gives shipped winners the hash of today's kernel source where it compiles to the machine code that was measured.

    git worktree add ../before REVISION
    PYTHONPATH=. python -P tests/support/programs/same_code.py results/h200.json ../before

What was measured is machine code. A change of the source that leaves the instructions of a config as they were, such as
a new feature behind a constant, takes nothing from the measurement. Both sources are compiled, the earlier one by a
process of its own, and instructions, shared memory and warps of every launch are compared. Winners that compile to
something else keep the earlier hash: `tune verify` times them again on a GPU.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.compiler import compiled_code
from blocktune.tuner.compile.cubin import code_sha256

LIST = "--list"

Winner = dict[str, Any]
Code = list[list[Any]]
"""Hash of the instructions, bytes of shared memory and warps of every launch."""

Ask = Callable[[Winner], tuple[str, Code]]


def source_and_code(winner: Winner, cc: tuple[int, int]) -> tuple[str, Code]:
    """Return the hash of the kernel's source in this tree, and what the winner's config compiles to."""
    config, shape = KernelConfig.from_json(winner["config"]), AttentionShape.from_json(winner["shape"])
    kernel = get_kernel(config.kernel)
    specs = (*kernel.further_specs(config, shape), kernel.compile_spec(config, shape))
    compiled = [compiled_code(spec, cc) for spec in specs]
    code = [[code_sha256(one.asm["cubin"]), one.metadata.shared, one.metadata.num_warps] for one in compiled]
    return kernel.source_hash, code


def answer() -> None:
    """Print a line for each winner that standard input names by line: what this tree makes of it."""
    for line in sys.stdin:
        winner, cc = json.loads(line)
        print(json.dumps(source_and_code(winner, tuple(cc))), flush=True)


@contextmanager
def asking(tree: Path, cc: list[int]) -> Iterator[Ask]:
    """Yield a function that asks a process of the sources in another folder."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), LIST]
    environment = os.environ | {"PYTHONPATH": str(tree.resolve())}
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


def carry(winners: list[Winner], cc: list[int], ask: Ask) -> dict[str, int]:
    """Give winners today's hash where the code is the same; return how many had which end."""
    ends = dict.fromkeys(("present", "same code", "other code", "of neither source"), 0)
    for winner in winners:
        end = _end(winner, cc, ask)
        ends[end] += 1
        label = AttentionShape.from_json(winner["shape"]).label
        print(f"{end:18} {KernelConfig.from_json(winner['config']).label}  {label}", flush=True)
    return ends


def _end(winner: Winner, cc: list[int], ask: Ask) -> str:
    present = get_kernel(winner["config"]["kernel"]).source_hash
    if winner["kernel_hash"] == present:
        return "present"
    measured, code = ask(winner)
    if winner["kernel_hash"] != measured:
        return "of neither source"
    if source_and_code(winner, (cc[0], cc[1]))[1] != code:
        return "other code"
    winner["kernel_hash"] = present
    winner.pop("checksum", None)  # of the row as it was
    return "same code"


def main(record: Path, before: Path) -> None:
    document = json.loads(record.read_text())
    major, _, minor = str(document["device"]["cc"]).partition(".")
    cc = [int(major), int(minor)]
    with asking(before, cc) as ask:
        ends = carry(document["bests"], cc, ask)
    record.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    print(json.dumps(ends))


if __name__ == "__main__":
    if sys.argv[1:] == [LIST]:
        answer()
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
