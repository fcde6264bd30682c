"""The table of compiled configs: registers, spills, shared memory and blocks of a multiprocessor."""

from concurrent.futures import Future, wait
from typing import Any, Protocol

from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.compile_server.background import Compiler
from blocktune.tuner.occupancy.calculator import occupancy

MAX_ERROR = 500
"""Characters of a compiler's error that a row keeps."""

Job = tuple[AttentionShape, KernelConfig]
"""A config and the shape for which it is compiled."""


class StoppableCompiler(Compiler, Protocol):
    """Compiles configs in the background, and can stop."""

    def submit_with_lse(
        self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
    ) -> "Future[bool]":
        """Compile what a launch takes that writes the log-sum-exp, too."""

    def abort(self, future: "Future[Any]") -> None:
        """Drop a compile, or end it."""


def compiled_jobs(
    timed: list[Job], checked: list[Job], compiler: StoppableCompiler, cc: tuple[int, int], seconds: float
) -> dict[Job, CompileResult[KernelConfig]]:
    """Return what jobs compiled to, those of which all code was there in time; the others are stopped, so that nothing
    compiles afterwards.

    Args:
        timed: what is launched without the log-sum-exp; compiled first.
        checked: what is launched with it, too.
        compiler: compiles it.
        cc: the compute capability.
        seconds: how long it may take.
    """
    results: dict[Job, Future[CompileResult[KernelConfig]]] = {}
    with_lse: dict[Job, Future[bool]] = {}
    for shape, config in dict.fromkeys(timed + checked):
        results[shape, config] = compiler.submit(config.kernel, config, shape, cc)
        if (shape, config) not in timed:
            with_lse[shape, config] = compiler.submit_with_lse(config.kernel, config, shape, cc)
    futures: set[Future[Any]] = {*results.values(), *with_lse.values()}
    done = wait(futures, timeout=seconds).done
    for future in futures - done:
        compiler.abort(future)
    late = {job for job, future in with_lse.items() if future not in done}
    return {job: future.result() for job, future in results.items() if future in done and job not in late}


def compiled_table(compiled: dict[Job, CompileResult[KernelConfig]], limits: ComputeLimits) -> list[dict[str, Any]]:
    """Return a row for each config and shape that compiled or failed to."""
    return [
        {"shape": shape.label, "config": config.to_json(), "kernel_hash": get_kernel(config.kernel).source_hash}
        | resources_row(result, limits)
        for (shape, config), result in compiled.items()
    ]


def resources_row(result: CompileResult[KernelConfig], limits: ComputeLimits) -> dict[str, Any]:
    """Return what a compiled config takes and how many blocks fit, or why it did not compile."""
    found = result.resources
    if found is None:
        return {"outcome": str(result.outcome), "error": result.error[:MAX_ERROR]}
    return {
        "outcome": str(result.outcome),
        "registers": found.registers,
        "spill_bytes": found.spill_bytes,
        "shared_bytes": found.shared_bytes,
        "blocks_per_sm": occupancy(found, limits).blocks_per_sm,
    }
