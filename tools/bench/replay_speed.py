"""How soon a search is near the best, and what compiling more configs changes where nothing can be measured.

python -m tools.bench.replay_speed [SEEDS]

From recorded sweeps alone, on any machine. First the seconds after which a search has a config within 1 % of the best,
by the recorded times of compiling and measuring, on 16 processors and one GPU. Then the choice of a run for a device
that is not here, after some of its favourites are compiled; the shape's own sweep is left out of what the choice knows.
With 0 seeds only the latter.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.untuned import Untuned, shipped_untuned
from blocktune.tuner.candidates import starting_configs
from blocktune.tuner.candidates.starting_configs import SEEDS, expected_config
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.lab.replay import Replay
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep
from blocktune.tuner.search.verdict import decide_by_predictions

NEAR = 0.01
MEASUREMENTS = 40
COMPILED = (2, 8, 24, 160)


def sweeps(*folders: str) -> Iterator[Sweep]:
    for folder in folders:
        yield from map(load_sweep, sorted((Path("results") / folder).glob("*.gz")))


def seconds_to_near(sweep: Sweep, seeds: int) -> list[float | None]:
    """Return after how many seconds searches of a sweep are within `NEAR` of its best, one a seed."""
    replay = Replay(sweep)
    runs = (replay.run("guided", seed=seed, measurements=MEASUREMENTS) for seed in range(seeds))
    return [run.seconds_within(NEAR) for run in runs]


def slowdowns(sweep: Sweep) -> list[float]:
    """Return how much slower than the best the choice is after each of `COMPILED` configs, as on a device without the
    kernels that the sweep lacks; nothing where the sweep does not hold what a call would get."""
    replay, scores, shape, device = Replay(sweep), sweep.scores, sweep.shape, sweep.device
    kernels = {kernel.name: kernel for kernel in replay.serving}
    default = replay.serving[0].default_config(shape, device.limits)
    decision = decision_without(shape, device, replay)
    useful = {config: usefulness(kernels[config.kernel], config, shape, device) for config in replay.predicted}
    first = [one.config for one in decision.choices(shape)[:SEEDS]]
    if first[0] not in useful:
        return []
    order = [*first[:1], default, *first[1:], *sorted(useful, key=lambda config: useful[config])]
    favourites = [config for config in dict.fromkeys(order) if config in useful]
    found = []
    with mock.patch.object(starting_configs, "shipped_untuned", return_value=decision):
        for count in COMPILED:
            compiled = {config: replay.predicted[config] for config in favourites[:count]}
            choice = expected_config(compiled, shape, device, ()) or decide_by_predictions(compiled, default)
            found.append(scores[choice] / min(scores.values()))
    return found


def decision_without(shape: AttentionShape, device: DeviceSpec, replay: Replay) -> Untuned:
    """Return the decision of a device among the kernels of a replay, which knows nothing of a shape."""
    found = shipped_untuned(device)
    assert found is not None
    measured = tuple(one for one in found.correction.measured if one.shape != shape)
    correction = replace(found.correction, measured=measured)
    return replace(found, correction=correction, serving=lambda shape, limits: replay.serving)


def tell_seconds(near: Sequence[float | None]) -> None:
    reached = [seconds for seconds in near if seconds is not None]
    print(
        f"within {NEAR:.0%} of the best: {len(reached)} of {len(near)} searches, after "
        f"{statistics.median(reached):.1f} s in the median and {max(reached):.1f} s at most"
    )


def main(seeds: int) -> None:
    if seeds:
        tell_seconds([seconds for sweep in sweeps("sweeps") for seconds in seconds_to_near(sweep, seeds)])
    found = {sweep.label: slowdowns(sweep) for sweep in sweeps("sweeps", "dense-sweeps")}
    table = {label: row for label, row in found.items() if row}
    print(f"{len(table)} of {len(found)} sweeps hold what a call would get")
    for count, column in zip(COMPILED, zip(*table.values(), strict=True), strict=True):
        print(f"{count} compiled: {statistics.geometric_mean(column):.3f} of the best, {max(column):.3f} at most")
    for label, row in table.items():
        if len(set(row)) > 1:
            print(f"  not the same choice: {label} {[round(one, 3) for one in row]}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
