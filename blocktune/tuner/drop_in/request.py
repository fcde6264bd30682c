"""A call of an autotuned kernel as plain values, of which any process makes it: `LaunchRequest`."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call import AutotunedCall, positional
from blocktune.runtime.autotuned.config import Plain
from blocktune.tuner.drop_in.autotune import space
from blocktune.tuner.drop_in.named import kernel_named
from blocktune.tuner.offline.specialization import object_named

Named = tuple[tuple[str, Plain], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """A call to tune.

    kernel: `module:function`. arguments: the function that makes the call's arguments and `grid` from sizes, likewise.
    sizes: given to it by name. choices: values of parameters that replace the kernel's list. expand: how many configs
    beyond the list may be tried. folder: where modules are looked for, too.
    """

    kernel: str
    arguments: str
    sizes: Named = ()
    choices: tuple[tuple[str, tuple[Plain, ...]], ...] = ()
    expand: int = 0
    folder: str = ""

    @property
    def label(self) -> str:
        """A short name for people, such as `scale n=4096`."""
        return " ".join([self.kernel.rpartition(":")[2], *(f"{name}={value}" for name, value in self.sizes)])

    @property
    def flops(self) -> int:
        """What a launch computes is not known, so that requests are taken in their order."""
        return 0

    @contextlib.contextmanager
    def open_call(self) -> Iterator[AutotunedCall]:
        """Yield the call, whose arguments are made now. Modules of the folder can be imported meanwhile, also by the
        process that compiles.

        Raises:
            UsageError: a name is none, or the arguments do not fit.
        """
        with importable_from(self.folder):
            configs = space(**dict(self.choices)) if self.choices else ()
            kernel = kernel_named(self.kernel, configs, [name for name, _ in self.sizes], self.expand)
            args, kwargs = positional(
                kernel.tuner, arguments_for(self.arguments, function_of(self.arguments), dict(self.sizes))
            )
            yield kernel.call_of(args, {"warmup": False, **kwargs})

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "arguments": self.arguments,
            "sizes": [list(size) for size in self.sizes],
            "choices": [[name, list(values)] for name, values in self.choices],
            "expand": self.expand,
            "folder": self.folder,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        sizes = tuple((name, value) for name, value in data["sizes"])
        choices = tuple((name, tuple(values)) for name, values in data["choices"])
        return cls(**dict(data) | {"sizes": sizes, "choices": choices})


@contextlib.contextmanager
def importable_from(folder: str) -> Iterator[None]:
    """Let modules of a folder be imported, as `python -m` does with the working folder."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def function_of(name: str) -> Callable[..., Any]:
    """Return the Python function with a name `module:function`.

    Raises:
        UsageError: there is none.
    """
    found = object_named(name)
    if not callable(found):
        raise UsageError(f"`--args` must name a function, but {name} is a {type(found).__name__}.")
    function: Callable[..., Any] = found
    return function


def arguments_for(name: str, make: Callable[..., Any], sizes: Mapping[str, Plain]) -> dict[str, Any]:
    """Return the arguments of a launch, by name, its `grid` included.

    Raises:
        UsageError: the function does not take these sizes, or returns something else.
    """
    try:
        made = make(**sizes)
    except TypeError as error:
        given = ", ".join(f"{key}={value}" for key, value in sizes.items()) or "no sizes"
        raise UsageError(f"{name} takes the sizes of --grid by name, but not {given}: {error}.") from error
    if not isinstance(made, Mapping) or "grid" not in made:
        raise UsageError(
            f"{name} returns the kernel's arguments by name and its `grid`, but returned a {type(made).__name__}"
            f"{' without `grid`' if isinstance(made, Mapping) else ''}. For example: "
            '{"x": x, "n": n, "grid": (128,)}.'
        )
    return {str(key): value for key, value in made.items()}
