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
from typing import Any, Generic

from blocktune.db.records.records import ConfigT, Outcome
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.answers import is_of_the_machine, private_stdout, send
from blocktune.tuner.compile.compiler import hash_triton
from blocktune.tuner.measure.bench import Bench, ShapeBench, Tell, WrongResultError
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


class Commands(Generic[ConfigT]):
    """Does what commands say, with the bench of the last `setup`.

    Args:
        make_bench: builds the bench of a problem.
        parse_problem: makes a problem of its description.
        parse_config: makes a config of its description.
    """

    def __init__(
        self,
        make_bench: Callable[[Any, Terms], Bench[ConfigT]],
        parse_problem: Callable[[dict[str, Any]], Any],
        parse_config: Callable[[dict[str, Any]], ConfigT],
    ) -> None:
        self._make_bench, self._parse_problem, self._parse_config = make_bench, parse_problem, parse_config
        self._bench: Bench[ConfigT] | None = None

    def answer(self, command: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """Return the result of a command, or its failure."""
        try:
            if command["command"] == "setup":
                self._bench = None  # frees the tensors of the last problem first
                problem = self._parse_problem(command["shape"])
                self._bench = self._make_bench(problem, Terms.from_json(command["terms"]))
                return {"result": {}}
            if self._bench is None:
                raise RuntimeError("setup comes first")
            return {"result": self.run(self._bench, command, tell)}
        except Exception as error:
            return {"failure": _failure(error, self._bench)}

    def run(self, bench: Bench[ConfigT], command: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """Return the result of a command with a bench."""
        match command["command"]:
            case "measure":
                return bench.measure(self._parse_config(command["config"]), tell).to_json()
            case "finals":
                return {"samples_us": bench.finals(self.configs(command), tell)}
            case "energies":
                found = bench.energies(self.configs(command), command["rounds"], tell)
                return {"bursts": [[asdict(burst) for burst in rounds] for rounds in found]}
            case "confirm":
                bench.confirm(self._parse_config(command["config"]), tell)
                return {}
            case unknown:
                raise RuntimeError(f"unknown command {unknown!r}")

    def configs(self, command: dict[str, Any]) -> list[ConfigT]:
        """Return the configs of a command."""
        return [self._parse_config(config) for config in command["configs"]]

    def close(self) -> None:
        """Leave the problem as it was."""
        if self._bench is not None:
            self._bench.close()


def serve(commands: Commands[Any]) -> None:
    """Answer commands until the input ends."""
    die_with_parent()
    answers = private_stdout()
    for line in sys.stdin:
        send(answers, commands.answer(json.loads(line), lambda stage: send(answers, {"stage": stage})))


def attention_commands(make_bench: Callable[[AttentionShape, Terms], Bench]) -> Commands:
    """Return what measures configs of shapes."""
    return Commands(make_bench, AttentionShape.from_json, KernelConfig.from_json)


def _failure(error: Exception, bench: Bench[Any] | None) -> dict[str, Any]:
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


def _usable(bench: Bench[Any]) -> bool:
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
    serve(attention_commands(_cuda_bench))
