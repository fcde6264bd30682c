"""Answers what winners compile to: a line of JSON for each that standard input names, [winner, "9.0"].

`same_code` starts it with the sources of another revision on the path, so it imports what every revision has.
"""

import json
import sys
from typing import Any

from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.compiler import compiled_code
from blocktune.tuner.compile.cubin import code_sha256

Winner = dict[str, Any]
Code = list[list[Any]]
"""Hash of the instructions, bytes of shared memory and warps of every launch."""


def source_and_code(winner: Winner, cc: tuple[int, int]) -> tuple[str, Code]:
    """Return the hash of the kernel's source, and what the winner's config compiles to."""
    config, shape = KernelConfig.from_json(winner["config"]), AttentionShape.from_json(winner["shape"])
    kernel = get_kernel(config.kernel)
    specs = (*kernel.further_specs(config, shape), kernel.compile_spec(config, shape))
    compiled = [compiled_code(spec, cc) for spec in specs]
    code = [[code_sha256(one.asm["cubin"]), one.metadata.shared, one.metadata.num_warps] for one in compiled]
    return kernel.source_hash, code


def main() -> None:
    for line in sys.stdin:
        winner, cc = json.loads(line)
        major, _, minor = cc.partition(".")
        print(json.dumps(source_and_code(winner, (int(major), int(minor)))), flush=True)


if __name__ == "__main__":
    main()
