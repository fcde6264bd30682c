"""The child process that compiles: `python -m blocktune.tuner.compile.worker KERNELS PARENT`.

KERNELS names the function that finds a kernel by its name, as module:function; PARENT is the parent's process id. Each
line on standard input is a job and each line on standard output its result, as one JSON object per line. What compilers
print goes to standard error, of which the parent reads the end when this process dies.

    {"ready": true}
    {"kernel": "flash_fwd", "config": {…}, "shape": {…}, "cc": [9, 0], "with_lse": false, "timeout_s": 60}
    {"outcome": "ok", "resources": {…}, "shared": {…}, "error": "", "seconds": 1.2, "transient": false}

A job with `with_lse` fills Triton's cache alone: its answer has no resources.
"""

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from blocktune.db.records.records import Outcome
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.answers import is_of_the_machine, private_stdout, send
from blocktune.tuner.compile.compiler import compile_config, ptxas_logs
from blocktune.tuner.compile.with_lse import compile_with_lse

MAX_ERROR_TEXT = 2000

_PR_SET_PDEATHSIG = 1

GetKernel = Callable[[str], AttentionKernel]

CompileJob = Callable[[dict[str, Any]], dict[str, Any]]
"""Compiles what a job describes and returns what was found, as far as the answer has it: `resources` and `shared`."""


def serve(compile_job: CompileJob, jobs: TextIO, results: TextIO) -> None:
    """Compile until the jobs end."""
    send(results, {"ready": True})
    for line in jobs:
        send(results, answer_to(compile_job, json.loads(line)))


def attention_job(get_kernel: GetKernel) -> CompileJob:
    """Return what compiles a config of an attention kernel for a shape."""

    def compile_job(job: dict[str, Any]) -> dict[str, Any]:
        config, shape = KernelConfig.from_json(job["config"]), AttentionShape.from_json(job["shape"])
        kernel, cc = get_kernel(job["kernel"]), tuple(job["cc"])
        if job["with_lse"]:
            compile_with_lse(kernel, config, shape, cc)
            return {}
        with ptxas_logs() as logs:
            resources, shared = compile_config(kernel, config, shape, cc, logs)
        return {"resources": resources.to_json(), "shared": shared.to_json()}

    return compile_job


def answer_to(compile_job: CompileJob, job: dict[str, Any]) -> dict[str, Any]:
    """Return how a job ended, whatever its compile raised."""
    _limit_cpu_time(job["timeout_s"])
    start = time.perf_counter()
    try:
        answer = compile_job(job) | {"outcome": str(Outcome.OK), "error": "", "transient": False}
    except Exception as error:
        answer = failure_of(error)
    return answer | {"seconds": time.perf_counter() - start}


def failure_of(error: Exception) -> dict[str, Any]:
    """Return the answer to a job whose compile raised an error."""
    from triton.runtime.errors import OutOfResources

    text = f"{type(error).__name__}: {error}"
    return {
        "outcome": str(Outcome.INFEASIBLE if isinstance(error, OutOfResources) else Outcome.COMPILE_ERROR),
        "resources": None,
        "shared": None,
        "error": text[:MAX_ERROR_TEXT],
        "transient": is_of_the_machine(error),
    }


def _limit_cpu_time(timeout_s: float) -> None:
    """Bound the CPU time of a compile, and of the ptxas that it starts, in case no process is left to stop it."""
    used = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used + 2 * timeout_s) + 10
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def die_with_parent(parent: int) -> None:
    """End this process group, ptxas included, when the thread that started this process ends (Linux)."""

    def end_group(signum: int, frame: object) -> None:
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_group)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before it could be watched
        sys.exit(1)


def find_kernels(name: str) -> GetKernel:
    """Return the function that finds kernels, by its name as module:function."""
    module, _, function = name.partition(":")
    found: GetKernel = getattr(importlib.import_module(module), function)
    return found


def hash_triton() -> None:
    """Have Triton hash all of its own files, which the first key of a process would wait for."""
    from triton.runtime.cache import triton_key

    triton_key()


def main(arguments: list[str]) -> None:
    kernels, parent = arguments
    die_with_parent(int(parent))
    results = private_stdout()
    importlib.import_module("torch")  # Triton imports it for the first compile, on which a search waits
    hash_triton()
    serve(attention_job(find_kernels(kernels)), sys.stdin, results)


if __name__ == "__main__":
    main(sys.argv[1:])
