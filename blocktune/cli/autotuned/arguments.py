"""Arguments of a kernel from a function of the user's, for each size of a grid: `--args module:make --grid "M=1,2"`."""

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from blocktune.kernels.tuned.config import Plain
from blocktune.kernels.values.errors import UsageError

EXAMPLE = 'For example: --grid "M=512,1024 N=4096"'

Sizes = Mapping[str, Plain]


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


def grid_of(text: str | None) -> list[Sizes]:
    """Return every combination of a grid, the last name changing fastest; one without sizes where there is no grid."""
    named = choices((text or "").split())
    return [dict(zip(named, values, strict=True)) for values in itertools.product(*named.values())]


@contextlib.contextmanager
def importable_from_here() -> Iterator[None]:
    """Let modules of the working folder be imported, as `python -m` does."""
    folder = os.getcwd()
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
    from blocktune.tuner.jitted.specialization import object_named

    found = object_named(name)
    if not callable(found):
        raise UsageError(f"`--args` must name a function, but {name} is a {type(found).__name__}.")
    function: Callable[..., Any] = found
    return function


def arguments_for(name: str, make: Callable[..., Any], sizes: Sizes) -> dict[str, Any]:
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
