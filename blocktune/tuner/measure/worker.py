"""The child process that touches the GPU: `python -m blocktune.tuner.measure.worker`.

Each line on standard input is a command and each line on standard output an answer, as one JSON object: stages while a
command runs, then a result or a failure. What kernels and compilers print goes to standard error. The process dies with
its parent: by the kernel's parent-death signal, and by the end of its input.

    {"command": "setup", "shape": {…}, "terms": {…}}  {"stage": "…"}* then {"result": {}} or {"failure": {…}}
    {"command": "measure", "config": {…}}             {"result": {measurement}}
    {"command": "finals", "configs": [{…}, …]}        {"result": {"samples_us": [[…], …]}}
    {"command": "energies", "configs": [{…}, …], "rounds": 8}  {"result": {"bursts": [[{burst}, …], …]}}
    {"command": "confirm", "config": {…}}             {"result": {}}

A failure has an outcome, a text, `transient`: whether the machine is to blame, and `fatal`: whether the CUDA context is
lost, so that this process must be replaced.
"""

import ctypes
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from blocktune.db.records.records import Outcome
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.answers import is_of_the_machine, private_stdout, send
from blocktune.tuner.compile.worker import hash_triton
from blocktune.tuner.measure.bench import Bench, ShapeBench, WrongResultError
from blocktune.tuner.measure.measurement import OUT_OF_MEMORY, Terms

MAX_ERROR_TEXT = 2000

_PR_SET_PDEATHSIG = 1
_COMPILE_ERRORS = (
    "CompilationError",
    "CompileTimeAssertionFailure",
    "UnsupportedLanguageConstruct",
    "PTXASError",
    "InterpreterError",
)
"""Names, since importing their modules here would tie the worker to Triton's layout."""

MakeBench = Callable[[Any, Terms], Bench]
Parse = Callable[[dict[str, Any]], Any]


def serve(
    make_bench: MakeBench, parse_shape: Parse = AttentionShape.from_json, parse_config: Parse = KernelConfig.from_json
) -> None:
    """Answer commands until the input ends. `make_bench` builds the bench of a shape; the other two make
    shapes and configs of a command's objects."""
    die_with_parent()
    answers = private_stdout()
    bench: Bench | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["command"] == "setup":
                bench = None  # frees the tensors of the last shape first
                bench = make_bench(parse_shape(command["shape"]), Terms.from_json(command["terms"]))
                answer: dict[str, Any] = {"result": {}}
            elif bench is None:
                raise RuntimeError("setup comes first")
            else:
                answer = {"result": _run(bench, command, parse_config, lambda stage: send(answers, {"stage": stage}))}
        except Exception as error:
            answer = {"failure": _failure(error, bench)}
        send(answers, answer)


def _run(bench: Bench, command: dict[str, Any], parse: Parse, tell: Callable[[str], None]) -> dict[str, Any]:
    match command["command"]:
        case "measure":
            return bench.measure(parse(command["config"]), tell).to_json()
        case "finals":
            configs = [parse(config) for config in command["configs"]]
            return {"samples_us": bench.finals(configs, tell)}
        case "energies":
            found = bench.energies([parse(config) for config in command["configs"]], command["rounds"], tell)
            return {"bursts": [[asdict(burst) for burst in rounds] for rounds in found]}
        case "confirm":
            bench.confirm(parse(command["config"]), tell)
            return {}
        case unknown:
            raise RuntimeError(f"unknown command {unknown!r}")


def _failure(error: Exception, bench: Bench | None) -> dict[str, Any]:
    text = f"{type(error).__name__}: {error}"[:MAX_ERROR_TEXT]
    return {
        "outcome": outcome_of(error),
        "error": text,
        "transient": is_of_the_machine(error),
        "fatal": bench is not None and not _usable(bench),
    }


def outcome_of(error: Exception) -> str:
    """Return the outcome that an exception of a candidate stands for."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, WrongResultError):
        return str(Outcome.WRONG_RESULT)
    if "OutOfResources" in names:
        return str(Outcome.INFEASIBLE)
    if "OutOfMemoryError" in names:
        return OUT_OF_MEMORY
    return str(Outcome.COMPILE_ERROR if names & set(_COMPILE_ERRORS) else Outcome.RUN_ERROR)


def _usable(bench: Bench) -> bool:
    """Return whether the GPU still answers. CUDA errors are sticky: after an illegal access all calls of the process
    fail."""
    try:
        bench.synchronize()
    except Exception:
        return False
    return True


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends; elsewhere the end of input has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def read_sources(kernel: AttentionKernel, shape: AttentionShape, limits: ComputeLimits) -> None:
    """Have Triton read and hash its own files and what a kernel launches for a shape: its first launch would wait."""
    hash_triton()
    config = kernel.default_config(shape, limits)
    for spec in (kernel.compile_spec(config, shape), *kernel.further_specs(config, shape)):
        spec.function.cache_key  # noqa: B018 (computed once)


def _cuda_bench(shape: AttentionShape, terms: Terms) -> ShapeBench:
    from triton.runtime import driver

    from blocktune.kernels.hardware.device import present_devices
    from blocktune.kernels.registry import get_kernel, kernels_for
    from blocktune.tuner.measure.clock import CudaClock
    from blocktune.tuner.measure.energy import CudaQueue, EnergyMeter
    from blocktune.tuner.measure.telemetry import GpuMonitor

    (device, *_) = present_devices()
    driver.active.get_current_device()  # Triton builds its own module now, while the first config compiles
    for kernel in kernels_for(shape, device.limits)[:1]:
        read_sources(kernel, shape, device.limits)
    meter = EnergyMeter(CudaQueue(), GpuMonitor(device.uuid).energy_j)
    return ShapeBench(shape, device="cuda", clock=CudaClock(), kernels=get_kernel, terms=terms, meter=meter)


if __name__ == "__main__":
    serve(_cuda_bench)
