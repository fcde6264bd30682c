"""How far a search goes from a config of a list: which values of a parameter it can come to."""

from collections.abc import Iterable

from blocktune.runtime.autotuned.config import LAUNCH_OPTIONS, LaunchConfig, Plain

WARPS = (1, 32)
STAGES = (1, 7)
SIZES = (16, 1 << 14)
REGISTERS = (16, 255)
"""The least and greatest value of each kind that a search tries."""


def is_in_reach(config: LaunchConfig, listed: Iterable[LaunchConfig]) -> bool:
    """Return whether a search may come to a config from one of a list: sizes, warps and stages differ by steps, the
    registers may have a bound, and every other parameter is that of the list."""
    configs = list(listed)
    return any(_leads_to(start, config, configs) for start in configs)


def _leads_to(start: LaunchConfig, config: LaunchConfig, listed: list[LaunchConfig]) -> bool:
    before, after = start.parameters, config.parameters
    cap = after.pop("maxnreg", None) if before.get("maxnreg") is None else None
    if before.keys() - {"maxnreg"} != after.keys() - {"maxnreg"}:
        return False
    is_bounded = cap is None or (type(cap) is int and REGISTERS[0] <= cap <= REGISTERS[1])
    return is_bounded and all(_comes_to(name, before[name], value, listed) for name, value in after.items())


def _comes_to(name: str, before: Plain, value: Plain, listed: list[LaunchConfig]) -> bool:
    if type(value) is not type(before):
        return False
    bounds = bounds_of(name, before, listed)
    if value == before or bounds is None or type(value) is not int:
        return value == before
    return bounds[0] <= value <= bounds[1] and (name == "num_stages" or is_power_of_two(value))


def bounds_of(name: str, value: Plain, listed: list[LaunchConfig]) -> tuple[int, int] | None:
    """Return the least and greatest value that steps from a parameter's value lead to; None where there are no steps.

    Sizes are powers of two from 16 on, as most blocks are. Smaller ones count where the list has several of them: else
    only the kernel's author knows what a parameter means.
    """
    if type(value) is not int:
        return None
    if name == "num_stages":
        return STAGES
    if name == "num_warps":
        return WARPS
    least = 1 if _has_small_sizes(name, listed) else SIZES[0]
    return (least, SIZES[1]) if name not in LAUNCH_OPTIONS and is_power_of_two(value) and value >= least else None


def is_power_of_two(value: int) -> bool:
    """Return whether a number is 1, 2, 4 and so on."""
    return value > 0 and not value & (value - 1)


def _has_small_sizes(name: str, listed: list[LaunchConfig]) -> bool:
    """Return whether the list tries several powers of two of a parameter, some of them small."""
    values = {value for config in listed if type(value := config.parameters.get(name)) is int}
    return len(values) > 1 and all(map(is_power_of_two, values)) and min(values) < SIZES[0]
