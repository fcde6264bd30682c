"""Configs around a config: one parameter doubled or halved, or a stage more or less; then two parameters at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.runtime.autotuned.config import LaunchConfig, Plain
from blocktune.runtime.autotuned.reach import REGISTERS, STAGES, bounds_of
from blocktune.tuner.occupancy.calculator import Limiter, occupancy

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
    while cap >= max(REGISTERS[0], LEAST_CAP * resources.registers):
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
    bounds = bounds_of(name, value, listed)
    if bounds is None or type(value) is not int:
        return []
    kind = {"num_stages": _STAGES, "num_warps": _WARPS}.get(name, _SIZE)
    both = (value + 1, value - 1) if kind == _STAGES else (2 * value, value // 2)
    return [_Step(name, kind, other, other > value) for other in both if bounds[0] <= other <= bounds[1]]


def _make_up(one: _Step, other: _Step) -> bool:
    """Return whether two steps leave the work of a thread, or what a block keeps on the chip, about as it is."""
    kinds = {one.kind, other.kind}
    if kinds == {_SIZE, _WARPS}:
        return one.grows == other.grows
    return kinds in ({_SIZE}, {_SIZE, _STAGES}) and one.grows != other.grows


def _with(config: LaunchConfig, *steps: _Step) -> LaunchConfig:
    changed = {step.name: step.value for step in steps}
    return LaunchConfig(config.kernel, tuple((config.parameters | changed).items()))
