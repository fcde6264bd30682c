"""Whether configs of a call compute the same, on its arguments."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.launches.arguments import one_of_each
from blocktune.tuner.launches.launches import ConfigLaunch

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative error of a tensor, in the Frobenius norm: sums in another order, and some roundings. Other data
types must be equal."""


_CHUNK = 1 << 24
"""Elements that are compared at once: their copies in double precision take 256 MiB."""


class OutputCheck:
    """Compares what configs leave in the tensors of a call with what the first one leaves that is checked.

    The tensors are as before when a check begins and when it ends. Two copies of them are kept.
    """

    def __init__(self, call: AutotunedCall) -> None:
        found = {name: _tensor_of(value) for name, value in call.named.items()}
        self._tensors = {name: _memory_of(value) for name, value in found.items() if value is not None}
        self._before = {name: value.clone() for name, value in self._tensors.items()}
        self._right: dict[str, Tensor] | None = None

    def problem(
        self, call: AutotunedCall, config: LaunchConfig, launched: Callable[[], None] = lambda: None
    ) -> str | None:
        """Return what is wrong with the results of a config, or None. `launched` is called after the launch."""
        left = self._left_by(ConfigLaunch(call, config), launched)
        if self._right is None:
            self._right = left
            return None
        problems = (_difference(name, left[name], right) for name, right in self._right.items())
        return next((problem for problem in problems if problem is not None), None)

    def restore(self) -> None:
        """Let the tensors hold what they held."""
        for name, value in self._tensors.items():
            value.copy_(self._before[name])

    def _left_by(self, launch: ConfigLaunch, launched: Callable[[], None]) -> dict[str, Tensor]:
        """Return what the tensors hold after a launch."""
        self.restore()  # timed launches may have changed them
        launch.before()
        try:
            launch()
            launched()
            left = {name: value.clone() for name, value in self._tensors.items()}
        except Exception as error:
            launch.after(exception=error)
            raise
        launch.after()
        self.restore()
        return left


def _tensor_of(value: Any) -> Tensor | None:
    """Return a tensor, or that of a tensor descriptor; None for other arguments."""
    held = value if isinstance(value, Tensor) else getattr(value, "base", None)
    return held if isinstance(held, Tensor) else None


def _memory_of(tensor: Tensor) -> Tensor:
    """Return each element of a tensor once, without its history: autograd must not count a restored input as changed,
    and an expanded tensor cannot be written."""
    return one_of_each(tensor.data)


def _difference(name: str, found: Tensor, right: Tensor) -> str | None:
    if not right.is_floating_point():
        return None if torch.equal(found, right) else f"`{name}` differs from what the first config computes"
    wrong = values = 0.0
    for ours, theirs in zip(_doubles(found), _doubles(right), strict=True):
        finite = torch.isfinite(theirs)
        same = (ours == theirs) | (torch.isnan(ours) & torch.isnan(theirs))
        if not bool(same[~finite].all()) or not bool(torch.isfinite(ours[finite]).all()):
            return f"`{name}` is not finite where the first config's is, or the other way round"
        wrong += float((ours - theirs)[finite].square().sum())
        values += float(theirs[finite].square().sum())
    error = (wrong / max(values, 1e-60)) ** 0.5
    allowed = TOLERANCES.get(right.dtype, 0.0)
    return None if error <= allowed else f"`{name}` differs from what the first config computes by {error:.1e}"


def _doubles(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements of a tensor in double precision, a part at a time. Types of 8 bits can do no more than be
    converted."""
    for part in tensor.reshape(-1).split(_CHUNK):
        yield part.double()
