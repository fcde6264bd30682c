"""Configs around a config: one parameter doubled or halved, or a stage more or less."""

from collections.abc import Iterator

from blocktune.kernels.tuned.config import Plain, UserConfig

WARPS = (1, 16)
STAGES = (1, 7)
SIZES = (16, 1 << 14)


def neighbours(config: UserConfig) -> Iterator[UserConfig]:
    """Yield the configs that differ from one in a single step of a parameter.

    Blocks are sizes from 16 on that are powers of two, as `tl.arange` needs them; other parameters stay as they are,
    since only the kernel's author knows what they mean.
    """
    for name, value in config.values:
        for other in _steps(name, value):
            yield UserConfig(config.kernel, tuple((config.parameters | {name: other}).items()))


def _steps(name: str, value: Plain) -> list[int]:
    if type(value) is not int:
        return []
    if name == "num_stages":
        return _within((value + 1, value - 1), STAGES)
    if name == "num_warps":
        return _within((2 * value, value // 2), WARPS)
    if value < SIZES[0] or value & (value - 1):
        return []
    return _within((2 * value, value // 2), SIZES)


def _within(values: tuple[int, ...], bounds: tuple[int, int]) -> list[int]:
    return [value for value in values if bounds[0] <= value <= bounds[1]]
