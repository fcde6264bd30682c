"""A config bound to a shape, and the short way to launch it again.

`kernel[grid](...)` looks at every argument on every launch to find the compiled kernel: about 11 us. Where all that it
looks at is known to be as before, `CompiledKernel[grid](...)` starts the same code in about 7 us, and what stands under
it in less (kernels/base/direct_launch.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from blocktune.kernels.base.direct_launch import Describe, direct_launcher, with_descriptors
from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras

DIRECT_TRITON = (3, 6)
"""The Triton whose launcher kernels/base/direct_launch.py knows from inside."""

PINNED_TRITON = ((3, 6), (3, 9))
"""First and last Triton whose `CompiledKernel[grid](*arguments)` takes all of the kernel's arguments in order."""


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """What `AttentionKernel.bind` returns: launch(q, k, v, out, lse, scale).

    The arguments of the jitted function are `leading(q, k, v, out, lse, scale)`, which change with every call
    (tensors, the scale), then `trailing(q, k, v, out)`, which depend on sizes and strides only, constexprs included.
    descriptors: the places of leading tensors that the function gets as a descriptor, and what makes it.
    """

    function: Any
    grid: tuple[int, int, int]
    leading: Callable[..., tuple[Any, ...]]
    trailing: Callable[..., tuple[Any, ...]]
    options: Mapping[str, int]
    descriptors: tuple[tuple[int, Describe], ...] = ()

    def __call__(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> None:
        self._launch(q, k, v, out, lse, scale)

    def _launch(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> Any:
        arguments = self.arguments(q, k, v, out, lse, scale)
        return self.function[self.grid](*arguments, **self.options)

    def described(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> Sequence[Any]:
        """Return the leading arguments as the jitted function takes them."""
        return with_descriptors(self.leading(q, k, v, out, lse, scale), self.descriptors)

    def arguments(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> tuple[Any, ...]:
        """Return all arguments of the jitted function."""
        return *self.described(q, k, v, out, lse, scale), *self.trailing(q, k, v, out)

    def pinned(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> Launch:
        """Launch once, and return the shortest launcher for tensors with the sizes, strides, data types and alignment
        of these, on their device.

        It is this object itself where there is no shorter way: in Triton's interpreter, or with an untried Triton.

        Raises:
            Exception: whatever Triton raises when the kernel cannot be compiled or launched.
        """
        compiled = self._launch(q, k, v, out, lse, scale)
        if not can_pin(compiled):
            return self
        launch = launcher_of(compiled, self.grid, self.leading, self.trailing(q, k, v, out), self.descriptors)
        launch(q, k, v, out, lse, scale)  # writes the same result again: an unexpected signature shows here, not later
        return launch


class ExtrasLaunch(TritonLaunch):
    """`TritonLaunch` of a shape with features: launch(q, k, v, out, lse, scale, extras), and `leading` takes the extras
    as well."""

    __slots__ = ()

    def __call__(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> None:
        self._launch(q, k, v, out, lse, scale, extras)

    def _launch(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> Any:
        return self.function[self.grid](*self.arguments(q, k, v, out, lse, scale, extras), **self.options)

    def arguments(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS
    ) -> tuple[Any, ...]:
        """Return all arguments of the jitted function."""
        leading = with_descriptors(self.leading(q, k, v, out, lse, scale, extras), self.descriptors)
        return *leading, *self.trailing(q, k, v, out)

    def pinned(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> Launch:
        """Pin the launch as `TritonLaunch.pinned` does; the tensors of the extras must keep their alignment, too."""
        compiled = self._launch(q, k, v, out, lse, scale, extras)
        if not can_pin(compiled):
            return self
        launch = launcher_of(compiled, self.grid, self.leading, self.trailing(q, k, v, out), self.descriptors)
        launch(q, k, v, out, lse, scale, extras)
        return launch


def launcher_of(
    compiled: Any,
    grid: tuple[int, int, int],
    leading: Callable[..., tuple[Any, ...]] | None,
    trailing: Sequence[Any],
    descriptors: Sequence[tuple[int, Describe]] = (),
) -> Launch:
    """Return the shortest launcher of a compiled kernel that this Triton has; arguments as in `direct_launcher`."""
    direct = direct_of(compiled, grid, leading, trailing, descriptors)
    if direct is not None:
        return direct
    runner = compiled[grid]

    def launch(*arguments: Any) -> None:
        values = arguments if leading is None else leading(*arguments)
        runner(*with_descriptors(values, descriptors), *trailing)

    return launch


def direct_of(
    compiled: Any,
    grid: tuple[int, int, int],
    leading: Callable[..., tuple[Any, ...]] | None,
    trailing: Sequence[Any],
    descriptors: Sequence[tuple[int, Describe]] = (),
) -> Launch | None:
    """Return `direct_launcher`, or None with another Triton than its own. It takes addresses in place of
    tensors."""
    if _triton_version() != DIRECT_TRITON:
        return None
    return direct_launcher(compiled, grid, leading, trailing, descriptors)


def can_pin(compiled: Any) -> bool:
    """Return whether this is a compiled kernel (the interpreter gives none) of a Triton that is known.

    Profilers keep working: the runner passes on the launch hooks.
    """
    from triton.compiler import CompiledKernel

    first, last = PINNED_TRITON
    return isinstance(compiled, CompiledKernel) and first <= _triton_version() <= last


@cache
def _triton_version() -> tuple[int, int]:
    major, minor = metadata.version("triton").split(".")[:2]
    return int(major), int(minor)
