"""Whether the passes of tests/support/library_steps.py reach the libraries' kernels, without a GPU.

python -m tests.support.programs.library_check [STEP ...]

Launches do nothing. Every kernel that is reached is specialised for each of its configs, and one config is compiled for
an H200, which compares the arguments with the kernel's signature. Prints a line of JSON for each step.
"""

import json
import sys
from typing import Any

from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.tuned.kernel import TunedKernel
from blocktune.tuner.jitted.compile_ahead import compile_here
from blocktune.tuner.jitted.specialization import specialization_of
from tests.support import library_steps
from tests.support.fake_triton import Launch
from tests.support.library_calls import as_on_an_h200, handed_over

CC = device_named("h200").limits.cc


def routed(launch: Launch) -> None:
    """Do what liger's router does as far as the host asks for it: say how many tiles of 64 tokens there are."""
    if launch.name == "_moe_router_prefix_sum_kernel":
        launch.arguments["expert_tile_offset_ptr"].fill_(8)


def checked(step: str) -> dict[str, Any]:
    """Return what a step reaches: the configs of each kernel, how many of them can be compiled elsewhere, and how the
    compile of one ended."""
    found: dict[str, Any] = {}

    def on_call(kernel: TunedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = kernel.call_of(args, kwargs)
        specialised = {config: specialization_of(call, config, CC) for config in call.configs}
        made = [each for each in specialised.values() if each is not None]
        ended = compile_here(made[0].spec, CC) if made else None
        found[f"{kernel.name} {call.problem.label}"] = {
            "configs": len(call.configs),
            "specialised": len(made),
            "travel": sum(each.document is not None for each in made),
            "compiled": None if ended is None else str(ended.outcome),
            "error": "" if ended is None or ended.outcome is Outcome.OK else ended.error[-300:],
        }
        kernel.tuner.cache[kernel._stock_key(args, kwargs)] = next(iter(call.configs.values()))  # nothing is measured

    with handed_over(on_call):
        library_steps.STEPS[step]("cpu")
    return {"step": step, "kernels": found}


def main(steps: list[str]) -> None:
    library_steps.TOKENS, library_steps.HEADS = 256, 2  # the processor makes the data
    with as_on_an_h200() as gpu:
        gpu.effect = routed
        for step in steps or library_steps.STEPS:
            sys.stdout.write(json.dumps(checked(step)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
