"""Which of the finalists take the least energy: one burst of each, then bursts of the most frugal ones in turns."""

from collections.abc import Sequence

from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.measure.measurement import Energies
from blocktune.tuner.measure.runner import Runner

MOST_FRUGAL = 3
"""Finalists that meet again, apart from those that are kept anyway."""

ENERGY_ROUNDS = 8
"""As few as have a confidence interval of their median at all (`CONFIDENCE` in tuner/search/verdict.py): a burst takes
half a second."""


def frugal_energies(
    runner: Runner, finalists: Sequence[KernelConfig], kept: Sequence[KernelConfig], most: int = MOST_FRUGAL
) -> Energies:
    """Return rounds of bursts of the `kept` finalists and the `most` that took the least energy in a burst of each."""
    first = runner.energies(finalists, 1)
    order = sorted(first.bursts, key=lambda config: first.bursts[config][0].energy_mj)
    chosen = list(dict.fromkeys((*(config for config in kept if config in first.bursts), *order[:most])))
    return runner.energies(chosen, ENERGY_ROUNDS) if chosen else first
