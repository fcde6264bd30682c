"""Makes a kernel's arguments by the user's function, for each size in a grid: `--args module:make --grid "M=1,2"`."""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.shared.shapes_file import bounded_shapes
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.config import Plain

if TYPE_CHECKING:
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.tuner.drop_in.request import LaunchRequest

EXAMPLE = 'For example: --grid "M=512,1024 N=4096"'

Sizes = Mapping[str, Plain]

ArgumentsOf = Annotated[
    str | None,
    typer.Option(
        "--args",
        metavar="MODULE:FUNCTION",
        help="Function that returns the kernel's arguments by name, for the sizes of --grid.",
    ),
]
Space = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=VALUE,VALUE", help="Values to try instead of the kernel's own list."),
]
Expand = Annotated[int, typer.Option("--expand", min=0, help="How many configs to try beyond the kernel's list.")]


def constant(text: str) -> Plain:
    """Return the value of a word: an integer, a number, `true`, `false`, `none`, or the text itself."""
    words: dict[str, Plain] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def parameter(text: str) -> tuple[str, Plain]:
    """Return the name and the value of a word NAME=VALUE.

    Raises:
        UsageError: the word has another form.
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UsageError(f"`--param` must be NAME=VALUE, but got {text!r}.")
    return name, constant(value)


def choices(words: Sequence[str]) -> dict[str, list[Plain]]:
    """Return the values of each name in words `NAME=VALUE,VALUE`.

    Raises:
        UsageError: a word has another form, or a name comes twice.
    """
    found: dict[str, list[Plain]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not name or not equals or not values or name in found:
            raise UsageError(f"Choices are words NAME=VALUE,VALUE, each name once, but got {word!r}. {EXAMPLE}")
        found[name] = [constant(value) for value in values.split(",")]
    return found


def grid_of(text: str | None) -> tuple[Sizes, ...]:
    """Return every combination of a grid, the last name changing fastest; one without sizes where there is no grid.

    Raises:
        UsageError: there are too many.
    """
    named = choices((text or "").split())
    sizes: Iterator[Sizes] = (dict(zip(named, values, strict=True)) for values in itertools.product(*named.values()))
    return bounded_shapes(sizes)


def importable_from_here() -> "AbstractContextManager[None]":
    """Let modules of the working folder be imported, as `python -m` does."""
    from blocktune.tuner.drop_in.request import importable_from

    return importable_from(os.getcwd())


def requests_for(
    kernel: str, make: str | None, all_sizes: Iterable[Sizes], param: Sequence[str] = (), expand: int = 0
) -> "tuple[LaunchRequest, ...]":
    """Return a request for each size of a kernel, whose arguments a function makes. All names are checked at once.

    Raises:
        UsageError: a name is none, or the kernel has no list of configs.
    """
    from blocktune.tuner.drop_in.autotune import space
    from blocktune.tuner.drop_in.named import kernel_named
    from blocktune.tuner.drop_in.request import LaunchRequest, function_of

    if make is None:
        raise UsageError(
            f"{kernel} needs input tensors. Name the function that makes them: "
            '`--args my_module:make_args`, which returns them by name, `{"x": x, "n": n, "grid": (128,)}`.'
        )
    named = choices(param)
    with importable_from_here():
        kernel_named(kernel, space(**named) if named else (), (), expand)
        function_of(make)
    return tuple(
        LaunchRequest(
            kernel=kernel,
            arguments=make,
            sizes=tuple(sizes.items()),
            choices=tuple((name, tuple(values)) for name, values in named.items()),
            expand=expand,
            folder=os.getcwd(),
        )
        for sizes in all_sizes
    )


def missed_sizes(kernel: str, device: "DeviceSpec") -> list[Sizes]:
    """Return the key values of a kernel's calls that had to wait for a choice on a device, most frequent first.

    Raises:
        UsageError: no file counts launches, or none of the kernel's had to wait.
    """
    from blocktune.runtime.autotuned.launches import launches_path, read_launches

    path = launches_path()
    counted = {} if path is None else read_launches(path)
    missed = {
        tuple(kind.problem.key_values.items()): launches.misses
        for kind, launches in counted.items()
        if (kind.kernel, kind.device) == (kernel, device.key) and launches.misses
    }
    if not missed:
        raise UsageError(
            f"`--from-misses` takes the sizes from {path or 'a file of launches'}, which counts no miss of {kernel} on "
            f"{device.name}. Give the sizes by --grid."
        )
    return [dict(sizes) for sizes in sorted(missed, key=lambda sizes: -missed[sizes])]
