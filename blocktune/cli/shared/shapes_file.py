"""`--shapes FILE`: many shapes as tables of a TOML file, each with the words of the shape flags.

[prefill]
seq = 8192
dim = 128
causal = true

[decode]            # a list stands for each of its values, as in --grid
seq = 1
seq-k = [4096, 16384]
dim = 128
kv-heads = 8
"""

import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from blocktune.cli.shared.options import ShapeFlags
from blocktune.kernels.files.reading import SHAPES_BYTES, read_text
from blocktune.kernels.values.errors import UsageError

T = TypeVar("T")

NEEDED = ("seq", "dim")

MAX_SHAPES = 10_000
"""Of a file or grid: lists multiply, and a search of 10,000 takes weeks."""

MAX_DOTS = 500
"""Of a line: keys of a shape have none, and a list of fractions one each."""

_TEXT, _SWITCH, _COUNT = (str, "a text"), (bool, "true or false"), (int, "an integer")
_KINDS: dict[str, tuple[type, str]] = {
    "dtype": _TEXT,
    "direction": _TEXT,
    "features": _TEXT,
    "causal": _SWITCH,
    "causal_lower_right": _SWITCH,
}
_NAMES = tuple(field.name for field in fields(ShapeFlags))


def flags_of_file(path: Path) -> tuple[ShapeFlags, ...]:
    """Return the shapes of a file as flags, in its order; what a table does not give is as on the command line.

    Raises:
        UsageError: the file is missing or is no TOML, holds no table, or a table's key or value is not of a shape;
            the message names the table and the key.
    """
    flags = bounded_shapes(flags for where, table in _tables(path) for flags in _flags(where, table))
    if not flags:
        raise UsageError(f"{path} has no table, and so no shape. Write [name] with seq and dim.")
    return flags


def bounded_shapes(shapes: Iterable[T]) -> tuple[T, ...]:
    """Return shapes whose number is bearable.

    Raises:
        UsageError: there are too many.
    """
    found = tuple(itertools.islice(shapes, MAX_SHAPES + 1))
    if len(found) > MAX_SHAPES:
        raise UsageError(f"At most {MAX_SHAPES:,} shapes are taken at once, but there are more. Split them.")
    return found


def sizes_of_file(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the sizes of an autotuned kernel from a file, every combination of a table's lists, in its order.

    Raises:
        UsageError: the file is missing or is no TOML, or holds no table, or a size is no plain value.
    """
    found = bounded_shapes(sizes for where, table in _tables(path) for sizes in _sizes(where, table))
    if not found:
        raise UsageError(f"{path} has no table, and so no size. Write [name] with the sizes that --args takes.")
    return found


def _sizes(where: str, table: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    lists = {name: value if isinstance(value, list) else [value] for name, value in table.items()}
    for name, values in lists.items():
        if not values or any(not isinstance(value, bool | int | float | str) for value in values):
            raise UsageError(f"A size must be a number or a text, but {where} has {name:.80} = {table[name]!r:.80}.")
    for chosen in itertools.product(*lists.values()):
        yield dict(zip(lists, chosen, strict=True))


def _tables(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tables with their place in the file, such as `shapes.toml [prefill]`; `[[name]]` may stand several
    times."""
    try:
        document = tomllib.loads(_with_short_keys(read_text(path, SHAPES_BYTES)))
    except OSError as error:
        raise UsageError(
            f"{error.strerror}: {path}. `--shapes` names a TOML file with a table for each shape."
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML, as files of shapes are: {error!s:.200}. Correct it.") from error
    for name, value in document.items():
        if isinstance(value, dict):
            yield f"{path} [{name:.80}]", value
        elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
            yield from (
                (f"{path} [[{name:.80}]] number {number}", entry) for number, entry in enumerate(value, start=1)
            )
        else:
            raise UsageError(f"{path} has `{name:.80}` outside of any table. Write [name] above it.")


def _with_short_keys(text: str) -> str:
    """Return a text of TOML, whose parser needs time that grows with the square of a dotted key's length.

    Raises:
        ValueError: a line has more dots than a key of a shape may have.
    """
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise ValueError(f"a line has more than {MAX_DOTS} dots")
    return text


def _flags(where: str, table: Mapping[str, Any]) -> Iterator[ShapeFlags]:
    lists = {_name(where, key): _values(where, key, value) for key, value in table.items()}
    missing = [name for name in NEEDED if name not in lists]
    if missing:
        raise UsageError(f"{where} has no `{missing[0]}`, but a shape needs seq and dim. Add it.")
    for values in itertools.product(*lists.values()):
        flags = ShapeFlags(**dict(zip(lists, values, strict=True)))
        try:
            flags.shape()
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
        yield flags


def _name(where: str, key: str) -> str:
    name = key.replace("-", "_")
    if name not in _NAMES:
        names = ", ".join(name.replace("_", "-") for name in _NAMES)
        raise UsageError(
            f"{where} has the unknown key `{key:.80}`. The keys of a shape are {names}. Correct or remove it."
        )
    return name


def _values(where: str, key: str, value: Any) -> tuple[Any, ...]:
    kind, told = _KINDS.get(key.replace("-", "_"), _COUNT)
    values = value if isinstance(value, list) else [value]
    if not values or any(type(one) is not kind for one in values):
        raise UsageError(
            f"`{key}` must be {told} or a list of these, but {where} has {key} = {value!r:.80}. Correct it."
        )
    return tuple(values)


def shard_of(text: str) -> slice:
    """Return which shapes `I/N` means: every Nth from the Ith on.

    Raises:
        UsageError: it is no such pair.
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UsageError(
            f"`--shard` must be I/N with 1 <= I <= N, but got {text!r:.80}. Take 1/2 and 2/2 for two GPUs."
        )
    return slice(int(number) - 1, None, int(count))


def part_of(shapes: tuple[T, ...], shard: str) -> tuple[T, ...]:
    """Return the shapes, or whatever else is tuned, of a shard `I/N`.

    Raises:
        UsageError: it is no shard, or no shape is left.
    """
    chosen = shapes[shard_of(shard)]
    if not chosen:
        raise UsageError(f"`--shard {shard}` leaves no shape of {len(shapes)}. Take fewer shards.")
    return chosen
