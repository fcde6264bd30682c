"""The participants in the search for a shape: the space, and the configs that are tried before all others."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from blocktune.db.records.records import Best
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.base.paper_rule import first_paper_config
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.fallback import ConfigTable, climb_down
from blocktune.runtime.selection.ladder import Candidate, Rung
from blocktune.runtime.selection.untuned import shipped_untuned
from blocktune.runtime.store_reader.sources import JsonConfigs
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from blocktune.tuner.candidates.assignment import Assignment
from blocktune.tuner.candidates.contenders import Contenders
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.cost.ranking import usefulness

if TYPE_CHECKING:
    from blocktune.tuner.compile_server.farm import CompileFarm

USUAL_HEAD_DIM = 64

SEEDS = 4
"""Configs that a search begins with because calls are expected to be fastest with them."""

MOST_REASONS = 4
"""Kernels whose reasons an error names; further ones mostly say the same."""


def find_contenders(
    shape: AttentionShape,
    device: DeviceSpec,
    kernels: Sequence[AttentionKernel],
    nearest: Iterable[Best],
    *,
    exhaustive: bool = False,
) -> Contenders:
    """Return the contenders of a shape on a device.

    Args:
        shape: what is computed.
        device: on what.
        kernels: those that are searched.
        nearest: stored winners of shapes like this one.
        exhaustive: whether the space keeps configs that are certainly slow.

    Raises:
        NoFeasibleConfigError: no kernel computes the shape on this device, or every config breaks a rule.
    """
    limits = device.limits
    space = SearchSpace.build(shape, limits, kernels, exhaustive=exhaustive)
    able = kernels_for(shape, limits)
    if not able or not space.feasible:
        raise _nothing_feasible(space, kernels, device)
    names = {kernel.name: kernel for kernel in kernels}
    near = list(nearest)
    neighbours = [
        best.config
        for best in near
        if best.config.kernel in names and not names[best.config.kernel].omissions(best.config, shape, limits)
    ]
    default = able[0].default_config(shape, limits)
    paper = first_paper_config(able, shape, limits)
    expected = _expected_configs(shape, device, near_rows(near, shape), names)
    # the space's order breaks ties in the finals: what calls get leads it, so that noise never replaces that
    named = (*expected[:1], default, *(() if paper is None else (paper,)), *expected[1:], *neighbours)
    return Contenders(
        space=space.with_configs(named),
        expected=expected,
        default=default,
        paper=paper,
        neighbours=tuple(dict.fromkeys(neighbours)),
    )


def near_rows(nearest: Iterable[Best], shape: AttentionShape) -> tuple[TunedConfig, ...]:
    """Return the winners of other shapes than this one, as the dispatcher knows them."""
    return tuple(
        TunedConfig(shape=best.shape, config=best.config, origin=best.origin, time_us=best.time_us)
        for best in nearest
        if best.shape != shape
    )


def expected_config(
    predicted_us: Mapping[KernelConfig, float], shape: AttentionShape, device: DeviceSpec, near: Sequence[TunedConfig]
) -> KernelConfig | None:
    """Return which of some compiled configs a dispatcher that knew their code would take for a shape that was not
    measured; None where nothing was measured on such a device, or none of them is compared.

    Args:
        predicted_us: the model's times of the compiled configs.
        shape: what is computed.
        device: on what.
        near: stored winners of shapes like this one.
    """
    untuned = shipped_untuned(device)
    if untuned is None:
        return None

    def predict(kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, device: DeviceSpec) -> float:
        return predicted_us.get(config) or untuned.predict(kernel, config, shape, device)

    compared = replace(untuned, predict=predict).choices(shape, near)
    return next((one.config for one in compared if one.config in predicted_us), None)


def favourites(
    shape: AttentionShape, device: DeviceSpec, kernels: Sequence[AttentionKernel], most: int, seed: int = 0
) -> list[KernelConfig]:
    """Return up to `most` configs, the first of all first; none where no config can run."""
    try:
        contenders = find_contenders(shape, device, kernels, ())
    except NoFeasibleConfigError:
        return []
    order = Assignment(
        space=contenders.space,
        first=contenders.first,
        usefulness=lambda config: usefulness(get_kernel(config.kernel), config, shape, device),
        trials=most,
        seed=seed,
    )
    return order.by_usefulness[:most]


def compile_favourites(
    shape: AttentionShape, device: DeviceSpec, kernels: Sequence[AttentionKernel], farm: "CompileFarm", most: int
) -> None:
    """Have the favourites of a shape compiled in the background; a search that begins later takes them over."""
    for config in favourites(shape, device, kernels, most):
        farm.submit_ahead(config.kernel, config, shape, device.limits.cc)


def _expected_configs(
    shape: AttentionShape, device: DeviceSpec, rows: Iterable[TunedConfig], searched: Collection[str]
) -> tuple[KernelConfig, ...]:
    """Return what the dispatcher would take for a shape of which the store has no winner, by the store's others and
    the results that ship; then what it expects to be next, of the kernels that are searched."""
    table = ConfigTable((*rows, *JsonConfigs().configs(device)), partial(shipped_untuned, device))
    first, *others = (step for step in climb_down(table, shape, device.limits) if isinstance(step, Candidate))
    seeds = [step.config for step in others if step.rung is Rung.EXPECTED and step.config.kernel in searched]
    return first.config, *seeds[: SEEDS - 1]


def _nothing_feasible(
    space: SearchSpace, kernels: Sequence[AttentionKernel], device: DeviceSpec
) -> NoFeasibleConfigError:
    reasons = [space.unsupported[name].rstrip(".") for name in _nearly_able(space, kernels)]
    shown = reasons[:MOST_REASONS]
    shown += [f"{len(reasons) - MOST_REASONS} other kernels refuse it too"] if len(reasons) > MOST_REASONS else []
    shown += [f"{count} configs: {rule}" for rule, count in space.dropped_counts.items()]
    return NoFeasibleConfigError(f"No config can run {space.shape.label} on {device.name}: {'; '.join(shown)}.")


def _nearly_able(space: SearchSpace, kernels: Sequence[AttentionKernel]) -> list[str]:
    """Return the kernels whose refusal says something: those that would compute the shape with usual head dimensions;
    else those of its direction, data type and features; else all."""
    usual = replace(space.shape, head_dim=USUAL_HEAD_DIM, head_dim_v=USUAL_HEAD_DIM)
    refusing = [kernel for kernel in kernels if kernel.name in space.unsupported]
    but_for_dims = [kernel.name for kernel in refusing if kernel.unsupported(usual, space.limits) is None]
    of_kind = [kernel.name for kernel in refusing if kernel.kind_problem(space.shape) is None]
    return but_for_dims or of_kind or [kernel.name for kernel in refusing]
