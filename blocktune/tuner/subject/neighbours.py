"""Configs around a config: one parameter doubled or halved, or a stage more or less; then two parameters at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.runtime.autotuned.config import LaunchConfig, Plain
from blocktune.runtime.autotuned.triton_config import LAUNCH_OPTIONS
from blocktune.tuner.occupancy.calculator import Limiter, occupancy

WARPS = (1, 32)
STAGES = (1, 7)
SIZES = (16, 1 << 14)

LEAST_CAP = 0.65
"""Registers are capped to no smaller part of what a thread takes: below it the compiler spills."""

_REGISTER_UNIT = 8
_SIZE, _WARPS, _STAGES = range(3)


@dataclass(frozen=True, slots=True)
class _Step:
    """One parameter changed. kind: what it is. grows: whether its value does."""

    name: str
    kind: int
    value: int
    grows: bool


def neighbours(config: LaunchConfig, listed: Iterable[LaunchConfig] = ()) -> Iterator[LaunchConfig]:
    """Yield the configs that differ from one in a single step of a parameter: sizes first, then warps and stages.

    Sizes are powers of two from 16 on, as most blocks are. Smaller ones count where the list has several of them: else
    only the kernel's author knows what a parameter means.

    Args:
        config: the config.
        listed: the list that it comes from, or that the search began with.
    """
    for step in _steps(config, listed):
        yield _with(config, step)


def further_neighbours(config: LaunchConfig, listed: Iterable[LaunchConfig] = ()) -> Iterator[LaunchConfig]:
    """Yield the configs that differ from one in two steps which make up for each other: a block with its warps, a block
    for another one, a block for stages, and two stages at once."""
    steps = list(_steps(config, listed))
    for one, other in combinations(steps, 2):
        if one.name != other.name and _make_up(one, other):
            yield _with(config, one, other)
    for stages in (step for step in steps if step.kind == _STAGES):
        further = stages.value + (1 if stages.grows else -1)
        if STAGES[0] <= further <= STAGES[1]:
            yield _with(config, replace(stages, value=further))


def with_capped_registers(
    config: LaunchConfig, resources: KernelResources, limits: ComputeLimits
) -> Iterator[LaunchConfig]:
    """Yield the config with as few registers as let one more block into a multiprocessor, where nothing else limits how
    many fit; and a capped config without its cap."""
    if config.parameters.get("maxnreg") is not None:
        left = {name: value for name, value in config.values if name != "maxnreg"}
        yield LaunchConfig(config.kernel, tuple(left.items()))
    now = occupancy(resources, limits)
    if now.binding != (Limiter.REGISTERS,):
        return
    cap = (resources.registers - 1) // _REGISTER_UNIT * _REGISTER_UNIT
    while cap >= LEAST_CAP * resources.registers:
        if occupancy(replace(resources, registers=cap), limits).blocks_per_sm > now.blocks_per_sm:
            yield LaunchConfig(config.kernel, tuple((config.parameters | {"maxnreg": cap}).items()))
            return
        cap -= _REGISTER_UNIT


def _steps(config: LaunchConfig, listed: Iterable[LaunchConfig]) -> list[_Step]:
    """Return the steps from a config, sizes first: they change the most."""
    lists = list(listed)
    found = [step for name, value in config.values for step in _steps_of(name, value, lists)]
    return sorted(found, key=lambda step: step.kind)


def _steps_of(name: str, value: Plain, listed: list[LaunchConfig]) -> list[_Step]:
    if type(value) is not int:
        return []
    if name == "num_stages":
        both, kind, bounds = (value + 1, value - 1), _STAGES, STAGES
    elif name == "num_warps":
        both, kind, bounds = (2 * value, value // 2), _WARPS, WARPS
    elif name not in LAUNCH_OPTIONS and _is_power_of_two(value):
        least = 1 if _has_small_sizes(name, listed) else SIZES[0]
        if value < least:
            return []
        both, kind, bounds = (2 * value, value // 2), _SIZE, (least, SIZES[1])
    else:
        return []
    return [_Step(name, kind, other, other > value) for other in both if bounds[0] <= other <= bounds[1]]


def _has_small_sizes(name: str, listed: list[LaunchConfig]) -> bool:
    """Return whether the list tries several powers of two of a parameter, some of them small."""
    values = {value for config in listed if type(value := config.parameters.get(name)) is int}
    return len(values) > 1 and all(map(_is_power_of_two, values)) and min(values) < SIZES[0]


def _is_power_of_two(value: int) -> bool:
    return value > 0 and not value & (value - 1)


def _make_up(one: _Step, other: _Step) -> bool:
    """Return whether two steps leave the work of a thread, or what a block keeps on the chip, about as it is."""
    kinds = {one.kind, other.kind}
    if kinds == {_SIZE, _WARPS}:
        return one.grows == other.grows
    return kinds in ({_SIZE}, {_SIZE, _STAGES}) and one.grows != other.grows


def _with(config: LaunchConfig, *steps: _Step) -> LaunchConfig:
    changed = {step.name: step.value for step in steps}
    return LaunchConfig(config.kernel, tuple((config.parameters | changed).items()))
