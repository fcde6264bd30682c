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

    def abort(self, future: Future[CompileResult[KernelConfig]]) -> None:
        """Drop a compile, or end it."""


def compiled_jobs(
    jobs: list[Job], compiler: StoppableCompiler, cc: tuple[int, int], seconds: float
) -> dict[Job, CompileResult[KernelConfig]]:
    """Return what the jobs compiled to, those that ended within these seconds; the others are stopped, so that nothing
    compiles afterwards."""
    futures: dict[Job, Future[CompileResult[KernelConfig]]] = {
        (shape, config): compiler.submit(config.kernel, config, shape, cc) for shape, config in dict.fromkeys(jobs)
    }
    done = wait(futures.values(), timeout=seconds).done
    for future in set(futures.values()) - done:
        compiler.abort(future)
    return {job: future.result() for job, future in futures.items() if future in done}


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
