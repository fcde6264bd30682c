"""The miss path of the dispatcher: from the first call with tensors of a kind to a plan that has run once."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.files.incidents import reason_of
from blocktune.kernels.files.shape_record import record
from blocktune.kernels.hardware.device import ComputeLimits, DeviceSpec, current_device
from blocktune.kernels.hardware.side_thread import run_on_side_thread
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.runtime.dispatch.call import Call, PlanUse
from blocktune.runtime.dispatch.fast_path import FastPath
from blocktune.runtime.dispatch.launches.launch_trial import LaunchTrial
from blocktune.runtime.dispatch.launches.plans import KernelPlan, Plan, TorchPlan
from blocktune.runtime.dispatch.launches.triton_key import begin_triton_key
from blocktune.runtime.dispatch.obstacles import is_capturing
from blocktune.runtime.dispatch.snapshot import Snapshot
from blocktune.runtime.dispatch.torch_attention import sdpa_backend
from blocktune.runtime.dispatch.torch_math import sdpa_call_arguments
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.fallback import ConfigTable, climb_down, fixed_splits
from blocktune.runtime.selection.ladder import Candidate, Rejection, Rung
from blocktune.runtime.selection.misses import watch
from blocktune.runtime.selection.pytorch_rival import MAX_SCORES_BYTES, scores_bytes
from blocktune.runtime.selection.reasons import explain_candidate
from blocktune.runtime.store_reader.background import CALL_SECONDS, MAX_SECONDS

Taken = TypeVar("Taken")

logger = logging.getLogger("blocktune")

MAX_PLANS = 4096
"""Plans kept at once. A model that decodes token by token makes a new shape with every step; they must not pile up."""


class Resolver:
    """Finds plans and keeps all that was learned on the way: plans, devices, configs, and what failed to launch.

    Not for several threads at once; reading `plans` is. strict: only exact measurements are taken, and waited for.
    """

    def __init__(self, snapshot: Snapshot, *, strict: bool = False) -> None:
        self.plans: dict[Any, Plan] = {}  # by `Call.place`, or by the reason why none was looked for
        self.unpadded: dict[Any, TorchPlan] = {}  # of kinds of calls whose copies PyTorch would compute
        self.fast_path = FastPath()  # to the plans
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

    def renew(self) -> "Resolver":
        """Return a resolver that knows what this one does, but for the plans: configs have come that they do not know
        of.

        While a CUDA graph is captured it goes back to them: their kernels are loaded.
        """
        made = Resolver(self.snapshot, strict=self._strict)
        made._devices, made._failures = self._devices, self._failures
        made._earlier = self._earlier | self.plans
        return made

    def torch_plan(self, reason: str) -> TorchPlan:
        """Return the plan of calls that are PyTorch's, whatever the configs are."""
        plan = self.plans.get(reason)
        if not isinstance(plan, TorchPlan):
            plan = TorchPlan(Explanation(rung=Rung.SDPA, reason=reason))
            self._keep(reason, plan)
        return plan

    def resolve(
        self, place: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, direction: Direction, use: PlanUse
    ) -> Plan:
        """Return the plan for calls of this `Call.place`.

        It is remembered; one that was made while a CUDA graph is captured, for captures alone. An error of our own is
        an incident, and PyTorch computes the call.

        Raises:
            UsageError: a size is invalid for attention.
            torch.OutOfMemoryError: there is no memory for outputs and gradients.
        """
        obstacle = call.obstacle(query, key, value)
        if obstacle is not None:
            return self.torch_plan(obstacle)
        shape = call.shape(query, key, value, direction)
        new_trial = partial(LaunchTrial.of, shape, query.detach(), key.detach(), value.detach(), sums=use.sums)
        try:
            if use.competes:
                backend = sdpa_backend(sdpa_call_arguments(query, key, value, call))
                use = use._replace(competes=_may_compete(shape, backend))
            if not is_capturing(query):
                plan = self._make_plan(new_trial(call), use)
                self._keep(place, plan)
            elif place in self._earlier:
                plan = self._earlier[place]
            else:
                plan = self._earlier[place] = run_on_side_thread(
                    lambda: self._make_plan(new_trial(call.blank(), compared=False), use), query.device
                )
        except torch.OutOfMemoryError:
            raise  # PyTorch would need the same memory
        except Exception as error:
            plan = TorchPlan(_failure_explanation(error, shape))
            plans = self._earlier if is_capturing(query) else self.plans
            plans[place] = plan  # without what counts misses, which may be what has failed
        return plan

    def _make_plan(self, trial: LaunchTrial, use: PlanUse) -> Plan:
        """Return the plan of the calls of a trial, whose kernels have been launched once.

        While a CUDA graph is captured this runs on another stream, so that none of it becomes part of the graph. What
        the captured kernels will compute is not in memory yet: the trial has blank tensors then, and is not compared.
        """
        begin_triton_key()
        device, shape = self.device(trial.device_index), trial.shape
        found = self._climb(
            shape, device, trial.call, lambda step: self._try_config(step, trial), competes=use.competes
        )
        if isinstance(found, Explanation):
            return TorchPlan(found)
        logger.info("%s", found[0].headline)
        return KernelPlan(*found, trial.call, shape.direction, use.sums, trial.arguments[:4])

    def keep_unpadded(self, kind: Any, plan: TorchPlan) -> None:
        """Remember that PyTorch computes the calls of a kind without copies of ours."""
        if len(self.unpadded) >= MAX_PLANS:
            self.unpadded.clear()
        self.unpadded[kind] = plan

    def _keep(self, place: Any, plan: Plan) -> None:
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
            self.fast_path.clear()
        self.plans[place] = plan
        watch(plan)
        record(plan.explanation.shape)

    def explain(self, shape: AttentionShape, device: DeviceSpec | None) -> Explanation:
        """Return what serves a shape on a device, the current one by default, without launching anything."""
        if device is None:
            for place, plan in list(self.plans.items()):
                if plan.explanation.shape == shape and (isinstance(place, str) or place[1].competes):
                    return plan.explanation
        try:
            found = self._climb(shape, device or self.device(None), None, lambda step: None, competes=True)
        except Exception as error:
            return _failure_explanation(error, shape)
        return found if isinstance(found, Explanation) else found[0]

    def _climb(
        self,
        shape: AttentionShape,
        device: DeviceSpec | str,
        call: Call | None,
        take: Callable[[Candidate], Taken | str],
        *,
        competes: bool,
    ) -> tuple[Explanation, Taken] | Explanation:
        """Return the first config down the ladder that is taken, with what it is taken as; or why none is.

        Args:
            shape: of one direction.
            device: where, or why that is not known.
            call: what its options demand of the configs is heeded.
            take: returns why a config is not taken, or what it is taken as.
            competes: whether PyTorch's kernel may serve a shape of which nothing near was measured.
        """
        if isinstance(device, str):
            return Explanation(rung=Rung.SDPA, reason=device, shape=shape)
        table, warnings = self.snapshot.table(device, self._seconds)
        passed_over: list[Rejection] = []
        for step in self._steps(table, shape, device.limits, call, competes):
            if isinstance(step, Rejection) and step.rung is Rung.SDPA:
                return _for_pytorch(step.reason, shape, passed_over, warnings, device.key)
            taken = step.reason if isinstance(step, Rejection) else take(step)
            if isinstance(taken, str):
                passed_over.append(Rejection(step.rung, taken))
                continue
            assert isinstance(step, Candidate)
            return explain_candidate(step, shape, passed_over, warnings, device), taken
        return _nothing_fits(shape, passed_over, warnings, device.key)

    def _steps(
        self, table: ConfigTable, shape: AttentionShape, limits: ComputeLimits, call: Call | None, competes: bool
    ) -> Iterable[Candidate | Rejection]:
        """Return the configs down the ladder, and why others do not compute the call."""
        if call is not None and call.num_splits:
            return fixed_splits(shape, call.num_splits, limits)
        blocks = None if call is None else call.block_sizes
        return climb_down(table, shape, limits, strict=self._strict, block_sizes=blocks, competes=competes)

    def _try_config(self, step: Candidate, trial: LaunchTrial) -> Launch | str:
        """Return a launcher of a config that has launched once, or why it is not used.

        A failure is remembered for all lengths and batches, since registers and shared memory do not depend on them,
        but for these blocks of a block mask only: not every tile divides all of them.
        """
        config, shape = step.config, trial.shape
        kernel = get_kernel(config.kernel)
        problem = kernel.layout_problem(*trial.arguments[:3])
        if problem is None and shape.features.cached:
            problem = kernel.cache_problem(*trial.arguments[1:3])
        if problem is not None:
            return problem
        kind = trial.kind(config)
        if kind in self._failures:
            return self._failures[kind]
        rows = None if step.rung is Rung.EXACT else trial.rows()
        try:
            launch = trial.launched(kernel, config)
        except torch.OutOfMemoryError:
            raise  # no fault of the config: PyTorch would need the same memory
        except Exception as error:  # compilers and drivers raise what they like
            problem = f"{config.label} does not launch: {type(error).__name__}: {error}"
            logger.warning("%s: %.500s. The next source is taken.", shape.label, problem)
        else:
            problem = trial.problem(config, rows)
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


def _may_compete(shape: AttentionShape, backend: int) -> bool:
    """Return whether PyTorch may serve a call by the backend that it chooses: a fused one, or its mathematics where the
    scores take little memory."""
    mathematics: int = SDPBackend.MATH.value
    return scores_bytes(shape) <= MAX_SCORES_BYTES if backend == mathematics else backend > mathematics


def _for_pytorch(
    reason: str, shape: AttentionShape, passed_over: list[Rejection], warnings: tuple[str, ...], device: str
) -> Explanation:
    return Explanation(
        rung=Rung.SDPA,
        reason=reason,
        shape=shape,
        passed_over=tuple(passed_over),
        warnings=warnings,
        device=device,
    )


def _failure_explanation(error: Exception, shape: AttentionShape) -> Explanation:
    """Return why PyTorch computes a shape for which our own code has raised an error."""
    reason = reason_of(error, shape)
    return Explanation(rung=Rung.SDPA, reason=reason, shape=shape, warnings=(reason,))


def _nothing_fits(
    shape: AttentionShape, passed_over: list[Rejection], warnings: tuple[str, ...], device: str
) -> Explanation:
    wanted = f" with {shape.features.label}" if shape.features else ""
    gradients = "gradients are needed, and " if shape.direction is Direction.BACKWARD else ""
    reason = f"{gradients}no config of our kernels runs this shape{wanted} on this device"
    return _for_pytorch(reason, shape, passed_over, warnings, device)
