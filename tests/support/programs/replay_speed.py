"""How soon a search is near the best, and what compiling more configs changes where nothing can be measured.

python -m tests.support.programs.replay_speed [SEEDS]

From recorded sweeps alone, on any machine. First the seconds after which a search has a config within 1 % of the best,
by the recorded times of compiling and measuring, on 16 processors and one GPU. Then the choice of a run for a device
that is not here, after some of its favourites are compiled; the shape's own sweep is left out of what the choice knows.
"""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import competing
from blocktune.kernels.selection.correction import Correction
from blocktune.kernels.selection.untuned import Untuned, shipped_untuned
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.lab.replay import Replay
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep
from blocktune.tuner.search import starting_configs
from blocktune.tuner.search.starting_configs import expected_of_compiled, find_contenders
from blocktune.tuner.search.verdict import decide_predicted

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
    """Return how much slower than the best the choice is after each of `COMPILED` configs."""

    def left_out(device: DeviceSpec) -> Untuned | None:
        found = shipped_untuned(device)
        return None if found is None else replace(found, correction=without(found, sweep.shape))

    replay, scores = Replay(sweep), sweep.scores
    with mock.patch.object(starting_configs, "shipped_untuned", left_out):
        contenders = find_contenders(sweep.shape, sweep.device, competing(), ())
        kernels = {kernel.name: kernel for kernel in competing()}
        useful = {
            config: usefulness(kernels[config.kernel], config, sweep.shape, sweep.device) for config in replay.predicted
        }
        order = [config for config in contenders.first if config in useful]
        order = list(dict.fromkeys((*order, *sorted(useful, key=lambda config: useful[config]))))
        found = []
        for count in COMPILED:
            compiled = {config: replay.predicted[config] for config in order[:count]}
            choice = expected_of_compiled(compiled, sweep.shape, sweep.device, ())
            found.append(scores[choice or decide_predicted(compiled, contenders.default)] / min(scores.values()))
        return found


def without(untuned: Untuned, shape: AttentionShape) -> Correction:
    """Return a decision's correction without what was measured of a shape."""
    return replace(untuned.correction, measured=tuple(one for one in untuned.correction.measured if one.shape != shape))


def main(seeds: int) -> None:
    near = [seconds for sweep in sweeps("sweeps") for seconds in seconds_to_near(sweep, seeds)]
    reached = [seconds for seconds in near if seconds is not None]
    print(
        f"within {NEAR:.0%} of the best: {len(reached)} of {len(near)} searches, after "
        f"{statistics.median(reached):.1f} s in the median and {max(reached):.1f} s at most"
    )
    table = {sweep.label: slowdowns(sweep) for sweep in sweeps("sweeps", "dense-sweeps")}
    for count, column in zip(COMPILED, zip(*table.values(), strict=True), strict=True):
        print(f"{count} compiled: {statistics.geometric_mean(column):.3f} of the best, {max(column):.3f} at most")
    for label, row in table.items():
        if len(set(row)) > 1:
            print(f"  not the same choice: {label} {[round(one, 3) for one in row]}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
