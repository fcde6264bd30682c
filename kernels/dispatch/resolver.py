"""The miss path of the dispatcher: from the first call with tensors of a kind to a plan that has run once."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.base.precision import product_precision
from blocktune.kernels.dispatch.call import Call
from blocktune.kernels.dispatch.launches.plans import (
    KernelPlan,
    Plan,
    TorchPlan,
    adds_sinks,
    new_gradients,
    new_results,
    takes_extras,
)
from blocktune.kernels.dispatch.plan import is_capturing, on_its_device
from blocktune.kernels.dispatch.snapshot import Snapshot
from blocktune.kernels.dispatch.ways import Ways
from blocktune.kernels.hardware.device import ComputeLimits, DeviceSpec, current_device
from blocktune.kernels.portable.sinks.results import with_sink_pass
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.selection import canary
from blocktune.kernels.selection.block_tiles import within_blocks
from blocktune.kernels.selection.explanation import Explanation
from blocktune.kernels.selection.fallback import Candidate, ConfigTable, Rejection, Rung, climb_down
from blocktune.kernels.selection.fixed_splits import fixed_splits
from blocktune.kernels.selection.misses import watch
from blocktune.kernels.stored.background import CALL_SECONDS, MAX_SECONDS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal, Direction

logger = logging.getLogger("blocktune")

MAX_PLANS = 4096
"""Plans kept at once. A model that decodes token by token makes a new shape with every step; they must not pile up."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A call that configs are tried with.

    shape: of one direction. arguments: all of a launch without sinks: query, key, value and output, then what this
    direction has.
    """

    call: Call
    shape: AttentionShape
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor, call: Call, *, sums: bool) -> "Trial":
        """Return the trial of a call, with memory of its own. sums: a forward leaves the log-sum-exp."""
        packed, is_backward = call.features.varlen, shape.direction is Direction.BACKWARD
        out, lse = new_results(query, value, packed=packed, sums=sums or is_backward)
        inputs: tuple[Any, ...] = (query, key, value, out, lse)
        extras = (call.extras,) if takes_extras(call, shape.direction) else ()
        if is_backward:
            gradients = new_gradients(query, key, value, packed=packed)
            inputs = (query, key, value, out.zero_(), torch.zeros_like(lse), torch.zeros_like(out), *gradients)
        return cls(call, shape, (*inputs, call.scale, *extras))

    @property
    def is_plain(self) -> bool:
        """Whether tensors of 16 bits or more give an output without log-sum-exp, features and sinks, which the canary
        knows."""
        lse, *rest = self.arguments[4:]
        knows = self.shape.causal is not Causal.LOWER_RIGHT and self.shape.dtype != FP8
        return knows and lse is None and len(rest) == 1

    def steps(self, table: ConfigTable, limits: ComputeLimits, *, strict: bool) -> Iterator[Candidate | Rejection]:
        """Yield the configs down the ladder that compute the call, and why others do not."""
        if self.call.num_splits:
            yield from fixed_splits(self.shape, self.call.num_splits, limits)
            return
        blocks = self.call.block_sizes
        for step in climb_down(table, self.shape, limits, strict=strict):
            if blocks is not None and isinstance(step, Candidate):
                step = within_blocks(step, blocks, self.shape, limits)
            yield step

    def launched(self, config: KernelConfig) -> Launch:
        """Return the shortest launcher of a config, after it has computed the call."""
        kernel, sunk = get_kernel(config.kernel), adds_sinks(self.call, self.shape.direction)
        own = kernel.bind_with_sinks(config, self.shape) if sunk else None
        if own is not None:
            return _launched(own, (*self.arguments[:6], self.call.extras))
        bind = kernel.bind_batch_invariant if self.call.num_splits else kernel.bind
        launch = _launched(bind(config, self.shape), self.arguments)
        return with_sink_pass(launch, takes_extras=len(self.arguments) > 6) if sunk else launch

    def kind(self, config: KernelConfig) -> tuple[Any, ...]:
        """Return what a failure of a config holds for."""
        shape, blocks = self.shape, self.call.block_sizes
        sizes = (shape.dtype, product_precision(shape.dtype), shape.head_dim, shape.head_dim_v, blocks)
        return (config, self.arguments[0].device, *sizes, shape.causal, shape.features)


def _launched(bound: Launch, arguments: tuple[Any, ...]) -> Launch:
    """Return the shortest launcher of a bound config, after it has computed these arguments, whose first one is the
    query."""
    query = arguments[0]
    with torch.cuda.device_of(query):
        if hasattr(bound, "pinned"):
            return on_its_device(bound.pinned(*arguments), query.device.index)
        bound(*arguments)
    return on_its_device(bound, query.device.index)


class Resolver:
    """Finds plans and keeps all that was learned on the way: plans, devices, configs, and what failed to launch.

    Not for several threads at once; reading `plans` is. strict: only exact measurements are taken, and waited for.
    """

    def __init__(self, snapshot: Snapshot, *, strict: bool = False) -> None:
        self.plans: dict[Any, Plan] = {}  # by `Call.place`, or by the reason why none was looked for
        self.ways = Ways()  # to the plans
        self.snapshot = snapshot
        self.late = snapshot.late  # what comes after that makes the plans out of date
        self._strict = strict
        self._seconds = MAX_SECONDS if strict else CALL_SECONDS
        self._earlier: dict[Any, Plan] = {}
        self._devices: dict[int | None, DeviceSpec | str] = {}  # by CUDA index; text: why it is not known
        self._failures: dict[tuple[Any, ...], str] = {}

    @property
    def disabled(self) -> int:
        """Return how many configs did not launch or computed a wrong result."""
        return len({kind[0] for kind in list(self._failures)})

    def renewed(self) -> "Resolver":
        """Return a resolver that knows what this one does, but for the plans: configs have come that they do not know
        of.

        While a CUDA graph is captured it goes back to them, since no kernel can be loaded then.
        """
        made = Resolver(self.snapshot, strict=self._strict)
        made._devices, made._failures = self._devices, self._failures
        made._earlier = self._earlier | self.plans
        return made

    def refused(self, reason: str) -> TorchPlan:
        """Return the plan of calls that are PyTorch's, whatever the configs are."""
        plan = self.plans.get(reason)
        if not isinstance(plan, TorchPlan):
            plan = TorchPlan(Explanation(rung=Rung.SDPA, reason=reason))
            self._keep(reason, plan)
        return plan

    def resolve(
        self, place: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, direction: Direction, sums: bool
    ) -> Plan:
        """Return the plan for calls of this `Call.place`.

        It is remembered, unless a CUDA graph is being captured.

        Raises:
            UsageError: a size is invalid for attention, or a CUDA graph is being captured, and one of our kernels would
                have to be loaded.
            torch.OutOfMemoryError: there is no memory for outputs and gradients.
        """
        obstacle = call.obstacle(query, key, value)
        if obstacle is not None:
            return self.refused(obstacle)
        shape = call.shape(query, key, value, direction)
        if is_capturing(query):
            return self._earlier.get(place) or TorchPlan(self._while_capturing(shape, query))
        trial = Trial.of(shape, query.detach(), key.detach(), value.detach(), call, sums=sums)
        found = self._climb(trial, query.device.index)
        plan = TorchPlan(found) if isinstance(found, Explanation) else KernelPlan(*found, call, direction, sums)
        self._keep(place, plan)
        return plan

    def _keep(self, place: Any, plan: Plan) -> None:
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
            self.ways.clear()
        self.plans[place] = plan
        watch(plan)

    def explain(self, shape: AttentionShape, device: DeviceSpec | None) -> Explanation:
        """Return what serves a shape on a device, the current one by default, without launching anything."""
        if device is None:
            for plan in self.plans.values():
                if plan.explanation.shape == shape:
                    return plan.explanation
            found = self.device(None)
            if isinstance(found, str):
                return Explanation(rung=Rung.SDPA, reason=found, shape=shape)
            device = found
        table, warnings = self.snapshot.table(device, self._seconds)
        passed_over: list[Rejection] = []
        for step in climb_down(table, shape, device.limits, strict=self._strict):
            if isinstance(step, Candidate):
                return Explanation.of(step, shape, passed_over, warnings, device)
            passed_over.append(step)
        return _nothing_fits(shape, passed_over, warnings, device.key)

    def _climb(self, trial: Trial, index: int | None) -> tuple[Explanation, Launch] | Explanation:
        """Return the first config down the ladder that launches on the device with this CUDA index; or why none
        does."""
        device, shape = self.device(index), trial.shape
        if isinstance(device, str):
            return Explanation(rung=Rung.SDPA, reason=device, shape=shape)
        table, warnings = self.snapshot.table(device, self._seconds)
        passed_over: list[Rejection] = []
        for step in trial.steps(table, device.limits, strict=self._strict):
            if isinstance(step, Rejection):
                passed_over.append(step)
                continue
            launch = self._tried(step, trial)
            if isinstance(launch, str):
                passed_over.append(Rejection(step.rung, launch))
                continue
            explanation = Explanation.of(step, shape, passed_over, warnings, device)
            logger.info("%s", explanation.headline)
            return explanation, launch
        return _nothing_fits(shape, passed_over, warnings, device.key)

    def _tried(self, step: Candidate, trial: Trial) -> Launch | str:
        """Return a launcher of a config that has launched once, or why it is not used.

        A failure is remembered for all lengths and batches, since registers and shared memory do not depend on them,
        but for these blocks of a block mask only: not every tile divides all of them.
        """
        config, shape = step.config, trial.shape
        problem = get_kernel(config.kernel).layout_problem(*trial.arguments[:3])
        if problem is not None:
            return problem
        kind = trial.kind(config)
        if kind in self._failures:
            return self._failures[kind]
        try:
            launch = trial.launched(config)
        except torch.OutOfMemoryError:
            raise  # no fault of the config: PyTorch would need the same memory
        except Exception as error:  # compilers and drivers raise what they like
            problem = f"{config.label} does not launch: {type(error).__name__}: {error}"
            logger.warning("%s: %.500s. The next rung is taken.", shape.label, problem)
        else:
            if step.rung is Rung.EXACT or not trial.is_plain:
                return launch
            problem = canary.problem_of(config, launch, shape, *trial.arguments[:4])
            if problem is None:
                return launch
        self._failures[kind] = problem
        return problem

    def device(self, index: int | None) -> DeviceSpec | str:
        """Return the device with this CUDA index, the current one without; or why it is not known."""
        if index not in self._devices:
            try:
                self._devices[index] = current_device(index)
            except Exception as error:  # besides our own errors, warnings that the user has turned into errors
                self._devices[index] = f"the device is not known: {error}"
                logger.warning("%s", self._devices[index])
        return self._devices[index]

    def _while_capturing(self, shape: AttentionShape, query: Tensor) -> Explanation:
        """Return why PyTorch computes a shape that is new. Nothing is launched: the stream stays as it is.

        Raises:
            UsageError: one of our kernels would compute it. The graph would hold something else, for good.
        """
        device = self.device(query.device.index)
        explanation = self.explain(shape, None if isinstance(device, str) else device)
        if explanation.rung is Rung.SDPA:
            return explanation
        raise UsageError(
            "A CUDA graph cannot capture the first call of a shape, since no kernel can be loaded during the capture, "
            f"but {shape.label} is new. Call it before, or `attention.warmup([shape])`."
        )


def _nothing_fits(
    shape: AttentionShape, passed_over: list[Rejection], warnings: tuple[str, ...], device: str
) -> Explanation:
    wanted = f" with {shape.features.label}" if shape.features else ""
    gradients = "gradients are needed, and " if shape.direction is Direction.BACKWARD else ""
    return Explanation(
        rung=Rung.SDPA,
        reason=f"{gradients}no config of our kernels runs this shape{wanted} on this device",
        shape=shape,
        passed_over=tuple(passed_over),
        warnings=warnings,
        device=device,
    )
