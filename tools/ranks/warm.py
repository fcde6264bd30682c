"""Compiles the kernels of tools/ranks/bench.py into Triton's cache: warm RANKS [PROCESSES]

Ranks that compile do so one kernel after the other, all of them the same ones.
"""

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import inf

from blocktune import attention
from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.device import current_device, device_named
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.parallel.block_attention import ScoreOptions
from blocktune.runtime.parallel.plan.blocks import Sight
from blocktune.tuner.compile.compiler import compile_key, compiled_code
from tests.support.ranks.problems import DIM, check_cases, problem, shapes_of

LENGTHS = (1 << 16, 1 << 18, 1 << 20)
WINDOW, WINDOW_LENGTH = 4096, 1 << 16


def shapes(ranks: int) -> set[AttentionShape]:
    """Return the shapes of all blocks that the bench computes on 1, 2 or all ranks."""
    plain, found = ScoreOptions(DIM**-0.5, 0.0, deterministic=False), set[AttentionShape]()
    for size in {1, 2, ranks}:
        for length in LENGTHS:
            found |= shapes_of(problem(length, size), plain)
        for layout in ("zigzag", "contiguous"):
            found |= shapes_of(problem(WINDOW_LENGTH * size, size, WINDOW, layout), plain)
    for _, case in check_cases(ranks, "cuda"):
        sight = Sight(
            inf if case.window[0] < 0 else case.window[0], 0 if case.causal else inf, case.packed or (0, case.seqlen)
        )
        heads, heads_kv = case.heads
        own = replace(problem(case.seqlen, ranks), num_heads=heads, num_heads_kv=heads_kv, sight=sight)
        found |= shapes_of(own, replace(plain, softcap=case.softcap, deterministic=case.deterministic))
    return found


def specs(ranks: int) -> dict[str, CompileSpec]:
    """Return what is compiled for them, by the name of the code."""
    device = device_named(os.environ["DEVICE"]) if "DEVICE" in os.environ else current_device()
    found: dict[str, CompileSpec] = {}
    for shape in shapes(ranks):
        config = attention.explain(shape, device=device).config
        if config is not None:
            kernel = get_kernel(config.kernel)
            for spec in (kernel.compile_spec(config, shape), *kernel.further_specs(config, shape)):
                found[compile_key(spec, device.limits.cc)] = spec
    return found


def compile_one(key: str) -> float:
    """Compile one of them, and return the seconds that it took."""
    begin = time.monotonic()
    compiled_code(KNOWN[key], (9, 0))
    return time.monotonic() - begin


KNOWN: dict[str, CompileSpec] = {}


def main(ranks: int, processes: int) -> None:
    begin = time.monotonic()
    KNOWN.update(specs(ranks))
    with ProcessPoolExecutor(min(processes, len(KNOWN))) as pool:  # forked: they know what there is
        spent = list(pool.map(compile_one, KNOWN))
    sys.stdout.write(f"{len(KNOWN)} kernels, {sum(spent):.0f} s of compiling in {time.monotonic() - begin:.0f} s\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else os.cpu_count() or 1)
