"""The miss path of the dispatcher: from tensors that nobody has called with yet to a plan that has run once."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.config import KernelConfig
from blocktune.kernels.device import DeviceSpec, current_device
from blocktune.kernels.explanation import Explanation
from blocktune.kernels.kernel import Launch
from blocktune.kernels.ladder import Candidate, ConfigTable, Rejection, Rung, climb_down
from blocktune.kernels.launch import TritonLaunch
from blocktune.kernels.plan import (
    KernelPlan,
    Plan,
    SdpaPlan,
    empty_output,
    layout_obstacle,
    on_its_device,
    shape_of,
)
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.shape import AttentionShape, Direction
from blocktune.kernels.source import ConfigSource, read_source
from blocktune.kernels.training import TrainingPlan, new_gradients

logger = logging.getLogger("blocktune")

MAX_PLANS = 4096
"""Plans kept at once. A model that decodes token by token makes a new shape with every step; they must not pile up."""


class Resolver:
    """Finds plans and keeps all that was learned on the way: plans, devices, configs, and what failed to launch.

    Not for several threads at once; reading `plans` is. strict: only exact measurements are taken.
    """

    def __init__(self, source: ConfigSource, *, strict: bool = False) -> None:
        self.plans: dict[Any, Plan] = {}
        self.training_plans: dict[Any, TrainingPlan | Explanation] = {}
        self._source = source
        self._strict = strict
        self._devices: dict[int | None, DeviceSpec | str] = {}  # by CUDA index; text: why it is not known
        self._tables: dict[
            str, tuple[ConfigTable, tuple[str, ...]]
        ] = {}  # with the sources' problems, by DeviceSpec.key
        self._failures: dict[tuple[Any, ...], str] = {}

    def resolve(self, place: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> Plan:
        """The plan for calls with this `plan_key`, remembered unless that is None or a CUDA graph is being captured.

        Raises:
            torch.OutOfMemoryError: there is no memory for the output.
        """
        obstacle = layout_obstacle(query, key, value, enable_gqa) if place is not None else "a tensor has no strides"
        remember = place is not None
        if obstacle is not None:
            result: KernelPlan | Explanation = Explanation(rung=Rung.SDPA, reason=obstacle)
        elif is_capturing(query):
            result, remember = self._while_capturing(shape_of(query, key, value, is_causal)), False
        else:
            result = self._descend(query, key, value, is_causal)
        if isinstance(result, Explanation):
            plan: Plan = SdpaPlan(result, is_causal=is_causal, enable_gqa=enable_gqa)
        else:
            plan = result
        if remember:
            self._remember(place, plan)
        return plan

    def resolve_training(
        self, place: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool
    ) -> TrainingPlan | Explanation:
        """The plan for calls with this `plan_key` whose gradients are needed, or why PyTorch has to compute them.

        It is remembered beside the other plans, unless a CUDA graph is being captured.

        Raises:
            torch.OutOfMemoryError: there is no memory for outputs and gradients.
        """
        if place is None or (problem := layout_obstacle(query, key, value, enable_gqa)) is not None:
            return Explanation(rung=Rung.SDPA, reason="a tensor has no strides" if place is None else str(problem))
        shape = shape_of(query, key, value, is_causal)
        if is_capturing(query):
            return self._while_capturing(shape)
        result = self._trained(shape, query.detach(), key.detach(), value.detach())
        if len(self.training_plans) >= MAX_PLANS:
            self.training_plans.clear()
        self.training_plans[place] = result
        return result

    def _trained(self, shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor) -> TrainingPlan | Explanation:
        """The best backward and the best forward that launch these tensors."""
        index, turned = query.device.index, replace(shape, direction=Direction.BACKWARD)
        out = empty_output(query, shape.head_dim_v)
        lse = query.new_zeros(query.shape[:3], dtype=torch.float32)
        arguments = (query, key, value, out, lse, torch.zeros_like(out), *new_gradients(query, key, value), 1.0)
        backward = self.climb(turned, index, lambda config: self._tried_backward(config, turned, arguments))
        if isinstance(backward, Explanation):
            return replace(backward, reason=f"gradients are needed, and {backward.reason}")
        forward = self.climb(shape, index, lambda config: self._tried(config, shape, query, key, value, lse))
        if isinstance(forward, Explanation):
            return forward
        return TrainingPlan(forward, backward, head_dim=shape.head_dim, head_dim_v=shape.head_dim_v)

    def _tried_backward(self, config: KernelConfig, shape: AttentionShape, arguments: tuple[Any, ...]) -> Launch | str:
        """A launcher that has launched these arguments, or why the config does not launch."""

        def attempt() -> Launch:
            launch, query = get_kernel(config.kernel).bind(config, shape), arguments[0]
            with torch.cuda.device_of(query):
                launch(*arguments)
            return on_its_device(launch, query.device.index)

        return self._guarded(config, shape, arguments[:3], attempt)

    def explain(self, shape: AttentionShape, device: DeviceSpec | None) -> Explanation:
        """What serves a shape on a device, the current one by default, without launching anything."""
        if device is None:
            for plan in tuple(self.plans.values()):
                if plan.explanation.shape == shape:
                    return plan.explanation
            found = self._device(None)
            if isinstance(found, str):
                return Explanation(rung=Rung.SDPA, reason=found, shape=shape)
            device = found
        table, warnings = self._table(device)
        passed_over: list[Rejection] = []
        for step in climb_down(table, shape, device.limits, strict=self._strict):
            if isinstance(step, Candidate):
                return Explanation.of(step, shape, passed_over, warnings, device.key)
            passed_over.append(step)
        return _nothing_fits(shape, passed_over, warnings)

    def _descend(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> KernelPlan | Explanation:
        """A plan with the first config down the ladder that launches; or why there is none."""
        shape = shape_of(query, key, value, is_causal)
        found = self.climb(shape, query.device.index, lambda config: self._tried(config, shape, query, key, value))
        if isinstance(found, Explanation):
            return found
        explanation, launch = found
        return KernelPlan(explanation, launch, query, shape.head_dim_v, is_causal=is_causal)

    def climb(
        self, shape: AttentionShape, index: int | None, attempt: Callable[[KernelConfig], Launch | str]
    ) -> tuple[Explanation, Launch] | Explanation:
        """The first config down the ladder that launches, on the device with this CUDA index; or why there is none.

        attempt: a launcher of a config that has launched once, or why the config cannot.
        """
        device = self._device(index)
        if isinstance(device, str):
            return Explanation(rung=Rung.SDPA, reason=device, shape=shape)
        table, warnings = self._table(device)
        passed_over: list[Rejection] = []
        for step in climb_down(table, shape, device.limits, strict=self._strict):
            if isinstance(step, Rejection):
                passed_over.append(step)
                continue
            launch = attempt(step.config)
            if isinstance(launch, str):
                passed_over.append(Rejection(step.rung, launch))
                continue
            explanation = Explanation.of(step, shape, passed_over, warnings, device.key)
            logger.info("%s", explanation.headline)
            return explanation, launch
        return _nothing_fits(shape, passed_over, warnings)

    def _tried(
        self,
        config: KernelConfig,
        shape: AttentionShape,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lse: Tensor | None = None,
    ) -> Launch | str:
        """A launcher that has launched these tensors, with log-sum-exp or not, or why the config does not launch."""

        def attempt() -> Launch:
            out = empty_output(query, shape.head_dim_v)
            return _launched(get_kernel(config.kernel).bind(config, shape), query, key, value, out, lse)

        return self._guarded(config, shape, (query, key, value), attempt)

    def _guarded(
        self, config: KernelConfig, shape: AttentionShape, tensors: Sequence[Tensor], attempt: Callable[[], Launch]
    ) -> Launch | str:
        """What the attempt yields, or why it fails.

        A failure is remembered for all lengths and batches, since registers and shared memory do not depend on them.
        """
        problem = get_kernel(config.kernel).layout_problem(*tensors)
        if problem is not None:
            return problem
        kind = (config, tensors[0].device, shape.dtype, shape.head_dim, shape.head_dim_v, shape.causal, shape.features)
        if kind in self._failures:
            return self._failures[kind]
        try:
            return attempt()
        except torch.OutOfMemoryError:
            raise  # no fault of the config: PyTorch would need the same memory
        except Exception as error:  # compilers and drivers raise what they like
            reason = f"{config.label} does not launch: {type(error).__name__}: {error}"
            logger.warning("%s: %.500s. The next rung is taken.", shape.label, reason)
            self._failures[kind] = reason
            return reason

    def _device(self, index: int | None) -> DeviceSpec | str:
        if index not in self._devices:
            try:
                self._devices[index] = current_device(index)
            except Exception as error:  # besides our own errors, warnings that the user has turned into errors
                self._devices[index] = f"the device is not known: {error}"
                logger.warning("%s", self._devices[index])
        return self._devices[index]

    def _table(self, device: DeviceSpec) -> tuple[ConfigTable, tuple[str, ...]]:
        if device.key not in self._tables:
            rows, problems = read_source(self._source, device)
            for problem in problems:
                logger.warning("%s", problem)
            self._tables[device.key] = ConfigTable(rows), tuple(problems)
        return self._tables[device.key]

    def _while_capturing(self, shape: AttentionShape) -> Explanation:
        reason = "the shape is new while a CUDA graph is captured, when no kernel can be loaded; call `warmup` before"
        logger.warning("%s: %s", shape.label, reason)
        return Explanation(rung=Rung.SDPA, reason=reason, shape=shape)

    def _remember(self, place: Any, plan: Plan) -> None:
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
        self.plans[place] = plan


def is_capturing(query: Tensor) -> bool:
    """Whether the current stream records a CUDA graph."""
    return query.is_cuda and bool(torch.cuda.is_current_stream_capturing())


def _launched(bound: Launch, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None) -> Launch:
    """The shortest launcher of a bound config, after it has computed these tensors."""
    arguments = (query, key, value, out, lse, 1.0)
    launch = bound
    with torch.cuda.device_of(query):
        if isinstance(bound, TritonLaunch):
            launch = bound.pinned(*arguments)
        else:
            bound(*arguments)
    return on_its_device(launch, query.device.index)


def _nothing_fits(shape: AttentionShape, passed_over: list[Rejection], warnings: tuple[str, ...]) -> Explanation:
    return Explanation(
        rung=Rung.SDPA,
        reason="no config of our kernels runs this shape on this device",
        shape=shape,
        passed_over=tuple(passed_over),
        warnings=warnings,
    )
