"""A config bound to a shape, and the short way to launch it again.

`kernel[grid](...)` looks at every argument on every launch to find the compiled kernel: about 11 us. Where all that it
looks at is known to be as before, `CompiledKernel[grid](...)` starts the same code in about 7 us.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from blocktune.kernels.kernel import Launch

PINNED_TRITON = ((3, 6), (3, 9))
"""First and last Triton whose `CompiledKernel[grid](*arguments)` takes all of the kernel's arguments in order."""


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """What `AttentionKernel.bind` returns: launch(q, k, v, out, lse, scale).

    The arguments of the jitted function are `leading(q, k, v, out, lse, scale)`, which change with every call
    (pointers, descriptors, the scale), then `trailing(q, k, v, out)`, which depend on sizes and strides only,
    constexprs included.
    """

    function: Any
    grid: tuple[int, int, int]
    leading: Callable[..., tuple[Any, ...]]
    trailing: Callable[..., tuple[Any, ...]]
    options: Mapping[str, int]

    def __call__(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> None:
        self._launch(q, k, v, out, lse, scale)

    def _launch(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> Any:
        arguments = *self.leading(q, k, v, out, lse, scale), *self.trailing(q, k, v, out)
        return self.function[self.grid](*arguments, **self.options)

    def pinned(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> Launch:
        """Launches once, and returns the shortest launcher for tensors with the sizes, strides, data types and
        alignment of these, on their device. It is this object itself where there is no shorter way: in Triton's
        interpreter, or with a Triton that nobody tried it on.

        Raises:
            Exception: whatever Triton raises when the kernel cannot be compiled or launched.
        """
        compiled = self._launch(q, k, v, out, lse, scale)
        if not _can_pin(compiled):
            return self
        leading, trailing, runner = self.leading, self.trailing(q, k, v, out), compiled[self.grid]

        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> None:
            runner(*leading(q, k, v, out, lse, scale), *trailing)

        launch(q, k, v, out, lse, scale)  # writes the same result again: an unexpected signature shows here, not later
        return launch


def _can_pin(compiled: Any) -> bool:
    """Whether this is a compiled kernel (the interpreter gives none) of a Triton that is known.

    Profilers keep working: the runner passes on the launch hooks.
    """
    from triton.compiler import CompiledKernel

    major, minor = metadata.version("triton").split(".")[:2]
    first, last = PINNED_TRITON
    return isinstance(compiled, CompiledKernel) and first <= (int(major), int(minor)) <= last
