"""Jobs of a compile worker: a config of an attention kernel, or a launch of an autotuned kernel.

    {"kernels": "module:function", "kernel": "flash_fwd", "config": {…}, "shape": {…}, "cc": [9, 0], "with_lse": false}
    {"kernel": "module:function", "spec": {…}, "key": "…", "cc": [9, 0]}

`kernels` names the function that finds a kernel by its name. A job with `with_lse` fills Triton's cache alone: its
answer has no resources.
"""

import importlib
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

from blocktune.db.records.records import Outcome
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.answers import Answer, failed_answer
from blocktune.tuner.compile.compiler import (
    compile_config,
    compile_key,
    compiled_code,
    only_code_that_fits,
    ptxas_logs,
    resources_of,
)
from blocktune.tuner.compile.with_lse import compile_with_lse
from blocktune.tuner.offline.specialization import function_named, spec_of

GetKernel = Callable[[str], AttentionKernel]

Job = Mapping[str, Any]


def attention_job(
    kernels: str, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int], *, with_lse: bool
) -> dict[str, Any]:
    """Return the job of a config of an attention kernel."""
    return {
        "kernels": kernels,
        "kernel": kernel,
        "config": config.to_json(),
        "shape": shape.to_json(),
        "cc": cc,
        "with_lse": with_lse,
    }


def find_kernels(name: str) -> GetKernel:
    """Return the function that finds kernels, by its name as module:function."""
    module, _, function = name.partition(":")
    found: GetKernel = getattr(importlib.import_module(module), function)
    return found


def spec_in(job: Job) -> CompileSpec:
    """Return what a job compiles, raising whatever the import of its kernel raises."""
    if "shape" not in job:
        return spec_of(function_named(job["kernel"]), job["spec"])
    config, shape = KernelConfig.from_json(job["config"]), AttentionShape.from_json(job["shape"])
    return find_kernels(job["kernels"])(job["kernel"]).compile_spec(config, shape)


def answer_to(job: Job) -> Answer:
    """Return how a job ended, whatever its compile raised."""
    _limit_cpu_time(job["timeout_s"])
    start = time.perf_counter()
    try:
        found = _attention(job) if "shape" in job else _launch(job)
        answer = found | {"outcome": str(Outcome.OK), "error": "", "transient": False}
    except Exception as error:
        answer = failed_answer(error)
    return answer | {"seconds": time.perf_counter() - start}


def _attention(job: Job) -> Answer:
    """Return the resources of a config, and how it reads shared memory."""
    config, shape = KernelConfig.from_json(job["config"]), AttentionShape.from_json(job["shape"])
    kernel, cc = find_kernels(job["kernels"])(job["kernel"]), tuple(job["cc"])
    if job["with_lse"]:
        compile_with_lse(kernel, config, shape, cc)
        return {}
    with ptxas_logs() as logs:
        resources, shared = compile_config(kernel, config, shape, cc, logs)
    return {"resources": resources.to_json(), "shared": shared.to_json()}


def _launch(job: Job) -> Answer:
    """Return the resources of a launch's code; None where the caller has another source, or found it on a path that
    this process has not.

    Raises:
        OutOfResources: a block would need more shared memory than it can ask for.
    """
    cc = tuple(job["cc"])
    try:
        spec = spec_in(job)
        same = compile_key(spec, cc) == job["key"]
    except Exception:  # libraries raise what they like when they are imported; the caller has imported this one
        same = False
    if not same:
        return {"resources": None}
    with ptxas_logs() as logs, only_code_that_fits(cc):
        compiled = compiled_code(spec, cc)
    return {"resources": resources_of(compiled, "".join(logs)).to_json()}


def _limit_cpu_time(timeout_s: float) -> None:
    """Bound the CPU time of a compile, and of the ptxas that it starts, in case no process is left to stop it."""
    used = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used + 2 * timeout_s) + 10
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
