"""Judges the rule by which a race is decided, on the rounds that recorded sweeps hold.

python -m tools.lab.races [results/races.table.json]

A race is between configs of a sweep, whose rounds are drawn again, with replacement, from those that were recorded,
without the drift of the clock. The winner's regret is how much slower it is than the best one by all recorded rounds.
Every race is held twice. No GPU is needed.
"""

import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from blocktune.db.exchange.document import save_text
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep
from blocktune.tuner.launches import race
from blocktune.tuner.measure import protocol
from blocktune.tuner.measure.environment import source_commit
from blocktune.tuner.measure.protocol import TIE_BAND
from blocktune.tuner.search.finals import CHALLENGER_BAND, MAX_CHALLENGERS
from blocktune.tuner.search.verdict import decide, speedup

FOLDERS = ("sweeps", "dense-sweeps", "h100-sweeps")
LISTS = (8, 24)
"""Configs of a race, as a list of `triton.autotune` and as a search have them."""

DRAWS = 12
"""Lists that are drawn of a sweep."""

LEAST_ROUNDS = 5
"""Configs with fewer recorded rounds take no part: a race stopped them."""

FLUSH_US = 80.0
"""What flushes before a launch take on an H200."""

FORMER_TIE = 1.007
COLUMNS = ("rule", "configs", "mean regret", "99th percentile", "over 1 %", "same winner twice", "GPU time", "launches")

Choose = Callable[[Sequence[KernelConfig], "DrawnRounds"], KernelConfig]


class DrawnRounds:
    """Gives configs rounds that are drawn from recorded ones, and counts launches and the time of the GPU."""

    def __init__(self, recorded_us: Mapping[KernelConfig, Sequence[float]], seed: str) -> None:
        self._recorded_us, self._random = recorded_us, random.Random(seed)
        self.time_us, self.launches = 0.0, 0

    def __call__(self, configs: Sequence[KernelConfig], count: int) -> dict[KernelConfig, tuple[float, ...]]:
        found = {config: tuple(self._random.choices(self._recorded_us[config], k=count)) for config in configs}
        self.time_us += sum(sum(samples) + FLUSH_US * count for samples in found.values())
        self.launches += count * len(found)
        return found


@dataclass(frozen=True, slots=True)
class Record:
    """The rounds of a sweep's configs, as on a GPU whose clock does not drift. anchor: the config that was first."""

    rounds_us: Mapping[KernelConfig, Sequence[float]]
    anchor: KernelConfig

    @classmethod
    def of(cls, sweep: Sweep) -> "Record | None":
        """Return the record of a sweep; None where fewer configs than a race has were timed."""
        timed = {config: trial for config, trial in sweep.timed.items() if len(trial.samples_us) >= LEAST_ROUNDS}
        anchors = [config for config, trial in timed.items() if trial.relative_to_anchor == 1.0]
        if len(timed) < min(LISTS) or not anchors:
            return None
        scores, unit_us = sweep.scores, 1.0
        if len(anchors) == 1:
            unit_us = statistics.median(timed[anchors[0]].samples_us)
        rounds = {}
        for config, trial in timed.items():
            scale = scores[config] * unit_us / statistics.median(trial.samples_us)
            rounds[config] = [scale * sample for sample in trial.samples_us]
        return cls(rounds, anchors[0])

    def entries(self, count: int, seed: str) -> list[KernelConfig]:
        """Return the anchor and drawn configs."""
        others = [config for config in self.rounds_us if config != self.anchor]
        return [self.anchor, *random.Random(seed).sample(others, min(count - 1, len(others)))]


def records() -> Iterator[Record]:
    """Yield the records of all sweeps in results/."""
    for folder in FOLDERS:
        for path in sorted((Path("results") / folder).glob("*.gz")):
            record = Record.of(load_sweep(path))
            if record is not None:
                yield record


def final_rounds(entered: Sequence[KernelConfig], rounds: DrawnRounds) -> dict[KernelConfig, tuple[float, ...]]:
    """Return the finals of a search that measures these configs, the default first."""
    default, best = entered[0], 1.0
    scores = {default: 1.0}
    rounds([default], protocol.candidate_rounds(rounds([default], 1)[default][0]))
    for config in entered[1:]:
        count = protocol.candidate_rounds(rounds([config], 1)[config][0])
        timed = rounds([config, default], protocol.RACE_ROUNDS)
        score = protocol.median_ratio(timed[config], timed[default])
        if not protocol.is_behind(score, best):
            more = rounds([config, default], count - protocol.RACE_ROUNDS)
            score = protocol.median_ratio(timed[config] + more[config], timed[default] + more[default])
        scores[config], best = score, min(best, score)
    ranked = sorted(scores, key=lambda config: scores[config])
    close = [config for config in ranked if scores[config] <= CHALLENGER_BAND * scores[ranked[0]]]
    finalists = list(dict.fromkeys([default, *close[:MAX_CHALLENGERS]]))
    first = rounds(finalists, 1)
    return rounds(finalists, protocol.final_rounds([first[config][0] for config in finalists]))


def by_middle(entered: Sequence[KernelConfig], rounds: DrawnRounds) -> KernelConfig:
    """Return the winner of a search's finals by today's rule."""
    return decide(final_rounds(entered, rounds), entered[0], entered).winner


def by_sign_test(entered: Sequence[KernelConfig], rounds: DrawnRounds) -> KernelConfig:
    """Return the winner by the former rule: medians of ratios, and the 99 % interval of the sign test."""
    samples, default = final_rounds(entered, rounds), entered[0]
    fastest = min(samples, key=lambda config: statistics.median(samples[config]))
    limit = 1.0 + TIE_BAND
    equals = [config for config in samples if speedup(samples[config], samples[fastest]).median <= limit]
    challenger = min(equals, key=entered.index)
    ratios = [theirs / ours for theirs, ours in zip(samples[default], samples[challenger], strict=True)]
    beyond = _lower_end(ratios) > 1.0 and statistics.median(ratios) > limit
    return challenger if challenger == default or beyond else default


def _lower_end(values: Sequence[float], confidence: float = 0.99) -> float:
    """Return the lower end of the confidence interval of the median, by order statistics."""
    count, below, tail = len(values), -1, 0.0
    while tail + math.comb(count, below + 1) / 2**count <= (1 - confidence) / 2:
        below += 1
        tail += math.comb(count, below) / 2**count
    return -math.inf if below < 0 else sorted(values)[below]


def in_turns(entered: Sequence[KernelConfig], rounds: DrawnRounds) -> KernelConfig:
    """Return the winner of the race of an autotuned call."""
    clock = SimpleNamespace(monotonic=lambda: rounds.time_us / 1e6)
    with mock.patch.object(race, "time", clock):
        standing = race.race(entered, rounds)
    assert standing is not None
    return standing.winner


def in_turns_before(entered: Sequence[KernelConfig], rounds: DrawnRounds) -> KernelConfig:
    """Return the winner by the former tie band of an autotuned call."""
    with mock.patch.object(race, "TIE", FORMER_TIE):
        return in_turns(entered, rounds)


RULES: Mapping[str, Choose] = {
    "finals, medians and sign test (0.1.0)": by_sign_test,
    "finals, middle half and standard errors": by_middle,
    "in turns, tie of 0.7 % (0.1.0)": in_turns_before,
    "in turns, tie of 0.5 %": in_turns,
}


@dataclass(slots=True)
class Tally:
    """The outcomes of races by one rule. pairs, agreed: races that were held twice, and those with one winner."""

    regrets: list[float] = field(default_factory=list)
    time_us: float = 0.0
    launches: int = 0
    pairs: int = 0
    agreed: int = 0

    def hold(self, choose: Choose, record: Record, count: int, seed: str) -> None:
        """Hold a race twice."""
        entered, winners = record.entries(count, seed), set[KernelConfig]()
        true_us = {config: statistics.median(record.rounds_us[config]) for config in entered}
        for again in range(2):
            rounds = DrawnRounds(record.rounds_us, f"{seed} {again}")
            winner = choose(entered, rounds)
            winners.add(winner)
            self.regrets.append(true_us[winner] / min(true_us.values()) - 1)
            self.time_us += rounds.time_us
            self.launches += rounds.launches
        self.pairs += 1
        self.agreed += len(winners) == 1

    def cells(self) -> list[str]:
        """Return the cells of the table, from the mean regret on."""
        races, regrets = len(self.regrets), sorted(self.regrets)
        over = sum(each > 0.01 for each in regrets) / races
        error = statistics.stdev(regrets) / races**0.5
        return [
            f"{100 * statistics.fmean(regrets):.3f} ± {100 * error:.3f} %",
            f"{100 * regrets[int(0.99 * (races - 1))]:.2f} %",
            f"{100 * over:.1f} %",
            f"{100 * self.agreed / self.pairs:.1f} %",
            f"{self.time_us / races / 1e3:.0f} ms",
            f"{self.launches / races:.0f}",
        ]


def row(name: str, count: int, found: Sequence[Record]) -> list[str]:
    """Return the row of a rule for races between this many configs."""
    counted = Tally()
    for number, record in enumerate(found):
        for draw in range(DRAWS):
            counted.hold(RULES[name], record, count, f"{number} {count} {draw}")
    return [name, str(count), *counted.cells()]


def document(found: Sequence[Record]) -> dict[str, object]:
    """Return the table of all rules."""
    configs = sum(len(record.rounds_us) for record in found)
    return {
        "format": "blocktune-table",
        "schema": 1,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "device": "Recorded on NVIDIA H200 and H100",
        "environment": {"triton": version("triton"), "torch": version("torch")},
        "how": (
            f"`python -m tools.lab.races`: {2 * DRAWS} races between configs of each of {len(found)} recorded sweeps "
            f"({configs} configs), whose rounds are drawn from the recorded ones. Regret is how much slower the winner "
            "is than the best config of the race by all recorded rounds."
        ),
        "columns": list(COLUMNS),
        "rows": [row(name, count, found) for count in LISTS for name in RULES],
    }


def main(path: Path) -> None:
    save_text(json.dumps(document(list(records())), indent=1, sort_keys=True), path)


if __name__ == "__main__":
    main(Path(*sys.argv[1:] or ["results/races.table.json"]))
