"""Shell completion for flag values. They come at once, so neither torch nor triton is imported."""

import re
from collections.abc import Iterator
from pathlib import Path

import typer

from blocktune.kernels import hardware
from blocktune.kernels.files.reading import SOURCE_BYTES, read_text
from blocktune.kernels.hardware.catalogue import catalogue
from blocktune.kernels.values.shape import SHORT_DTYPES, Direction
from blocktune.tuner.search.strategies import STRATEGIES

_KERNEL_NAME = re.compile(r'^    name = "(\w+)"$', re.MULTILINE)


def devices(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the devices of the catalogue that begin so, each with its full name."""
    return ((entry.id, entry.name) for entry in catalogue() if entry.id.startswith(incomplete.lower()))


def kernels(incomplete: str) -> Iterator[str]:
    """Yield the kernels that begin so: their sources have the names, and the registry takes seconds to import."""
    sources = Path(hardware.__file__).parents[1].rglob("*.py")
    names = (name for path in sources for name in _KERNEL_NAME.findall(read_text(path, SOURCE_BYTES)))
    return (name for name in names if name.startswith(incomplete))


def samplers(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the strategies of a search that begin so, each with what it is."""
    return ((name, strategy.about) for name, strategy in STRATEGIES.items() if name.startswith(incomplete))


def dtypes(incomplete: str) -> Iterator[str]:
    """Yield the data types that begin so, by their short names."""
    return (name for name in SHORT_DTYPES.values() if name.startswith(incomplete))


def directions(incomplete: str) -> Iterator[str]:
    """Yield the directions that begin so."""
    return (str(direction) for direction in Direction if direction.startswith(incomplete))


def own_parameters(context: typer.Context, incomplete: str) -> Iterator[str]:
    """Yield NAME=VALUE for the parameters of the kernel that `--kernel` named; nothing before it did."""
    from blocktune.kernels.registry import KERNELS as registry  # seconds, but only a kernel knows its parameters

    kernel = registry.get(context.params.get("kernel") or "")
    choices = {} if kernel is None else kernel.parameters
    pairs = (f"{name}={value}" for name, values in choices.items() for value in values)
    return (pair for pair in pairs if pair.startswith(incomplete))
