"""Many shapes at once: `--grid "seq=512,1024 dim=64,128 causal=0,1"` stands for every combination."""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Annotated, Any, get_args

import typer

from blocktune.cli.shared.options import ShapeFlags
from blocktune.cli.shared.shapes_file import bounded_shapes
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.shape_defaults import DEFAULT_TOKENS, DEFAULT_WIDTH

NEEDED = ("seq", "dim")
"""The shape flags without a default: given as flags or by the grid."""

INSTEAD = {"from_misses": "--from-misses", "shapes_file": "--shapes", "autotuned": "MODULE:KERNEL"}
"""Parameters of a command that bring the shapes instead of the shape flags, and what they are called."""

EXAMPLE = 'For example: --grid "seq=512,1024 dim=64,128 causal=0,1"'
_TEXTS = ("dtype", "direction", "features")
_SWITCH = {"0": False, "1": True}
_FLAGS = {field.name: field for field in fields(ShapeFlags)}


@dataclass(frozen=True, slots=True)
class Grid:
    """Flags per shape, the last name in the grid changing fastest; none where a command has its shapes from
    elsewhere. many: whether --grid was given. text: of --grid, where it holds the sizes of an autotuned kernel."""

    flags: tuple[ShapeFlags, ...]
    many: bool
    text: str | None = None

    def shapes(self) -> tuple[AttentionShape, ...]:
        """Return the shapes, each once, in order.

        Raises:
            UsageError: the sizes of one do not fit together.
        """
        return tuple(dict.fromkeys(flags.shape() for flags in self.flags))

    def assumed(self) -> str:
        """Return what was not given, as flags with where their values come from; empty when all sizes were given."""
        if not self.many:
            return self.flags[0].assumed()
        missing = []
        if any(flags.batch is None for flags in self.flags):
            missing.append(f"--batch (batch * seq = {DEFAULT_TOKENS})")
        if any(flags.heads is None for flags in self.flags):
            missing.append(f"--heads (heads * dim = {DEFAULT_WIDTH})")
        return f"assumed {', '.join(missing)} where they are not given" if missing else ""

    @classmethod
    def of(cls, given: dict[str, Any], text: str | None) -> "Grid":
        """Return the grid of shape flags with values, None where one is not given, crossed with the text of --grid.

        Raises:
            UsageError: the text is no grid, or a needed size is missing, or given twice.
        """
        lists = {} if text is None else parse_grid(text)
        for name in lists:
            if given[name] not in (None, False, _FLAGS[name].default):
                raise UsageError(f"A size is given once, but --grid and --{name} both give `{name}`. Leave one out.")
        missing = [f"--{name}" for name in NEEDED if given[name] is None and name not in lists]
        if missing:
            raise UsageError(
                f"A shape needs --seq and --dim, or a --grid with both. Missing: {' and '.join(missing)}. {EXAMPLE}"
            )
        combinations = itertools.product(*lists.values())
        flags = bounded_shapes(ShapeFlags(**given | dict(zip(lists, values, strict=True))) for values in combinations)
        return cls(flags, many=text is not None)

    @classmethod
    def none(cls, given: dict[str, Any], text: str | None, instead: str) -> "Grid":
        """Return no shape, since the flag `instead` brings them.

        Raises:
            UsageError: a shape flag or --grid is given all the same.
        """
        surplus = ["--grid"] if text is not None else []
        surplus += [f"--{name}" for name, value in given.items() if value not in (None, False, _FLAGS[name].default)]
        if surplus:
            raise UsageError(f"`{instead}` brings the shapes, but {', '.join(surplus)} is given too. Leave one out.")
        return cls((), many=True)


def parse_grid(text: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of every name in `name=value,value name=value`; names are those of the shape flags.

    Raises:
        UsageError: a word has no such form, a name is unknown or repeated, a value is not of its kind.
    """
    lists: dict[str, tuple[Any, ...]] = {}
    for word in text.split():
        name, equals, values = word.partition("=")  # values of `features` may hold further ones
        name = name.replace("-", "_")
        if not equals or name not in _FLAGS:
            names = ", ".join(flag.replace("_", "-") for flag in _FLAGS)
            raise UsageError(
                f"A grid must consist of words name=value,value with the names {names}, but got {word!r:.80}. {EXAMPLE}"
            )
        if name in lists:
            raise UsageError(f"A grid must have each name once, but got `{name}` twice. {EXAMPLE}")
        lists[name] = tuple(dict.fromkeys(_value(name, value) for value in values.split(",")))
    if not lists:
        raise UsageError(f"A grid must have at least one word name=value, but got {text!r:.80}. {EXAMPLE}")
    return lists


def _value(name: str, text: str) -> Any:
    try:
        if name in _TEXTS and text:
            return text
        return _SWITCH[text] if name.startswith("causal") else int(text)
    except (KeyError, ValueError):
        kind = "0 or 1" if name.startswith("causal") else "a name" if name in _TEXTS else "an integer"
        raise UsageError(f"`{name}` of a grid must be {kind}, but got {text!r:.80}. {EXAMPLE}") from None


def with_grid_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of `ShapeFlags` and `--grid` in place of its parameter `grid`."""
    shared = [_optional(value) for value in inspect.signature(ShapeFlags).parameters.values()]
    own = [value for name, value in inspect.signature(command).parameters.items() if name != "grid"]

    @wraps(command)
    def expanded(grid: str | None, **values: Any) -> None:
        given = {parameter.name: values.pop(parameter.name) for parameter in shared}
        instead = [flag for name, flag in INSTEAD.items() if values.get(name)]
        if INSTEAD["autotuned"] in instead:  # whose sizes the other two may bring
            instead = [INSTEAD["autotuned"]]
        if len(instead) > 1:
            raise UsageError(f"Shapes come from one place, but got {' and '.join(instead)}. Leave one out.")
        own_sizes = grid if values.get("autotuned") else None
        chosen = Grid.none(given, None if own_sizes else grid, instead[0]) if instead else Grid.of(given, grid)
        chosen = replace(chosen, text=own_sizes)
        command(grid=chosen, **values)

    parameters = [value.replace(kind=inspect.Parameter.KEYWORD_ONLY) for value in (*shared, _GRID, *own)]
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


_GRID = inspect.Parameter(
    "grid",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None, typer.Option("--grid", help="Many shapes, as in 'seq=512,1024 dim=64,128 causal=0,1'.")
    ],
)


def _optional(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a needed flag as one that may be missing, since the grid can give it."""
    if parameter.name not in NEEDED:
        return parameter
    kind, *explained = get_args(parameter.annotation)
    return parameter.replace(default=None, annotation=Annotated[(kind | None, *explained)])
