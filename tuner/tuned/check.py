"""Whether a candidate of a tuned function computes what its reference computes, from the same arguments."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.base.kernel import Thunk
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.correctness.forward import ROWS_PER_TILE, tile_norms

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative error of 64 rows, in the Frobenius norm: some roundings to the data type, and for float32 sums of
products in tf32's neighbourhood. Other data types must be equal."""


class CallResult:
    """What the last launch returned."""

    def __init__(self) -> None:
        self.outputs: tuple[Tensor, ...] = ()


class CallQuestion:
    """One call with the right answer. It stands where a question of a shape stands in `Bench`.

    A launch allocates its own outputs, which may come from memory that an earlier launch wrote. `poison` therefore
    fills what was returned before it is given back, and at first memory of the same sizes.
    """

    def __init__(self, arguments: Mapping[str, Any], reference: Callable[..., Any], tolerance: float | None) -> None:
        self._arguments = dict(arguments)
        self._before = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
        self._answer = tuple(output.clone() for output in outputs_of(reference(**self._arguments), "the reference"))
        self._tolerance = tolerance

    def new_result(self) -> CallResult:
        """A place for what launches return, with poisoned memory in it."""
        result = CallResult()
        result.outputs = tuple(torch.empty_like(output) for output in self._answer)
        return result

    def new_lse(self) -> None:
        """Functions of people have none."""

    def poison(self, result: CallResult) -> None:
        """Fills what was returned last with values that are never right, and gives the memory back."""
        for output in result.outputs:
            output.fill_(float("nan") if output.is_floating_point() else _no_answer(output.dtype))
        result.outputs = ()

    def thunk(self, launch: Callable[..., Any], result: CallResult, lse: None = None) -> Thunk:
        """One launch with the arguments into `result`."""
        del lse

        def run() -> None:
            result.outputs = outputs_of(launch(**self._arguments), "the function")

        return run

    def problem(self, result: CallResult, lse: None = None) -> str | None:
        """What is wrong with a result, or None."""
        del lse
        changed = self._changed_arguments()
        if changed:
            return f"the argument `{changed[0]}` was changed; a tuned function returns new tensors"
        found, right = result.outputs, self._answer
        kinds = [[(output.dtype, tuple(output.shape)) for output in outputs] for outputs in (found, right)]
        if kinds[0] != kinds[1]:
            return f"it returns {kinds[0]}, the reference {kinds[1]}"
        problems = (self._difference(number, *pair) for number, pair in enumerate(zip(found, right, strict=True)))
        return next((problem for problem in problems if problem is not None), None)

    def _changed_arguments(self) -> list[str]:
        """The tensors that a launch wrote to, which are restored: the next candidate must not suffer from it."""
        changed = []
        for name, before in self._before.items():
            if not torch.equal(_bytes(self._arguments[name]), _bytes(before)):
                self._arguments[name].copy_(before)
                changed.append(name)
        return changed

    def _difference(self, number: int, found: Tensor, right: Tensor) -> str | None:
        if not right.is_floating_point():
            wrong = int((found != right).sum())
            return f"{wrong} of {right.numel()} values of output {number} are wrong" if wrong else None
        finite = torch.isfinite(right)
        others = ~finite & ~((found == right) | (torch.isnan(found) & torch.isnan(right)))
        bad = int((finite & ~torch.isfinite(found)).sum()) + int(others.sum())
        if bad:
            return f"{bad} of {right.numel()} values of output {number} are not finite as they should be, or not equal"
        allowed = TOLERANCES.get(right.dtype, 0.0) if self._tolerance is None else self._tolerance
        worst, tile = _worst_tile(found.where(finite, 0), right.where(finite, 0))
        if worst <= allowed:
            return None
        return (
            f"relative error {worst:.2e} in rows {tile * ROWS_PER_TILE}.. of output {number}; allowed is {allowed:.0e}"
        )


def outputs_of(returned: Any, who: str) -> tuple[Tensor, ...]:
    """The tensors that a function returned.

    Raises:
        UsageError: it returned something else.
    """
    outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    if not outputs or not all(isinstance(output, Tensor) for output in outputs):
        raise UsageError(f"A tuned function returns a tensor or some, but {who} returned {type(returned).__name__}.")
    return outputs


def _worst_tile(found: Tensor, right: Tensor) -> tuple[float, int]:
    """The largest relative error of 64 rows, and which 64. Rows that should be 0 count by the mean norm of all."""
    if not right.numel():
        return 0.0, 0
    width = right.shape[-1] if right.dim() > 1 else 1
    found, right = (tensor.reshape(1, -1, width).double() for tensor in (found, right))
    scale = tile_norms(right)
    errors = (tile_norms(found - right) / scale.clamp_min(max(1e-30, 1e-3 * float(scale.mean()))))[0]
    return float(errors.max()), int(errors.argmax())


def _no_answer(dtype: torch.dtype) -> int | bool:
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _bytes(tensor: Tensor) -> Tensor:
    """The values as they are stored: a NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
