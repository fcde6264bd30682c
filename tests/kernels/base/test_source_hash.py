"""A kernel's source hash is its own: the same in every process, whatever was hashed before it."""

import json
import os
import subprocess
import sys

from blocktune.kernels.registry import KERNELS

# Triton 3.6 leaves a module-level tl.constexpr out of a hash if another kernel's hash has already merged it. Code that
# was compiled ahead, and results stored under the hash, would then not be found again.
PROGRAM = """
import json, sys
from blocktune.kernels.registry import KERNELS
print(json.dumps({name: KERNELS[name].source_hash for name in sys.argv[1:]}))
"""


def hashes(*names: str) -> dict[str, str]:
    """The source hashes that a fresh process computes in this order."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", PROGRAM, *names]
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    result: dict[str, str] = json.loads(process.stdout)
    return result


def test_source_hashes_do_not_depend_on_the_order() -> None:
    forwards = hashes(*KERNELS)
    assert hashes(*reversed(KERNELS)) == forwards
    assert {len(value) for value in forwards.values()} == {16}
    assert len(set(forwards.values())) == len(KERNELS)


def test_source_hash_of_a_kernel_alone_is_the_same() -> None:
    last = list(KERNELS)[-1]
    assert hashes(last)[last] == hashes(*KERNELS)[last]
