"""Whether the passes of tests/support/libraries/steps.py reach the libraries' kernels, without a GPU.

python -m tools.libraries.check [--ahead WORKERS] [STEP ...]

Launches do nothing. Every kernel that is reached is specialised for each of its configs, and one config is compiled for
an H200, which compares the arguments with the kernel's signature. Prints a line of JSON for each step.

With --ahead all configs are compiled by so many workers, at real sizes: a bench that follows finds the code of all
passes in Triton's cache. One that runs meanwhile has launches that are late, and races with too few rounds.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from fnmatch import fnmatch
from typing import Any

from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.autotuned.kernel import TunedKernel
from blocktune.runtime.autotuned.stock_tuner import stock_key
from blocktune.tuner.compile.compiler import compile_here, has_code
from blocktune.tuner.compile_server.client import ServerClient
from blocktune.tuner.compile_server.compile_ahead import TIMEOUT_SECONDS
from blocktune.tuner.offline.specialization import Specialization, specialization_of
from tests.support.fakes.fake_triton import Launch
from tests.support.libraries import steps as library_steps
from tests.support.libraries.calls import as_on_an_h200, handed_over

CC = device_named("h200").limits.cc


def route(launch: Launch) -> None:
    """Do what liger's router does as far as the host asks for it: say how many tiles of 64 tokens there are."""
    if launch.name == "_moe_router_prefix_sum_kernel":
        launch.arguments["expert_tile_offset_ptr"].fill_(8)


def check_step(step: str) -> dict[str, Any]:
    """Return what a step reaches: the configs of each kernel, how many of them can be compiled elsewhere, and how the
    compile of one ended."""
    found: dict[str, Any] = {}

    def on_call(kernel: TunedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = kernel.call_of(args, kwargs)
        made = specialise(kernel, args, kwargs)
        ended = compile_here(made[0].spec, CC) if made else None
        found[f"{kernel.name} {call.problem.label}"] = {
            "configs": len(call.configs),
            "specialised": len(made),
            "travel": sum(each.document is not None for each in made),
            "compiled": None if ended is None else str(ended.outcome),
            "error": "" if ended is None or ended.outcome is Outcome.OK else ended.error[-300:],
        }

    with handed_over(on_call):
        library_steps.STEPS[step]("cpu")
    return {"step": step, "kernels": found}


def specialise(kernel: TunedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Specialization]:
    """Return what the configs of a call compile, and let it be launched with the first one, without a measurement."""
    call = kernel.call_of(args, kwargs)
    found = [specialization_of(call, config, CC) for config in call.configs]
    kernel.tuner.cache[stock_key(kernel.tuner, args, kwargs)] = call.configs[call.default]
    return [each for each in found if each is not None]


class Ahead:
    """Hands the configs of passes to workers, and does not wait for a pass before the next one.

    Args:
        workers: how many compile at once.
    """

    def __init__(self, workers: int) -> None:
        self._server = ServerClient(workers, TIMEOUT_SECONDS)
        self._compiled: dict[str, Future[Any]] = {}

    def add(self, step: str) -> None:
        """Hand over what the kernels compile that a pass is made for."""
        only = library_steps.ONLY.get(step, "*")

        def on_call(kernel: TunedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found = specialise(kernel, args, kwargs)
            if fnmatch(kernel.name, only):
                self._submit(kernel.name, found)

        with handed_over(on_call):
            library_steps.STEPS[step]("cpu")

    def finish(self) -> int:
        """Return how many compiles there were when all are done, well or not."""
        for future in self._compiled.values():
            future.exception()
        self._server.close()
        return len(self._compiled)

    def _submit(self, kernel: str, specializations: Iterable[Specialization]) -> None:
        self._server.prepare(kernel.partition(":")[0])
        for each in specializations:
            if each.document is not None and each.key not in self._compiled and not has_code(each.spec, each.key):
                job = {"kernel": kernel, "spec": each.document, "key": each.key, "cc": list(CC)}
                self._compiled[each.key] = self._server.submit(job, lambda answer: answer, lambda lost: lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--ahead", type=int, default=0, metavar="WORKERS", help="compile all configs, at real sizes")
    given = parser.parse_args()
    steps = given.steps or list(library_steps.STEPS)
    with as_on_an_h200() as gpu:
        gpu.effect = route
        if given.ahead:
            ahead = Ahead(given.ahead)
            for step in steps:
                ahead.add(step)
            sys.stdout.write(f"{ahead.finish()} configs compiled\n")
            return
        library_steps.TOKENS, library_steps.HEADS = 256, 2  # the processor makes the data
        for step in steps:
            sys.stdout.write(json.dumps(check_step(step)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
