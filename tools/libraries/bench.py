"""Autotuned kernels of fla-core and liger-kernel under this tuner and under Triton's own, on a GPU.

python -m tools.libraries.bench winners --out results/h200.libraries.json [--step "fla gla"]
python -m tools.libraries.bench starts --model fla --tuner stock --out results/h200.libraries.json
python -m tools.libraries.bench processes --model fla --out results/h200.libraries.json
python -m tools.libraries.bench calls --out results/h200.libraries.json
python -m tools.libraries.bench ranks --out results/h200.libraries.json
python -m tools.libraries.bench faults --out results/h200.libraries.json
python -m tools.libraries.bench helion --out results/h200.libraries.json

A command ends after --seconds, 300 unless given. Each adds to the file what it has measured, at once; `winners` goes on
where an earlier one stopped, within a kernel too, and leaves out what is in the file: a kernel is measured where a pass
first launches it. So does `helion`, an example at a time. With --again the kernels of the steps that are named are
measured once more.
A pass that fails is noted with its error, one that takes its process down as well, and the next one follows. Both
packages have to be importable, installed without their dependencies; `helion` needs Helion as well.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import triton
from triton.testing import do_bench

from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.values.errors import NoDeviceError
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.kernel import TunedKernel
from blocktune.runtime.autotuned.stock_tuner import stock_key
from blocktune.tuner.measure.environment import source_commit
from tests.support.libraries import hits as library_hits
from tests.support.libraries import measures as library_measures
from tests.support.libraries import rivals as library_rivals
from tests.support.libraries import steps as library_steps
from tests.support.libraries.calls import handed_over
from tests.support.libraries.document import ended, forget_failures, measure_again, note, read, write
from tests.support.libraries.faults import faulty_configs
from tests.support.libraries.measures import EXPANDED, WINNER, Chosen
from tools import ROOT, program
from tools.libraries import starts as library_starts

ATTEMPTS = 2
"""How often a search around a list may take its process down, or meet the end of the time, until it is left out."""

MAX_ERROR = 500

KEPT = ("stock", "stock_bench_seconds", EXPANDED)
"""What --again keeps of a kernel: the choice of Triton's own tuner, whose bench takes the longest, and the search."""


PARTS = ("winners", "starts", "processes", "calls", "ranks", "faults", "helion", "measure")


class OutOfTimeError(Exception):
    """The seconds of this command are over."""


class Winners:
    """The passes whose kernels are measured, in this process. Each part of a kernel's row is written when it is done,
    and what is missing of a row is measured by whoever comes next.

    Args:
        path: the file that takes the results.
        seconds: the time for all of it.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._end = path, time.monotonic() + seconds
        self._document = read(path)
        rows = self._document["kernels"]
        self._rows = {row["kernel"]: row for row in rows if "again" not in row}
        self._earlier = {row["kernel"]: row for row in rows if "again" in row}
        self._presets: list[tuple[dict[Any, Any], Any]] = []

    def run(self, steps: Sequence[str]) -> None:
        """Measure what passes launch until all are done or the time is over.

        Raises:
            Exception: a pass has left the GPU in a state in which nothing runs.
        """
        try:
            for step in steps:
                self._settle(step)
        except OutOfTimeError:
            sys.stdout.write("out of time: run this again for the rest\n")

    def _settle(self, step: str) -> None:
        """Measure what a pass launches, and note how it ended."""
        started = time.monotonic()
        row: dict[str, Any] = {"step": step, "error": "", "difference": {}}
        try:
            chosen = self._chosen(step)
            row["difference"] = self._differences(step, chosen) if chosen else {}
        except OutOfTimeError:
            raise
        except Exception as error:  # whatever a library or the GPU raises: the other passes are to follow
            row["error"] = f"{type(error).__name__}: {error}"[:MAX_ERROR]
        finally:
            for cache, key in self._presets:
                cache.pop(key, None)
            self._presets.clear()
        note(self._document, self._path, row | {"seconds": time.monotonic() - started})
        if row["error"] and torch.cuda.is_available():
            torch.cuda.synchronize()

    def _chosen(self, step: str) -> list[Chosen]:
        """Run a pass, measure its kernels that no pass has launched before, and return what is chosen for them."""
        chosen: list[Chosen] = []

        def on_call(kernel: TunedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._require_time()
            call = kernel.call_of(args, kwargs)
            if not fnmatch(call.name, library_steps.ONLY.get(step, "*")):
                self._preset(kernel, call)
                return
            row = self._rows.get(call.name)
            if len(call.configs) == 1 or (row is not None and not _is_of(row, call, step)):
                kernel.explain(*args, **kwargs)  # which is what the launch takes, too
                return
            row = self._measured(step, kernel, call)
            chosen.append(Chosen.of(kernel, call, row["chosen"]))
            chosen[-1].launch_with(WINNER)

        with handed_over(on_call):
            library_steps.STEPS[step]("cuda")
        return chosen

    def _measured(self, step: str, kernel: TunedKernel, call: AutotunedCall) -> dict[str, Any]:
        """Return the row of a kernel, with what was missing of it."""
        row: dict[str, Any] = self._rows.get(call.name) or {"step": step, **self._kept(call)}
        for part, measure in library_measures.PARTS.items():
            if part in row or row.get("attempts", 0) >= ATTEMPTS:
                continue
            self._require_time()
            if part == EXPANDED:  # it may reach outside of a tensor, and end this process
                row["attempts"] = row.get("attempts", 0) + 1
                write(self._path, self._document)
            measure(row, kernel, call)
            self._rows[call.name] = row
            self._document["kernels"] = [each for each in self._document["kernels"] if each["kernel"] != call.name]
            self._document["kernels"].append(row)
            write(self._path, self._document)
        say(row)
        return row

    def _preset(self, kernel: TunedKernel, call: AutotunedCall) -> None:
        """Let a kernel that is not measured in this pass run with the first config of its list, in this pass."""
        cache, key = kernel.tuner.cache, stock_key(kernel.tuner, call.args, call.kwargs)
        if key not in cache:
            cache[key] = call.configs[call.default]
            self._presets.append((cache, key))

    def _kept(self, call: AutotunedCall) -> dict[str, Any]:
        """Return what is not measured again of a kernel."""
        earlier = self._earlier.get(call.name, {"key": None})
        same = earlier["key"] == call.problem.label
        return {name: earlier[name] for name in KEPT if same and name in earlier}

    def _require_time(self) -> None:
        """Require that there is time for more.

        Raises:
            OutOfTimeError: there is none.
        """
        if time.monotonic() > self._end:
            raise OutOfTimeError

    def _differences(self, step: str, chosen: Sequence[Chosen]) -> Mapping[str, float | None]:
        with handed_over(lambda *_: None):  # so that examples, too, are launched with what is chosen
            return library_measures.differences(lambda: library_steps.STEPS[step]("cuda"), chosen)


def winners(path: Path, steps: Sequence[str], seconds: float) -> None:
    """Measure passes in processes of their own: one that dies costs its pass, unless that got further than before."""
    end = time.monotonic() + seconds
    forget_failures(path)
    while (left := [step for step in steps if step not in ended(path)]) and time.monotonic() < end:
        before, begun = read(path), time.monotonic()
        code = measured_apart(path, left, end)
        if code == 0:
            return
        if read(path) == before:
            row = {"step": left[0], "error": f"its process ended with {code}", "difference": {}}
            note(read(path), path, row | {"seconds": time.monotonic() - begun})


def measured_apart(path: Path, steps: Sequence[str], end: float) -> int:
    """Return how a process ended that measures passes until a time."""
    seconds = end - time.monotonic()
    names = [word for step in steps for word in ("--step", step)]
    words = ("measure", "--out", str(path), "--seconds", str(seconds), *names)
    with subprocess.Popen([*program("libraries.bench"), *words], cwd=ROOT) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            sys.stdout.write("out of time within a kernel: run this again for the rest\n")
            return 0


def start_times(path: Path, model: str, tuner: str, seconds: float, meanwhile: str) -> None:
    """Time two processes that start one after the other with empty caches, in this many seconds."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        for start in ("cold", "second"):
            row = {"model": model, "tuner": tuner, "start": start, "meanwhile": meanwhile, "commit": source_commit()}
            row |= library_starts.timed_start(model, tuner, folder, end - time.monotonic())
            document = read(path)
            document["starts"] = [each for each in document["starts"] if not row.items() >= _key_of(each).items()]
            document["starts"].append(row)
            write(path, document)
            sys.stdout.write(json.dumps(row) + "\n")
            if row["step_seconds"] is None or time.monotonic() >= end:
                return


def _is_of(row: Mapping[str, Any], call: AutotunedCall, step: str) -> bool:
    """Return whether a row is of this very call of a pass, and says what was chosen for it."""
    return row["step"] == step and row["key"] == call.problem.label and "chosen" in row


def say(row: Mapping[str, Any]) -> None:
    """Print what was found of a kernel, for whoever watches."""
    kernel = row["kernel"].rpartition(":")[2]
    gain = f"expanded {row[EXPANDED]['gain']:.3f} times as fast" if EXPANDED in row else "the search had no end"
    sys.stdout.write(
        f"{row['step']}: {kernel}: {row['winner']['over_best']:.2%} over the best of {row['configs']} configs, stock "
        f"{row['stock']['over_best']:.2%}, {gain}, the same in {row['same_of_repeats']} of "
        f"{library_measures.REPEATS}\n"
    )
    sys.stdout.flush()


def _key_of(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("model", "tuner", "start")}


def process_agreement(path: Path, model: str, count: int, seconds: float) -> None:
    """Start processes at once on empty caches and compare what they launch with."""
    document = read(path)
    row = {"model": model, "commit": source_commit(), **library_starts.agreement(model, count, seconds)}
    document["processes"] = [each for each in document["processes"] if each["model"] != model] + [row]
    write(path, document)
    sys.stdout.write(json.dumps(row) + "\n")


def rank_agreement(path: Path, ranks: int, seconds: float) -> None:
    """Let a rank on every GPU launch one kernel, while some stay away or die."""
    with tempfile.TemporaryDirectory() as folder:
        words = (*program("libraries.autotuned_ranks"), folder, str(ranks))
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=seconds, check=True)
    write(path, read(path) | {"ranks": [json.loads(line) for line in done.stdout.splitlines()]})
    sys.stdout.write(done.stdout)


def warm_up() -> None:
    """Let the GPU and Triton's own launcher start before the first kernel is timed."""
    x = torch.ones(1 << 20, device="cuda")
    do_bench(lambda: x.mul_(1.0))
    sys.stdout.write(f"{current_device().name}, triton {triton.__version__}, torch {torch.__version__}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--step", choices=tuple(library_steps.STEPS), action="append", help="for winners; all if not given"
    )
    parser.add_argument("--model", choices=("fla", "liger"), default="fla")
    parser.add_argument("--tuner", choices=library_starts.TUNERS, default="blocktune", help="for starts")
    parser.add_argument("--count", type=int, default=8, help="processes")
    parser.add_argument("--again", action="store_true", help="winners: measure what these steps have in the file")
    parser.add_argument("--meanwhile", default="", help="starts: what else runs on the machine meanwhile")
    parser.add_argument("--seconds", type=float, default=300.0)
    given = parser.parse_args()
    try:
        current_device()
    except NoDeviceError as error:
        sys.exit(f"error: {error}")
    steps = given.step or list(library_steps.STEPS)
    if given.part == "winners":
        if given.again:
            measure_again(given.out, steps)
        winners(given.out, steps, given.seconds)
    elif given.part == "measure":  # as the process of `winners`
        warm_up()
        Winners(given.out, given.seconds).run(steps)
    elif given.part == "starts":
        start_times(given.out, given.model, given.tuner, given.seconds, given.meanwhile)
    elif given.part == "calls":
        write(given.out, read(given.out) | {"calls": library_hits.known_calls()})
    elif given.part == "ranks":
        rank_agreement(given.out, torch.cuda.device_count(), given.seconds)
    elif given.part == "faults":
        write(given.out, read(given.out) | {"faults": [faulty_configs("cuda")]})
    elif given.part == "helion":
        library_rivals.compare(given.out, given.seconds)
    else:
        process_agreement(given.out, given.model, given.count, given.seconds)


if __name__ == "__main__":
    main()
