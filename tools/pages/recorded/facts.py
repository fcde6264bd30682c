"""Sentences of the documents that are computed from results/: `<!-- results facts#NAME -->` holds the one of a name."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blocktune.cli.lab.noise_file import NOISE_FORMAT
from blocktune.cli.lab.noise_file import SCHEMA as NOISE_SCHEMA
from blocktune.cli.lab.replay_file import read_replay
from blocktune.cli.output.json_files import read_document
from blocktune.cli.tune.bench_file import read_bench
from blocktune.db.exchange.document import load_document
from blocktune.db.exchange.importing import records_from
from blocktune.kernels.registry import get_kernel
from blocktune.tuner.lab.racing import CLOSE
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.measure.protocol import RACE_MARGIN, TIE_BAND
from tools.pages.checks import fault_tables
from tools.pages.front_page import attention_speed, tuner_speed, verdict
from tools.pages.recorded.places import place_of
from tools.pages.recorded.sweeps import sweeps_in

FILE = "facts"
"""What stands in place of a file's name."""

HOPPER = "flash_fwd_hopper"
PORTABLE = ("flash_fwd", "flash_fwd_tma")
BACKWARDS = {"flash_bwd_split": "two passes", "flash_bwd_fused": "one kernel", "flash_bwd_hopper": "Hopper"}


def fact(name: str, results: Path) -> str:
    """Return the sentences of a name.

    Args:
        name: one of `FACTS`.
        results: the folder of the recorded files.
    """
    return FACTS[name](results)


def hopper_defaults(results: Path) -> str:
    """Return how the defaults of the Hopper forward compare with shipped winners and recorded sweeps."""
    bests, _ = records_from(load_document(place_of("h200.json", results)))
    mine = [best for best in bests if best.config.kernel == HOPPER]
    same = [best.config == get_kernel(HOPPER).default_config(best.shape, best.device.limits) for best in mine]
    found = [over_the_best(sweep, HOPPER) for sweep in sweeps(results).values() if winning_kernel(sweep) == HOPPER]
    lost = [ratio for ratio in found if ratio is not None]
    return (
        f"The default config follows the winners of the search on the H200: of those that ship, {sum(same)} of "
        f"{len(same)} are the default. In the recorded sweeps its time is {_more(statistics.median(lost))} above the "
        f"best in the median, and {_more(max(lost))} at most ({len(lost)} sweeps)."
    )


def hopper_and_portable(results: Path) -> str:
    """Return what the Hopper forward gains at other head dimensions than 64 and 128, and what spills."""
    labels = [f"b4 h{heads} s4096 d{dim} bf16 causal" for heads, dim in ((21, 96), (8, 256))]
    (ours, theirs), (wide, wider) = (
        (best_us(results, label, HOPPER), best_us(results, label, *PORTABLE)) for label in labels
    )
    return (
        f"In the recorded sweeps of 4096 causal keys the best config takes {ours:.0f} µs at head_dim 96 where the best "
        f"portable one takes {theirs:.0f}, and {wide:.0f} instead of {wider:.0f} at 256."
    )


def backward_kernels(results: Path) -> str:
    """Return which plain backward is faster, by the bench, and all three by the sweeps."""
    rows = [
        {entry["name"]: entry["timing"]["median_us"] for entry in row["contenders"] if entry["timing"]}
        for row in read_bench(results / "h200-passes.bench.json")["rows"]
    ]
    ratios = [row["flash_bwd_split"] / row["flash_bwd_fused"] for row in rows if "flash_bwd_fused" in row]
    lines = [_line(("shape", *BACKWARDS.values())), _line(("---", *["---:"] * len(BACKWARDS)))]
    for label in sorted(label for label in sweeps(results) if label.endswith("backward")):
        times = (f"{best_us(results, label, kernel):.0f}" for kernel in BACKWARDS)
        lines.append(_line((label.removesuffix(" backward"), *times)))
    return (
        f"Timed against each other for {len(ratios)} shapes, two passes win in {sum(ratio < 1 for ratio in ratios)}, "
        f"and one kernel has {statistics.geometric_mean(ratios):.2f} of their speed. The best configs of the recorded "
        "sweeps, in microseconds:\n\n" + "\n".join(lines)
    )


def best_defaults(results: Path) -> str:
    """Return in how many sweeps the default of the fastest kernel is the best config, or as good."""
    found = [over_the_best(sweep, winning_kernel(sweep)) for sweep in sweeps(results).values()]
    known = [ratio for ratio in found if ratio is not None]
    return (
        f"On {sum(ratio == 1 for ratio in known)} of the {len(found)} sweeps the default of the fastest kernel is the "
        f"best config, on {sum(ratio <= 1 + TIE_BAND for ratio in known)} it is within {_more(1 + TIE_BAND)} of it, "
        "and there every strategy is right at once."
    )


def noise(results: Path) -> str:
    """Return what a study of the noise says of the protocol."""
    regimes = _noise(results)["summary"]["regimes"]
    heated, duels = regimes["sustained"]["candidates"], [row["duels"] for row in regimes.values()]
    time, ratio = (max(abs(heated[name][end] - 1) for end in ("low", "high")) for name in ("time", "ratio"))
    count, won, apart = (sum(row["count"] for row in duels), sum(row["won"] for row in duels),
                         max(row["distance"] for row in duels))  # fmt: skip
    fast, slow = (regimes[name]["state"]["finals"]["sm_clock_mhz"][1] / 1000 for name in ("burst", "sustained"))
    return (
        f"- Times of one config wander by {_more(1 + time)} either way when the GPU is driven to its power cap, ratios "
        f"to a neighbour in the same rounds by {_more(1 + ratio)}.\n"
        f"- Finals of a config against itself declared no winner in {count - won} of {count} cases, and their sides "
        f"were {100 * apart:.2f} % apart.\n"
        f"- The clock falls from {fast:.2f} to {slow:.2f} GHz between the regimes."
    )


def race(results: Path) -> str:
    """Return what the margin of a race is worth."""
    rows = [row for row in read_replay(results / "h200.replay.json")["racing"] if not row.get("pruner")]
    close = f"configs within {_more(1 + CLOSE)} of the best"
    row = next(row for row in rows if row["margin"] == RACE_MARGIN)
    smaller = [row for row in rows if row["margin"] < RACE_MARGIN]
    return (
        f"A margin of {_more(RACE_MARGIN)} stopped {row['stopped_close']} of {row['close']} {close}; every smaller one "
        f"that was tried stopped {min(row['stopped_close'] for row in smaller)} or more."
    )


def gp_sampler(results: Path) -> str:
    """Return what Optuna's GPSampler found in a replay of its own."""
    document = read_replay(results / "h200-gp.replay.json")
    mean, guided = (document["strategies"][name]["regret"]["20"]["mean"] for name in ("gp", "guided"))
    return (
        f"GPSampler searched {len(document['sweeps'])} of these sweeps once, when defaults and searches were older: "
        f"{100 * mean:.2f} % after 20 measurements on average, where `guided` had {100 * guided:.2f} %."
    )


def store_faults(results: Path) -> str:
    """Return what the store and the commands were put through."""
    return fault_tables.counts(results / f"store{fault_tables.SUFFIX}")


FACTS: dict[str, Callable[[Path], str]] = {
    each.__name__: each
    for each in (
        *(attention_speed, tuner_speed, verdict, hopper_defaults, hopper_and_portable),
        *(backward_kernels, best_defaults, gp_sampler, noise, race, store_faults),
    )
}


def sweeps(results: Path) -> dict[str, Sweep]:
    """Return the recorded sweeps by the labels of their shapes."""
    return {sweep.shape.label: sweep for sweep in sweeps_in(results / "sweeps")}


def over_the_best(sweep: Sweep, kernel: str) -> float | None:
    """Return what the default of a kernel takes over the best of a sweep; None where the sweep does not hold it."""
    config = get_kernel(kernel).default_config(sweep.shape, sweep.device.limits)
    score = sweep.scores.get(config) if config else None
    return None if score is None else score / min(sweep.scores.values())


def winning_kernel(sweep: Sweep) -> str:
    """Return the kernel of the best config of a sweep."""
    return min(sweep.scores, key=sweep.scores.__getitem__).kernel


def best_us(results: Path, label: str, *kernels: str) -> float:
    """Return the time of the best recorded config of some kernels, in microseconds."""
    sweep = sweeps(results)[label]
    scores = {config: score for config, score in sweep.scores.items() if config.kernel in kernels}
    return sweep.timed[min(scores, key=scores.__getitem__)].time_us or float("nan")


def _noise(results: Path) -> dict[str, Any]:
    return read_document(results / "h200.noise.json", "results", NOISE_FORMAT, NOISE_SCHEMA)


def _more(ratio: float) -> str:
    return f"{100 * (ratio - 1):.1f} %"


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
