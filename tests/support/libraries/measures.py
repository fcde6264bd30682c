"""What is measured of one autotuned kernel of a library on a GPU: its list, both tuners, and a search."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LaunchConfig, launch_config
from blocktune.runtime.autotuned.fallback import KernelExplanation
from blocktune.runtime.autotuned.kernel import TunedKernel
from blocktune.runtime.autotuned.settings import Settings
from blocktune.runtime.autotuned.stock_tuner import stock_key
from blocktune.tuner.drop_in import tune_call
from blocktune.tuner.drop_in.decide import decide
from blocktune.tuner.launches.launch_bench import LaunchBench
from blocktune.tuner.launches.launches import prepare_arguments
from blocktune.tuner.launches.race import race
from blocktune.tuner.measure.environment import source_commit
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.protocol import shares

ROUNDS, FINAL_ROUNDS, NEAR = 7, 400, 1.1
"""Rounds of every config, then of those within NEAR of the best: the exhaustive optimum. A launch of 30 us differs by
2.5 % from the one before, so that 400 rounds tell 0.2 % apart."""

REPEATS = 10

EXPAND = 32
"""Configs that a search around a list may try. More would take minutes over all kernels."""

STOCK, WINNER, EXPANDED = "stock", "winner", "expanded"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The configs that were chosen for a kind of call, by who chose; kept under a key of Triton's own tuner."""

    tuner: Any
    key: tuple[Any, ...]
    configs: dict[str, Any]

    @classmethod
    def of(cls, kernel: TunedKernel, call: AutotunedCall, parameters: Mapping[str, Mapping[str, Any]]) -> "Chosen":
        """Return what was chosen for a call, from the parameters by who chose."""
        configs = {
            who: call.launched(LaunchConfig(call.name, tuple(found.items()))) for who, found in parameters.items()
        }
        return cls(kernel.tuner, stock_key(kernel.tuner, call.args, call.kwargs), configs)

    def launch_with(self, who: str) -> None:
        """Let Triton's own tuner launch with the config of one."""
        self.tuner.cache[self.key] = self.configs.get(who, self.configs[WINNER])


def exhaustive_us(call: AutotunedCall) -> dict[LaunchConfig, float]:
    """Return the time of every config that runs: the median of a few rounds, and near the best the share of many."""
    bench = bench_of(call)
    timed = bench.rounds(list(call.configs), ROUNDS)
    times = {config: statistics.median(samples) for config, samples in timed.items()}
    near = [config for config, time_us in times.items() if time_us <= NEAR * min(times.values())]
    finals = bench.rounds(near, FINAL_ROUNDS)
    prepare_arguments(call, near[0])
    usual_us = statistics.fmean(map(statistics.median, finals.values()))
    return times | {config: share * usual_us for config, share in shares(finals).items()}


def bench_of(call: AutotunedCall) -> LaunchBench:
    """Return what times the configs of a call in this process."""
    return LaunchBench(call, tune_call.machine().launches, Terms())


def stock_choice(kernel: TunedKernel, call: AutotunedCall) -> tuple[LaunchConfig, float]:
    """Return what Triton's own tuner chooses, and the seconds that it takes with all code compiled."""
    tuner, started = kernel.tuner, time.monotonic()
    tuner.nargs = dict(zip(tuner.arg_names, call.args, strict=False))
    timings = {config: tuner._bench(*call.args, config=config, **call.kwargs) for config in call.configs.values()}
    tuner.nargs = None
    return launch_config(call.name, min(timings, key=lambda config: timings[config])), time.monotonic() - started


def known_stock_choice(row: Mapping[str, Any], call: AutotunedCall) -> tuple[LaunchConfig, float] | None:
    """Return what an earlier measurement of a kernel says that Triton's own tuner chooses, and its seconds."""
    label = row.get("stock", {}).get("config")
    found = next((config for config in call.configs if config.label == label), None)
    return None if found is None else (found, row["stock_bench_seconds"])


def measure_list(row: dict[str, Any], kernel: TunedKernel, call: AutotunedCall) -> None:
    """Add to a row what an exhaustive measurement of the list says of both tuners' choices."""
    choice = kernel.explain(*call.args, **call.kwargs)
    stock, stock_seconds = known_stock_choice(row, call) or stock_choice(kernel, call)
    times = exhaustive_us(call)
    best = min(times, key=lambda config: times[config])
    winner = _config_of(choice)

    def against_best(config: LaunchConfig) -> dict[str, Any]:
        return {"config": config.label, "time_us": times[config], "over_best": times[config] / times[best] - 1}

    row |= {
        "kernel": call.name,
        "commit": source_commit(),
        "key": call.problem.label,
        "configs": len(call.configs),
        "dropped": len(choice.dropped or {}),
        "seconds": choice.seconds,
        "stock_bench_seconds": stock_seconds,
        "best": {"config": best.label, "time_us": times[best]},
        "winner": against_best(winner),
        "stock": against_best(stock),
        "first_us": times.get(call.default),
        "chosen": {STOCK: stock.parameters, WINNER: winner.parameters},
    }


def measure_repeats(row: dict[str, Any], kernel: TunedKernel, call: AutotunedCall) -> None:
    """Add to a row how often searches find the same winner."""
    row["same_of_repeats"] = same_of_repeats(call, kernel.explain(*call.args, **call.kwargs))


def measure_expanded(row: dict[str, Any], kernel: TunedKernel, call: AutotunedCall) -> None:
    """Add to a row how much faster than the library's own choice a search around its list gets."""
    library = LaunchConfig(call.name, tuple(row["chosen"][STOCK].items()))
    row["expanded"], config = expanded(kernel, call, library)
    row["chosen"][EXPANDED] = config.parameters


def same_of_repeats(call: AutotunedCall, choice: KernelExplanation) -> int:
    """Return how many of repeated races find the most frequent winner. Configs that the first search dropped or found
    equal to another take no part."""
    raced = [config for config in call.configs if choice.times_us is None or config in choice.times_us]
    standings = [race(raced, bench_of(call).rounds) for _ in range(REPEATS)]
    winners = Counter(standing.winner for standing in standings if standing is not None)
    prepare_arguments(call, call.default)
    return winners.most_common(1)[0][1]


def expanded(kernel: TunedKernel, call: AutotunedCall, library: LaunchConfig) -> tuple[dict[str, Any], LaunchConfig]:
    """Return how much faster than the library's own choice a search around its list gets, and its config."""
    wider = TunedKernel(kernel.tuner, Settings(expand=EXPAND), decide)
    choice = wider.explain(*call.args, **call.kwargs)
    winner = _config_of(choice)
    both = replace(call, configs={library: call.configs[library], winner: call.launched(winner)})
    times = exhaustive_us(both)
    found = {"config": winner.label, "time_us": times[winner], "gain": times[library] / times[winner]}
    return found, winner


def _config_of(choice: KernelExplanation) -> LaunchConfig:
    assert choice.config is not None  # it was measured
    return choice.config


def differences(step: Callable[[], Sequence[Tensor]], chosen: Sequence[Chosen]) -> Mapping[str, float | None]:
    """Return how far outputs and gradients of a pass are from those under Triton's choices, in the Frobenius norm; None
    where one is not finite."""

    def under(who: str) -> Sequence[Tensor]:
        for each in chosen:
            each.launch_with(who)
        torch.manual_seed(0)
        return step()

    right = under(STOCK)
    found = {}
    for who in (WINNER, EXPANDED):
        worst = max(map(_difference, under(who), right), default=0.0)
        found[who] = worst if math.isfinite(worst) else None
    return found


def _difference(ours: Tensor, theirs: Tensor) -> float:
    right = theirs.double()
    error = float((ours.double() - right).norm() / right.norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


PARTS = {"winner": measure_list, "same_of_repeats": measure_repeats, EXPANDED: measure_expanded}
"""What adds to a kernel's row, by a name that the row has afterwards."""
