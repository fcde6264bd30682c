"""The miss path of the dispatcher: from the first call with tensors of a kind to a plan that has run once."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.base.precision import product_precision
from blocktune.kernels.dispatch.call import Call
from blocktune.kernels.dispatch.launches.general_plan import (
    GeneralPlan,
    adds_sinks,
    new_gradients,
    new_results,
    takes_extras,
)
from blocktune.kernels.dispatch.plan import (
    KernelPlan,
    Plan,
    SdpaPlan,
    empty_output,
    is_capturing,
    layout_obstacle,
    on_its_device,
    shape_of,
)
from blocktune.kernels.dispatch.plan_table import PlanTable
from blocktune.kernels.dispatch.snapshot import Snapshot
from blocktune.kernels.dispatch.ways import Ways
from blocktune.kernels.hardware.device import DeviceSpec, current_device
from blocktune.kernels.portable.sinks.results import with_sink_pass
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.selection import canary
from blocktune.kernels.selection.block_tiles import within_blocks
from blocktune.kernels.selection.explanation import Explanation
from blocktune.kernels.selection.fallback import Candidate, Rejection, Rung, climb_down
from blocktune.kernels.selection.fixed_splits import fixed_splits
from blocktune.kernels.selection.misses import watch
from blocktune.kernels.stored.background import CALL_SECONDS, MAX_SECONDS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape, Direction

logger = logging.getLogger("blocktune")

MAX_PLANS = 4096
"""Plans kept at once. A model that decodes token by token makes a new shape with every step; they must not pile up."""


class Resolver:
    """Finds plans and keeps all that was learned on the way: plans, devices, configs, and what failed to launch.

    Not for several threads at once; reading `plans` is. strict: only exact measurements are taken, and waited for.
    """

    def __init__(self, snapshot: Snapshot, *, strict: bool = False) -> None:
        self.plans = PlanTable()
        self.general_plans: dict[Any, GeneralPlan | Explanation] = {}
        self.ways = Ways()  # to the general plans
        self.snapshot = snapshot
        self.late = snapshot.late  # what comes after that makes the plans out of date
        self._strict = strict
        self._seconds = MAX_SECONDS if strict else CALL_SECONDS
        self._earlier: dict[Any, Plan] = {}
        self._earlier_general: dict[Any, GeneralPlan | Explanation] = {}
        self._devices: dict[int | None, DeviceSpec | str] = {}  # by CUDA index; text: why it is not known
        self._failures: dict[tuple[Any, ...], str] = {}

    @property
    def counted_plans(self) -> list[Plan | GeneralPlan]:
        """Return all plans, which count their calls."""
        found = [*self.plans.values(), *self.general_plans.values()]
        return [plan for plan in found if not isinstance(plan, Explanation)]

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
        made._earlier_general = self._earlier_general | self.general_plans
        return made

    def resolve(self, place: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> Plan:
        """Return the plan for calls with this `plan_key`.

        It is remembered, unless the key is None or a CUDA graph is being captured.

        Raises:
            UsageError: a CUDA graph is being captured, and one of our kernels would have to be loaded.
            torch.OutOfMemoryError: there is no memory for the output.
        """
        obstacle = layout_obstacle(query, key, value, enable_gqa) if place is not None else "a tensor has no strides"
        remember = place is not None
        if obstacle is not None:
            result: KernelPlan | Explanation = Explanation(rung=Rung.SDPA, reason=obstacle)
        elif is_capturing(query):
            if place in self._earlier:
                return self._earlier[place]
            result, remember = self._while_capturing(shape_of(query, key, value, is_causal), query), False
        else:
            result = self._descend(query, key, value, is_causal)
        if isinstance(result, Explanation):
            plan: Plan = SdpaPlan(result, is_causal=is_causal, enable_gqa=enable_gqa)
        else:
            plan = result
        if remember:
            self._remember(place, plan)
        return plan

    def resolve_general(
        self, place: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, direction: Direction, sums: bool
    ) -> GeneralPlan | Explanation:
        """Return the plan for calls of this `Call.place`, or why PyTorch has to compute them.

        It is remembered, unless a CUDA graph is being captured.

        Raises:
            UsageError: a size is invalid for attention, or a CUDA graph is being captured, and one of our kernels would
                have to be loaded.
            torch.OutOfMemoryError: there is no memory for outputs and gradients.
        """
        problem = call.obstacle(query, key, value) if place is not None else "a tensor has no strides"
        if problem is not None:
            return Explanation(rung=Rung.SDPA, reason=problem)
        shape = call.shape(query, key, value, direction)
        if is_capturing(query):
            return self._earlier_general.get(place) or self._while_capturing(shape, query)
        found = self._climb_general(shape, query.detach(), key.detach(), value.detach(), call, sums)
        result = found if isinstance(found, Explanation) else GeneralPlan(*found, call, direction, sums)
        if len(self.general_plans) >= MAX_PLANS:
            self.general_plans.clear()
            self.ways = Ways()
        self.general_plans[place] = result
        if isinstance(result, GeneralPlan):
            watch(result)
        return result

    def _climb_general(
        self, shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor, call: Call, sums: bool
    ) -> tuple[Explanation, Launch] | Explanation:
        """Return the first config down the ladder that launches this call in this direction."""
        packed, is_backward = call.features.varlen, shape.direction is Direction.BACKWARD
        index, (out, lse) = query.device.index, new_results(query, value, packed=packed, sums=sums or is_backward)
        extras = (call.extras,) if takes_extras(call, shape.direction) else ()
        if shape.direction is Direction.FORWARD and not extras and call.extras.sinks is None:
            return self.climb(shape, index, lambda config: self._tried(config, shape, query, key, value, lse))
        arguments: tuple[Any, ...] = (query, key, value, out, lse, call.scale, *extras)
        if is_backward:
            gradients = new_gradients(query, key, value, packed=packed)
            inputs = (query, key, value, out.zero_(), torch.zeros_like(lse), torch.zeros_like(out))
            arguments = (*inputs, *gradients, call.scale, *extras)
        blocks = call.block_sizes
        attempt = partial(self._tried_once, shape=shape, arguments=arguments, call=call)
        return self.climb(shape, index, attempt, blocks, call.num_splits)

    def _tried_once(
        self, config: KernelConfig, shape: AttentionShape, arguments: tuple[Any, ...], call: Call
    ) -> Launch | str:
        """Return a launcher that has launched these arguments, or why the config does not launch."""

        def attempt() -> Launch:
            kernel, sunk = get_kernel(config.kernel), adds_sinks(call, shape.direction)
            own = kernel.bind_with_sinks(config, shape) if sunk else None
            if own is not None:
                return _launched(own, (*arguments[:6], call.extras))
            bind = kernel.bind_batch_invariant if call.num_splits else kernel.bind
            launch = _launched(bind(config, shape), arguments)
            return with_sink_pass(launch, takes_extras=takes_extras(call, shape.direction)) if sunk else launch

        return self._guarded(config, shape, arguments[:3], attempt, call.block_sizes)

    def explain(self, shape: AttentionShape, device: DeviceSpec | None) -> Explanation:
        """Return what serves a shape on a device, the current one by default, without launching anything."""
        if device is None:
            for plan in (*self.plans.values(), *self.general_plans.values()):
                explanation = plan if isinstance(plan, Explanation) else plan.explanation
                if explanation.shape == shape:
                    return explanation
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

    def _descend(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> KernelPlan | Explanation:
        """Return a plan with the first config down the ladder that launches; or why no config does."""
        shape = shape_of(query, key, value, is_causal)

        def checked(config: KernelConfig, launch: Launch) -> Launch | str:
            problem = canary.problem_of(config, launch, shape, query, key, value, empty_output(query, shape.head_dim_v))
            if problem is not None:
                self._failures[_kind(config, shape, query)] = problem
            return problem or launch

        index = query.device.index
        found = self.climb(shape, index, lambda config: self._tried(config, shape, query, key, value), check=checked)
        if isinstance(found, Explanation):
            return found
        explanation, launch = found
        return KernelPlan(explanation, launch, query, shape.head_dim_v, is_causal=is_causal)

    def climb(
        self,
        shape: AttentionShape,
        index: int | None,
        attempt: Callable[[KernelConfig], Launch | str],
        block_sizes: tuple[int, int] | None = None,
        num_splits: int = 0,
        *,
        check: Callable[[KernelConfig, Launch], Launch | str] | None = None,
    ) -> tuple[Explanation, Launch] | Explanation:
        """Return the first config down the ladder that launches on the device with this CUDA index; or why none does.

        attempt: a launcher of a config that has launched once, or why the config cannot. block_sizes: queries and keys
        of the blocks of a block mask, if there is one. num_splits: only configs with this number of splits, unless 0.
        check: of a launcher whose config was not measured for exactly this; returns it, or why it is not used.
        """
        device = self.device(index)
        if isinstance(device, str):
            return Explanation(rung=Rung.SDPA, reason=device, shape=shape)
        table, warnings = self.snapshot.table(device, self._seconds)
        passed_over: list[Rejection] = []
        steps = climb_down(table, shape, device.limits, strict=self._strict)
        for step in fixed_splits(shape, num_splits, device.limits) if num_splits else steps:
            if isinstance(step, Candidate) and block_sizes is not None:
                step = within_blocks(step, block_sizes, shape, device.limits)
            if isinstance(step, Rejection):
                passed_over.append(step)
                continue
            launch = attempt(step.config)
            if check is not None and step.rung is not Rung.EXACT and not isinstance(launch, str):
                launch = check(step.config, launch)
            if isinstance(launch, str):
                passed_over.append(Rejection(step.rung, launch))
                continue
            explanation = Explanation.of(step, shape, passed_over, warnings, device)
            logger.info("%s", explanation.headline)
            return explanation, launch
        return _nothing_fits(shape, passed_over, warnings, device.key)

    def _tried(
        self,
        config: KernelConfig,
        shape: AttentionShape,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lse: Tensor | None = None,
    ) -> Launch | str:
        """Return a launcher that has launched these tensors, with log-sum-exp or not, or why the config does not
        launch."""

        def attempt() -> Launch:
            out = empty_output(query, shape.head_dim_v)
            return _launched(get_kernel(config.kernel).bind(config, shape), (query, key, value, out, lse, 1.0))

        return self._guarded(config, shape, (query, key, value), attempt)

    def _guarded(
        self,
        config: KernelConfig,
        shape: AttentionShape,
        tensors: Sequence[Tensor],
        attempt: Callable[[], Launch],
        block_sizes: tuple[int, int] | None = None,
    ) -> Launch | str:
        """Return what the attempt yields, or why it fails.

        A failure is remembered for all lengths and batches, since registers and shared memory do not depend on them,
        but for these blocks of a block mask only: not every tile divides all of them.
        """
        problem = get_kernel(config.kernel).layout_problem(*tensors)
        if problem is not None:
            return problem
        kind = _kind(config, shape, tensors[0], block_sizes)
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
            f"A call must have run once before a CUDA graph captures it, since no kernel can be loaded meanwhile, but "
            f"{shape.label} is new. Call it before, or `attention.warmup([shape])`."
        )

    def _remember(self, place: Any, plan: Plan) -> None:
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
        self.plans[place] = plan
        watch(plan)


def _kind(config: KernelConfig, shape: AttentionShape, query: Tensor, block_sizes: Any = None) -> tuple[Any, ...]:
    """Return what a failure of a config holds for."""
    sizes = (shape.dtype, product_precision(shape.dtype), shape.head_dim, shape.head_dim_v, block_sizes)
    return (config, query.device, *sizes, shape.causal, shape.features)


def _launched(bound: Launch, arguments: tuple[Any, ...]) -> Launch:
    """Return the shortest launcher of a bound config, after it has computed these arguments, whose first one is the
    query."""
    query = arguments[0]
    with torch.cuda.device_of(query):
        if hasattr(bound, "pinned"):
            return on_its_device(bound.pinned(*arguments), query.device.index)
        bound(*arguments)
    return on_its_device(bound, query.device.index)


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
