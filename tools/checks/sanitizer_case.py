"""Launches the small cases of one kernel, for a memory or race checker to watch:

    compute-sanitizer --tool memcheck python3 -P tools/checks/sanitizer_case.py --kernel flash_fwd

Every kernel of the registry has cases, historical ones included. A case is the kernel's default config, launched as the
dispatcher launches it, into memory full of NaN. One JSON object a line on standard output says what ran and what is
wrong with it. Nothing is compared with a reference, so that no kernel of another library runs under the checker.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import KERNELS, get_kernel
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.correctness.features import empty_lse, empty_out
from blocktune.tuner.correctness.forward import softmax_scale
from blocktune.tuner.correctness.inputs import CheckInputs, make_inputs
from blocktune.tuner.correctness.small_shapes import small_shapes


def run(kernel: AttentionKernel, shape: AttentionShape, limits: ComputeLimits, device: str) -> dict[str, Any]:
    """Launch the default config once, and say what ran and what is wrong with the result."""
    config = kernel.default_config(shape, limits)
    launch, inputs = kernel.bind(config, shape), make_inputs(shape, device=device, seed=0)
    arguments, results = _arguments(inputs)
    for result in results:
        result.fill_(float("nan"))
    launch(*arguments, softmax_scale(shape), *((inputs.extras,) if shape.features else ()))
    if device == "cuda":
        torch.cuda.synchronize()
    bad = sum(result.numel() - int(torch.isfinite(result.float()).sum()) for result in results)
    problem = f"{bad} of {sum(result.numel() for result in results)} values are not finite" if bad else ""
    return {"kernel": kernel.name, "config": config.label, "shape": shape.label, "problem": problem}


def _arguments(inputs: CheckInputs) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What a launch gets ahead of the scale, and which of it the launch writes and must leave finite."""
    q, k, v, out = inputs.q, inputs.k, inputs.v, empty_out(inputs)
    if inputs.shape.direction is Direction.FORWARD:
        return (q, k, v, out, empty_lse(inputs)), (out,)
    lse = empty_lse(inputs).fill_(math.log(inputs.shape.seqlen_k))
    out.normal_()
    gradients = tuple(torch.empty_like(tensor) for tensor in (q, k, v))
    return (q, k, v, out, lse, torch.randn_like(out), *gradients), gradients


def main(arguments: Sequence[str]) -> int:
    """Run the cases of the kernels that are named. Returns 1 if one left values that are not finite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="append", required=True, choices=list(KERNELS), help="may be repeated")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: under TRITON_INTERPRET=1")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N cases of a kernel")
    given = parser.parse_args(arguments)
    capability = torch.cuda.get_device_capability() if given.device == "cuda" else (8, 0)
    limits, problems = limits_for(capability), 0
    for kernel in map(get_kernel, given.kernel):
        for shape in small_shapes(kernel, limits, given.dtype)[: given.first]:
            row = run(kernel, shape, limits, given.device)
            print(json.dumps(row), flush=True)
            problems += bool(row["problem"])
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
