"""Autotuned kernels of fla-core and liger-kernel under this tuner and under Triton's own, on a GPU.

python -m tests.support.programs.library_bench winners --out results/h200.libraries.json [--step "fla gla"]
python -m tests.support.programs.library_bench starts --model fla --tuner stock --out results/h200.libraries.json
python -m tests.support.programs.library_bench processes --model fla --out results/h200.libraries.json

A command ends after --seconds, 450 unless given. Each adds to the file what it has measured; `winners` goes on
where an earlier one stopped, and leaves out the kernels that are in the file. Both packages have to be importable,
installed without their dependencies.
"""

import argparse
import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
from triton.testing import do_bench

from blocktune.db.exchange.document import save_text
from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.tuned.call import Call, Choice
from blocktune.kernels.tuned.config import UserConfig
from blocktune.kernels.tuned.kernel import TunedKernel
from blocktune.kernels.tuned.settings import Settings
from blocktune.kernels.tuned.triton_config import user_config
from blocktune.kernels.values.errors import NoDeviceError
from blocktune.tuner.measure.environment import source_commit
from blocktune.tuner.tuned.decide import decide
from blocktune.tuner.tuned.tune_call import tuned_choice
from blocktune.tuner.turns.clock import CudaTurnClock
from blocktune.tuner.turns.launches import OwnLaunches
from blocktune.tuner.turns.outputs import OutputCheck
from tests.support import library_steps
from tests.support.library_calls import handed_over
from tests.support.programs import library_starts

FORMAT, SCHEMA = "blocktune-libraries", 1

ROUNDS, FINAL_ROUNDS, NEAR = 7, 60, 1.15
"""Rounds of every config, then of those within NEAR of the best: the exhaustive optimum."""

REPEATS = 10
EXPAND = 48


class OutOfTimeError(Exception):
    """The seconds of this command are over."""


def exhaustive_us(call: Call) -> dict[UserConfig, float]:
    """Return the median time of every config that runs; of those near the best it is that of many rounds."""
    launches = OwnLaunches(call, lambda: CudaTurnClock("cold"))
    timed = launches.rounds(list(call.configs), ROUNDS)
    times = {config: statistics.median(samples) for config, samples in timed.items()}
    near = [config for config, time_us in times.items() if time_us <= NEAR * min(times.values())]
    finals = launches.rounds(near, FINAL_ROUNDS)
    launches.close(near[0])
    return times | {config: statistics.median(samples) for config, samples in finals.items()}


def stock_choice(kernel: TunedKernel, call: Call) -> tuple[UserConfig, float]:
    """Return what Triton's own tuner chooses, and the seconds that it takes with all code compiled."""
    tuner, started = kernel.tuner, time.monotonic()
    tuner.nargs = dict(zip(tuner.arg_names, call.args, strict=False))
    timings = {config: tuner._bench(*call.args, config=config, **call.kwargs) for config in call.configs.values()}
    tuner.nargs = None
    return user_config(call.name, min(timings, key=lambda config: timings[config])), time.monotonic() - started


def expanded(kernel: TunedKernel, call: Call, library: UserConfig) -> dict[str, Any]:
    """Return how much faster than the library's own choice the winner of a search around its list is."""
    wider = TunedKernel(kernel.tuner, Settings(expand=EXPAND), decide)
    choice = wider.explain(*call.args, **call.kwargs)
    winner = user_config(call.name, choice.config)
    both = replace(call, configs={library: call.configs[library], winner: choice.config})
    times = exhaustive_us(both)
    return {"config": winner.label, "time_us": times[winner], "gain": times[library] / times[winner]}


def measured(kernel: TunedKernel, call: Call, choice: Choice) -> dict[str, Any]:
    """Return everything about one kind of call of one kernel."""
    device = current_device()
    times = exhaustive_us(call)
    best = min(times, key=lambda config: times[config])
    stock, stock_seconds = stock_choice(kernel, call)
    winner = user_config(call.name, choice.config)
    again = Counter(
        user_config(call.name, tuned_choice(call, device, afresh=True).config).label for _ in range(REPEATS)
    )
    return {
        "kernel": call.name,
        "key": call.problem.label,
        "configs": len(call.configs),
        "dropped": len(choice.dropped or {}),
        "seconds": choice.seconds,
        "stock_bench_seconds": stock_seconds,
        "best": {"config": best.label, "time_us": times[best]},
        "winner": {"config": winner.label, "time_us": times[winner], "over_best": times[winner] / times[best] - 1},
        "stock": {"config": stock.label, "time_us": times[stock], "over_best": times[stock] / times[best] - 1},
        "first_us": times.get(call.default),
        "same_of_repeats": again.most_common(1)[0][1],
        "wrong": OutputCheck(call).problem(call, winner) or "",
        "expanded": expanded(kernel, call, stock),
    }


def winners(path: Path, steps: Sequence[str], seconds: float) -> None:
    """Measure the kernels of steps that are not in the file yet."""
    document, end = read(path), time.monotonic() + seconds
    known = {(row["step"], row["kernel"], row["key"]) for row in document["kernels"]}
    for step in steps:

        def on_call(kernel: TunedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], step: str = step) -> None:
            call = kernel.call_of(args, kwargs)
            if time.monotonic() > end:
                raise OutOfTimeError
            choice = kernel.explain(*args, **kwargs)  # which is what the launch takes, too
            if len(call.configs) > 1 and (step, call.name, call.problem.label) not in known:
                document["kernels"].append({"step": step, **measured(kernel, call, choice)})
                write(path, document)
                say(document["kernels"][-1])

        try:
            with handed_over(on_call):
                library_steps.STEPS[step]("cuda")
        except OutOfTimeError:
            sys.stdout.write("out of time: run this again for the rest\n")
            return


def start_times(path: Path, model: str, tuner: str, seconds: float) -> None:
    """Time two processes that start one after the other with empty caches."""
    document = read(path)
    with tempfile.TemporaryDirectory() as folder:
        for start in ("cold", "second"):
            row = {"model": model, "tuner": tuner, "start": start}
            row |= library_starts.timed_start(model, tuner, folder, seconds)
            document["starts"] = [each for each in document["starts"] if not row.items() >= _key_of(each).items()]
            document["starts"].append(row)
            write(path, document)
            sys.stdout.write(json.dumps(row) + "\n")
            if row["step_seconds"] is None:
                return


def say(row: Mapping[str, Any]) -> None:
    """Print what was found of a kernel, for whoever watches."""
    kernel = row["kernel"].rpartition(":")[2]
    sys.stdout.write(
        f"{row['step']}: {kernel}: {row['winner']['over_best']:.2%} over the best of {row['configs']} configs, stock "
        f"{row['stock']['over_best']:.2%}, expanded {row['expanded']['gain']:.3f} times as fast, the same in "
        f"{row['same_of_repeats']} of {REPEATS} {row['wrong']}\n"
    )
    sys.stdout.flush()


def _key_of(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("model", "tuner", "start")}


def process_agreement(path: Path, model: str, count: int, seconds: float) -> None:
    """Start processes at once on empty caches and compare what they launch with."""
    document = read(path)
    row = {"model": model, **library_starts.agreement(model, count, seconds)}
    document["processes"] = [each for each in document["processes"] if each["model"] != model] + [row]
    write(path, document)
    sys.stdout.write(json.dumps(row) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Return the document of a file, or a new one."""
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "device": current_device().name,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": source_commit(),
        "software": {
            name: importlib.metadata.version(name) for name in ("triton", "torch", "fla-core", "liger-kernel")
        },
        "kernels": [],
        "starts": [],
        "processes": [],
    }


def write(path: Path, document: Mapping[str, Any]) -> None:
    save_text(json.dumps(document, indent=1, sort_keys=True) + "\n", path)


def warm_up() -> None:
    """Let the GPU and Triton's own launcher start before the first kernel is timed."""
    x = torch.ones(1 << 20, device="cuda")
    do_bench(lambda: x.mul_(1.0))
    sys.stdout.write(f"{current_device().name}, triton {triton.__version__}, torch {torch.__version__}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("winners", "starts", "processes"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--step", choices=tuple(library_steps.STEPS), action="append", help="for winners; all if not given"
    )
    parser.add_argument("--model", choices=("fla", "liger"), default="fla")
    parser.add_argument("--tuner", choices=library_starts.TUNERS, default="blocktune", help="for starts")
    parser.add_argument("--count", type=int, default=8, help="processes")
    parser.add_argument("--seconds", type=float, default=450.0)
    given = parser.parse_args()
    try:
        current_device()
    except NoDeviceError as error:
        sys.exit(f"error: {error}")
    if given.part == "winners":
        warm_up()
        winners(given.out, given.step or list(library_steps.STEPS), given.seconds)
    elif given.part == "starts":
        start_times(given.out, given.model, given.tuner, given.seconds)
    else:
        process_agreement(given.out, given.model, given.count, given.seconds)


if __name__ == "__main__":
    main()
