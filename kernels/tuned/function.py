"""`@tuned`: your own Triton kernels, searched, checked, kept and dispatched as ours.

    @tuned(
        parameters={"block": (1024, 2048, 4096, 8192), "num_warps": (4, 8, 16)},
        constraints={"a block covers a row": lambda config, x: config["block"] >= x.shape[1]},
        reference=lambda x: torch.softmax(x, dim=-1),
    )
    def softmax(x, *, block, num_warps):
        out = torch.empty_like(x)
        softmax_kernel[(x.shape[0],)](out, x, x.stride(0), x.shape[1], BLOCK=block, num_warps=num_warps)
        return out

    softmax(x)  # with the best parameters known for these sizes on this device

`blocktune.tune_function(softmax, [x])` finds them.
"""

import inspect
import logging
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.dispatch.plan import is_capturing
from blocktune.kernels.dispatch.resolver import MAX_PLANS
from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.stored.background import CALL_SECONDS, MAX_SECONDS, BackgroundRead
from blocktune.kernels.stored.provenance import present_identity
from blocktune.kernels.tuned.choices import Choices, Constraint
from blocktune.kernels.tuned.config import Problem, UserConfig
from blocktune.kernels.tuned.fallback import UserExplanation, UserRung, UserWinner, candidates, stored_winners
from blocktune.kernels.values.errors import UsageError

logger = logging.getLogger("blocktune")


@dataclass(frozen=True, slots=True)
class _Plan:
    """What serves a kind of call: the function with these parameters, or the reference."""

    run: Callable[..., Any]
    parameters: Mapping[str, int]
    explanation: UserExplanation


def tuned(
    *,
    parameters: Mapping[str, Sequence[int]],
    reference: Callable[..., Any],
    constraints: Mapping[str, Constraint] | None = None,
    default: Mapping[str, int] | None = None,
    tolerance: float | None = None,
) -> "Callable[[Callable[..., Any]], TunedFunction]":
    """Makes a function that launches Triton kernels choose its parameters by what was measured.

    The function takes tensors and plain values, and its parameters as keywords. It returns new tensors, one or a tuple,
    and leaves its arguments alone. To be tuned it has to be importable, since candidates run in a process of their own.

    Args:
        parameters: the choices of each; all are integers. `num_warps` and `num_stages` are parameters like others.
        reference: takes the same arguments without the parameters and returns what is right.
        constraints: by their rule in words, what a config must fulfil to run a call; nothing that is only slow. They
            are checked once per kind of call, so they may look at sizes, not at what stands in tensors.
        default: the parameters that serve until something better is known; the first ones that fulfil the constraints
            unless given.
        tolerance: the largest relative error of 64 rows of an output, in the Frobenius norm; by its data type unless
            given.

    Raises:
        UsageError: a parameter has no choices, or the function does not take it.
    """

    def decorate(function: Callable[..., Any]) -> TunedFunction:
        return TunedFunction(
            function,
            parameters={name: tuple(choices) for name, choices in parameters.items()},
            reference=reference,
            constraints=dict(constraints or {}),
            default=default,
            tolerance=tolerance,
        )

    return decorate


class TunedFunction:
    """A function with its choices of parameters; `tuned` makes one. Threads may share it."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        parameters: Mapping[str, tuple[int, ...]],
        reference: Callable[..., Any],
        constraints: Mapping[str, Constraint],
        default: Mapping[str, int] | None,
        tolerance: float | None,
    ) -> None:
        self.fn = function
        self.reference = reference
        self.tolerance = tolerance
        self.name = f"{function.__module__}:{function.__qualname__}"
        self.choices = Choices(self.name, parameters, constraints, default)
        self.__doc__, self.__name__, self.__wrapped__ = function.__doc__, function.__name__, function
        self._signature = _signature_without(function, parameters)
        self._lock = threading.RLock()
        self._plans: dict[Any, _Plan] = {}
        self._earlier: dict[Any, _Plan] = {}  # plans that were made before the store was read
        self._winners: dict[int, BackgroundRead[list[UserWinner]]] = {}  # by CUDA index
        self._late = 0  # how many of them came after plans were made without them

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, with the parameters that serve this kind of call best.

        Raises:
            UsageError: an argument is neither a tensor nor a plain value, or the call is new while a CUDA graph is
                captured.
        """
        plan = self._known_plan(args, kwargs)
        if plan is None:
            return self._call_slowly(args, kwargs)[1]
        return plan.run(*args, **kwargs, **plan.parameters)

    def explain(self, *args: Any, **kwargs: Any) -> UserExplanation:
        """What serves a call with these arguments, and why; the function runs if the call is new. Waits until the store
        is read."""
        self._settle(self.bound(args, kwargs))
        plan = self._known_plan(args, kwargs) or self._call_slowly(args, kwargs)[0]
        return plan.explanation

    def run(self, config: UserConfig, *args: Any, **kwargs: Any) -> Any:
        """The function's result with these parameters, whatever is known."""
        return self.fn(*args, **kwargs, **config.parameters)

    def reload(self) -> None:
        """Read the store again for the GPUs seen so far, then forget all plans.

        Waits for that, up to `MAX_SECONDS` of stored/background.py.
        """
        known = {index: self._begun(index) for index in self._winners}
        for winners in known.values():
            winners.value(MAX_SECONDS)
        self._winners, self._plans, self._earlier, self._late = known, {}, {}, 0

    @cached_property
    def source_hash(self) -> str:
        """16 hexadecimal digits that change with the function's source or that of the jitted functions it calls."""
        return hash_of_sources(self)

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, defaults included.

        Raises:
            UsageError: they are not those of the function.
        """
        try:
            binding = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"`{self.name}` takes {self._signature} besides its parameters: {error}.") from error
        binding.apply_defaults()
        return dict(binding.arguments)

    def _known_plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Plan | None:
        try:
            return self._plans.get(_place(args, kwargs))
        except TypeError:  # an argument that is no key; a problem does not know it either, and says so
            return None

    def _call_slowly(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[_Plan, Any]:
        """The plan of a new kind of call, which is kept, and the call's result."""
        arguments = self.bound(args, kwargs)
        tensor = _on_a_gpu(arguments)
        if tensor is not None and is_capturing(tensor):
            earlier = self._earlier.get(_place(args, kwargs))
            if earlier is not None:
                return earlier, earlier.run(*args, **kwargs, **earlier.parameters)
            raise UsageError(
                f"A call must have run once before a CUDA graph captures it, but {Problem.of(arguments).label} is new "
                f"to {self.name}. Call it before."
            )
        with self._lock:
            plan, result = self._resolve(arguments, None if tensor is None else tensor.device.index, args, kwargs)
            if len(self._plans) >= MAX_PLANS:
                self._plans = {}
            self._plans[_place(args, kwargs)] = plan
        return plan, result

    def _resolve(
        self, arguments: Mapping[str, Any], device: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[_Plan, Any]:
        """The best plan that has run this very call, and its result."""
        problem, passed_over = Problem.of(arguments), list[str]()
        for rung, winner in candidates(self._winners_on(device), problem):
            broken = self.choices.violations(winner.config, arguments)
            result = None
            if not broken:
                broken, result = self._tried(winner.config, args, kwargs)
            if not broken:
                explanation = UserExplanation(
                    rung=rung,
                    problem=problem,
                    config=winner.config,
                    tuned_for=winner.problem,
                    time_us=winner.time_us,
                    passed_over=tuple(passed_over),
                )
                return _Plan(self.fn, winner.config.parameters, explanation), result
            passed_over.append(f"{rung}: {broken[0]}")
        default = self.choices.default(arguments)
        if default is None:
            return self._by_reference(problem, passed_over, args, kwargs)
        try:
            result = self.run(default, *args, **kwargs)
        except Exception as error:
            if device is not None or not _is_of_triton(error):
                raise
            reason = f"{UserRung.DEFAULT}: Triton runs no kernel without a GPU ({type(error).__name__}: {error})"
            return self._by_reference(problem, [*passed_over, reason], args, kwargs)
        found = UserExplanation(rung=UserRung.DEFAULT, problem=problem, config=default, passed_over=tuple(passed_over))
        logger.info("%s: %s", self.name, found)
        return _Plan(self.fn, default.parameters, found), result

    def _by_reference(
        self, problem: Problem, passed_over: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[_Plan, Any]:
        """The plan of a call that no config can run, and its result."""
        found = UserExplanation(rung=UserRung.REFERENCE, problem=problem, config=None, passed_over=tuple(passed_over))
        logger.info("%s: %s", self.name, found)
        return _Plan(self.reference, {}, found), self.reference(*args, **kwargs)

    def _tried(self, config: UserConfig, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[str, ...], Any]:
        """What a config breaks by running, and the result."""
        try:
            return (), self.run(config, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers and drivers raise what they like
            logger.warning("%s does not run: %.500s. The next rung is taken.", config.label, error)
            return (f"{config.label} does not run: {type(error).__name__}: {error}",), None

    def _winners_on(self, device: int | None) -> list[UserWinner]:
        """What is stored for a GPU, as far as it is read; nothing without one, where kernels run in the interpreter."""
        if device is None:
            return []
        if device not in self._winners:
            self._winners[device] = self._begun(device)
        return self._winners[device].value(CALL_SECONDS) or []

    def _begun(self, index: int) -> BackgroundRead[list[UserWinner]]:
        """The reading of the store for a GPU."""
        try:
            device = current_device(index)
            present_identity(device, self.source_hash)  # once in a process, which takes longer than the reading
        except Exception as error:  # besides our own errors, warnings that the user has turned into errors
            logger.warning("%s is not tuned here: %s", self.name, error)
            return BackgroundRead(list, self._renew)
        name, source_hash = self.name, self.source_hash
        winners = BackgroundRead(lambda: stored_winners(name, source_hash, device), self._renew)
        winners.begin()
        return winners

    def _settle(self, arguments: Mapping[str, Any]) -> None:
        """Waits until the store is read for the GPU of these arguments: what is decided then stays."""
        tensor = _on_a_gpu(arguments)
        if tensor is not None:
            self._winners_on(tensor.device.index)
            self._winners[tensor.device.index].value(MAX_SECONDS)
            self._renew()

    def _renew(self) -> None:
        """Forgets the plans if they were made without what has been read since. Any thread may call it."""
        late = sum(winners.is_late for winners in list(self._winners.values()))
        if late != self._late:
            self._late, self._earlier, self._plans = late, self._earlier | self._plans, {}


def _on_a_gpu(arguments: Mapping[str, Any]) -> Tensor | None:
    """The first tensor on a GPU."""
    return next((value for value in arguments.values() if isinstance(value, Tensor) and value.is_cuda), None)


def _is_of_triton(error: Exception) -> bool:
    """Whether Triton itself raised an error, rather than the function that launches."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).partition(".")[0] == "triton"


def _place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key of a plan: the kinds of all arguments as they were passed."""
    kinds = [
        (value.dtype, value.shape, value.stride(), value.device) if isinstance(value, Tensor) else (type(value), value)
        for value in (*args, *kwargs.values())
    ]
    return (*kinds, *kwargs)


def _signature_without(function: Callable[..., Any], parameters: Mapping[str, Any]) -> inspect.Signature:
    """The function's signature without the tuned parameters.

    Raises:
        UsageError: it does not take one of them.
    """
    signature = inspect.signature(function)
    missing = [name for name in parameters if name not in signature.parameters]
    if missing:
        raise UsageError(
            f"A tuned function takes its parameters as keywords, but {function.__qualname__}{signature} takes no "
            f"{', '.join(missing)}. Add it after `*`."
        )
    return signature.replace(
        parameters=[entry for name, entry in signature.parameters.items() if name not in parameters]
    )
