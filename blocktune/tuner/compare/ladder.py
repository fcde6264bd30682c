"""The use case: how attention became fast, step by step, on one shape.

    ladder = climb(shape, device, compiler=farm, clock=CudaClock())   # on the GPU that is here
    ladder = climb(shape, device, compiler=farm)                      # by the models, for any device of the catalogue

`ladder_ideas.py` names the steps of the forward and of the backward. Those that are not tuned, but for the paper's,
have the same blocks wherever all of them can run these, so that each shows one change. On a GPU all steps are checked
with the reference and timed in turns (tuner/measure/protocol.py); elsewhere they are compiled and predicted, but for
those of PyTorch that no model knows. A step that cannot run stays in the ladder with the reason.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blocktune.db.records.records import Regime
from blocktune.kernels.base.kernel import AttentionKernel, Launch
from blocktune.kernels.base.paper_rule import paper_config
from blocktune.kernels.hardware.device import ComputeLimits, DeviceSpec
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compare.ladder_ideas import IDEAS, PAPER, PLAIN, PYTORCH, TUNED, V2
from blocktune.tuner.compare.ladder_presets import Preset, common_blocks, plain_config, tuned_by_model
from blocktune.tuner.compare.ladder_steps import (
    LadderStep,
    bytes_of,
    columns_of,
    grid_of,
    kernels_of,
    last_timed,
    predicted_standard_us,
    products_of,
    why,
)
from blocktune.tuner.compare.line_up import LineUp
from blocktune.tuner.compare.peers import Compute, thunk_compute
from blocktune.tuner.compare.pytorch_steps import pytorch_compute, pytorch_steps
from blocktune.tuner.compare.report import Entry
from blocktune.tuner.compare.stock_autotune import Bind
from blocktune.tuner.compile_server.background import Compiler
from blocktune.tuner.correctness.checks_of_shape import AnyQuestion, questions_of
from blocktune.tuner.correctness.memory import require_memory
from blocktune.tuner.cost.bands import band_of
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.cost.roofline import missing_rates
from blocktune.tuner.measure.bench import WrongResultError
from blocktune.tuner.measure.clock import Clock
from blocktune.tuner.measure.protocol import Rounds, column, median_ratio
from blocktune.tuner.measure.telemetry import GpuMonitor
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.traffic.model import standard_memory_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """All steps of one shape on one device. measured: by a clock, else everything is predicted."""

    shape: AttentionShape
    device: DeviceSpec
    steps: tuple[LadderStep, ...]
    measured: bool
    rounds: int = 0

    def step(self, name: str) -> LadderStep:
        return next(step for step in self.steps if step.name == name)

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": self.shape.to_json(),
            "label": self.shape.label,
            "device": replace(self.device, uuid=None).to_json(),
            "origin": "measured" if self.measured else "predicted",
            "rounds": self.rounds,
            "steps": [step.to_json() for step in self.steps],
        }


def climb(
    shape: AttentionShape,
    device: DeviceSpec,
    *,
    compiler: Compiler,
    known: Sequence[KernelConfig] = (),
    clock: Clock | None = None,
    torch_device: str = "cuda",
    bind: Bind | None = None,
    seed: int = 0,
    preset: Preset | None = None,
) -> Ladder:
    """Climb the ladder.

    Args:
        shape: without features.
        device: where; the one that is here if there is a clock.
        compiler: compiles every config, for its resources.
        known: tuned configs of this shape, best first; the last steps take the first that they can, else a default.
        clock: takes the times; None predicts them.
        torch_device: where the tensors are.
        bind: makes a launcher of a config; None asks the config's kernel.
        seed: of the inputs.
        preset: whose blocks and kernels are taken in place of the usual ones.

    Raises:
        UsageError: the shape has features, or does not fit the device's memory.
    """
    if shape.features:
        raise UsageError(f"The ladder compares attention without features, but got {shape.label}. Leave them out.")
    if preset is not None and clock is None:
        able = [kernel for kernel in _kernels(TUNED, shape, preset) if kernel.unsupported(shape, device.limits) is None]
        known = (tuned_by_model(able, preset, device, compiler), *known)
    ideas, torch_steps = IDEAS[shape.direction], pytorch_steps(shape.direction, measured=clock is not None)
    steps = [
        replace(_model_step(step, shape, device, compiler), idea=ideas[step.name])
        for step in (*torch_steps, *listed_steps(shape, device.limits, known, preset))
    ]
    rounds: Rounds = ()
    if clock is not None:
        require_memory(shape, device)
        steps, rounds = _time_steps(steps, shape, device, clock, torch_device, bind or _bind, seed)
    compared = _compare_steps(steps, rounds, device)
    return Ladder(shape=shape, device=device, steps=compared, measured=clock is not None, rounds=len(rounds))


def listed_steps(
    shape: AttentionShape, limits: ComputeLimits, known: Sequence[KernelConfig], preset: Preset | None = None
) -> list[LadderStep]:
    """Return every step with a kernel and the config that it takes, or why it has none."""
    blocks = common_blocks(shape, limits) if preset is None else preset.blocks
    steps = []
    for name in (step for step in IDEAS[shape.direction] if step not in PYTORCH):
        reasons = [(kernel, kernel.unsupported(shape, limits)) for kernel in _kernels(name, shape, preset)]
        able = [kernel for kernel, reason in reasons if reason is None]
        if not able:
            steps.append(LadderStep(name=name, problem="; ".join(str(reason) for _, reason in reasons)))
        elif name == PAPER:
            steps.append(_paper_step(able[0], shape, limits))
        elif name in PLAIN[shape.direction]:
            steps.append(LadderStep(name=name, config=plain_config(able[0], blocks, shape, limits)))
        else:
            steps.append(LadderStep(name=name, config=_best_config(able, known, shape, limits)))
    return steps


def _kernels(step: str, shape: AttentionShape, preset: Preset | None) -> tuple[AttentionKernel, ...]:
    """Return the kernels that a step may take, of which a preset may have others than usual."""
    named = preset.kernels.get(step, ()) if preset is not None else ()
    return tuple(map(get_kernel, named)) or kernels_of(step, shape.direction)


def _paper_step(kernel: AttentionKernel, shape: AttentionShape, limits: ComputeLimits) -> LadderStep:
    config = paper_config(kernel, shape, limits)
    problem = (
        ""
        if config
        else f"no block size of FlashAttention's heuristic fits compute capability {limits.name}, or the queries"
    )
    return LadderStep(name=PAPER, config=config, problem=problem)


def _best_config(
    kernels: Sequence[AttentionKernel], known: Sequence[KernelConfig], shape: AttentionShape, limits: ComputeLimits
) -> KernelConfig:
    """Return the first known config of these kernels that can run, else the first kernel's default."""
    by_name = {kernel.name: kernel for kernel in kernels}
    fitting = (
        config
        for config in known
        if config.kernel in by_name and not by_name[config.kernel].violations(config, shape, limits)
    )
    return next(fitting, kernels[0].default_config(shape, limits))


def _model_step(step: LadderStep, shape: AttentionShape, device: DeviceSpec, compiler: Compiler) -> LadderStep:
    """Return the step with all that the models say."""
    if step.problem or step.name in PYTORCH[1:]:
        return step
    traffic = bytes_of(shape, step.config)
    if step.config is None:
        problem = standard_memory_problem(shape, device) or ""
        predicted = None if missing_rates(device) else predicted_standard_us(shape, device)
        return replace(step, traffic=traffic, problem=problem, predicted_us=None if problem else predicted)
    config, kernel = step.config, get_kernel(step.config.kernel)
    result = compiler.submit(config.kernel, config, shape, device.limits.cc).result()
    code = result.code
    if code is None:
        reason = result.error.strip().splitlines()[-1] if result.error.strip() else "no message"
        return replace(step, problem=f"{config.label} does not compile ({result.outcome}): {reason}")
    occupied = occupancy(code.resources, device.limits)
    step = replace(
        step,
        occupied=occupied,
        shared=code.shared,
        softmax=kernel.softmax_cost(config),
        grid_blocks=grid_of(config, shape),
        columns=columns_of(step.name, shape),
        products=products_of(shape, config, device),
        traffic=traffic,
    )
    if occupied.blocks_per_sm == 0:
        return replace(step, problem=f"{config.label} needs more of an SM than {device.name} has")
    if missing_rates(device):
        return step
    predicted = predict_us(kernel, config, shape, device, code)
    return replace(step, predicted_us=predicted, band=band_of(kernel.name, shape, device))


def _time_steps(
    steps: Sequence[LadderStep],
    shape: AttentionShape,
    device: DeviceSpec,
    clock: Clock,
    torch_device: str,
    bind: Bind,
    seed: int,
) -> tuple[list[LadderStep], Rounds]:
    """Return the steps with their times, or with what went wrong, and the paired rounds of those that have a time."""
    plain, hard = questions_of(shape, device=torch_device, seed=seed)
    line_up = LineUp(shape, plain, clock, bind)
    for step in steps:
        if step.problem:
            continue
        if step.config is None:
            line_up.invite(Entry(name=step.name), functools.partial(pytorch_compute, step.name, shape, device, plain))
        else:
            checked = functools.partial(_bind_checked, step.config, shape, (plain, hard), bind)
            line_up.invite(Entry(name=step.name, config=step.config), checked)
    rounds, _ = line_up.time(Regime.BURST, GpuMonitor(device.uuid, own_processes=1))
    entries = {entry.name: entry for entry in line_up.timed_entries(rounds)}
    return [
        replace(step, timing=entries[step.name].timing, problem=entries[step.name].problem)
        if step.name in entries
        else step
        for step in steps
    ], rounds


def _bind_checked(config: KernelConfig, shape: AttentionShape, questions: Sequence[AnyQuestion], bind: Bind) -> Compute:
    """Return the config bound, once the results of both questions are right, the log-sum-exp of a forward included.

    Raises:
        WrongResultError: one of them differs from the reference.
    """
    launch: Launch = bind(config, shape)
    for question in questions:
        result, lse = question.new_result(), question.new_lse()
        question.poison(result)
        question.thunk(launch, result, lse)()
        problem = question.problem(result, lse)
        if problem is not None:
            raise WrongResultError(problem)
    return thunk_compute(launch, questions[0], questions[0].new_result())


def _compare_steps(steps: Sequence[LadderStep], rounds: Rounds, device: DeviceSpec) -> tuple[LadderStep, ...]:
    """Return the steps with their gains, by paired rounds where there are any, and the reasons."""
    columns = _columns(steps)

    def gain(before: LadderStep | None, after: LadderStep) -> float | None:
        if before is None or before is after or after.problem:
            return None
        if rounds:
            if before.name not in columns or after.name not in columns:
                return None
            return median_ratio(column(rounds, columns[before.name]), column(rounds, columns[after.name]))
        if before.band is None or after.band is None or before.predicted_us is None or after.predicted_us is None:
            return None
        return before.predicted_us / after.predicted_us

    found: list[LadderStep] = []
    v2 = next((step for step in steps if step.name == V2 and not step.problem), None)
    for step in steps:
        before = last_timed(found)
        modelled = last_timed([each for each in found if each.name not in PYTORCH[1:]])
        explained = not step.problem and step.name not in PYTORCH[1:]
        reason = why(modelled, step, device) if modelled is not None and explained else ""
        found.append(replace(step, over_before=gain(before, step), over_v2=gain(v2, step), why=reason))
    return tuple(found)


def _columns(steps: Sequence[LadderStep]) -> dict[str, int]:
    """Return the place of every timed step in a round: steps of one config were timed once, as the first of them."""
    timed = [step for step in steps if step.timing]
    places = {config: place for place, config in enumerate(dict.fromkeys(step.config or step.name for step in timed))}
    return {step.name: places[step.config or step.name] for step in timed}


def _bind(config: KernelConfig, shape: AttentionShape) -> Any:
    return get_kernel(config.kernel).bind(config, shape)
