"""What a shell completes behind a flag. It answers within a blink, so it imports neither torch nor triton."""

from collections.abc import Iterator

import typer

from blocktune.kernels.hardware.catalogue import catalogue
from blocktune.kernels.values.shape import SHORT_DTYPES, Direction
from blocktune.tuner.search.strategies import STRATEGIES

KERNELS = (
    "flash_bwd_hopper",
    "flash_bwd_split",
    "flash_bwd_fused",
    "flash_decode_hopper",
    "flash_decode",
    "flash_fwd_hopper_short",
    "flash_fwd_hopper",
    "flash_fwd_fp8",
    "flash_fwd_tma",
    "flash_fwd",
    "flash_fwd_sparse",
    "flash_bwd_sparse",
    "flash_fwd_padded",
    "flash_fwd_transposed",
    "flash_v1",
    "flash_fwd_general",
)
"""The names of the registry, whose import takes seconds. A test compares them."""


def devices(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the devices of the catalogue that begin so, each with its full name."""
    return ((entry.id, entry.name) for entry in catalogue() if entry.id.startswith(incomplete.lower()))


def kernels(incomplete: str) -> Iterator[str]:
    """Yield the kernels that begin so."""
    return (name for name in KERNELS if name.startswith(incomplete))


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
