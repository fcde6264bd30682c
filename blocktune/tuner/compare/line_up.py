"""The contenders of one shape: checked one by one, then timed in turns."""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from blocktune.db.records.records import Regime
from blocktune.kernels.base.kernel import Thunk
from blocktune.kernels.base.paper_rule import SMALLEST_BLOCK
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.candidates.contenders import Contenders
from blocktune.tuner.compare.peers import Compute, own_compute, sdpa_compute, sdpa_gradients, thunk_compute
from blocktune.tuner.compare.report import FEW_QUERIES, Entry, Timing, fastest_peer, timing_of
from blocktune.tuner.compare.rivals_file import Rival, copied_inputs, inputs_kept, put_back, stale_problem
from blocktune.tuner.compare.stock_autotune import Bind, run_stock_autotune
from blocktune.tuner.compile_server.background import Compiler
from blocktune.tuner.correctness.backward import GradientQuestion
from blocktune.tuner.correctness.checks_of_shape import AnyQuestion
from blocktune.tuner.correctness.features import FeatureQuestion
from blocktune.tuner.correctness.forward import Question, softmax_scale
from blocktune.tuner.measure.clock import Clock, rested_round
from blocktune.tuner.measure.load import Load, Monitor, Watch
from blocktune.tuner.measure.protocol import (
    FINAL_HEAT_SECONDS,
    LOAD_SECONDS,
    REST_SECONDS,
    Rounds,
    balanced_order,
    column,
)

ROUNDS_SECONDS = 1.2
"""Wall time of all rounds of a shape in bursts, within `ROUNDS`."""
ROUNDS = (9, 41)


class LineUp:
    """Contenders of one shape as they are checked and timed."""

    def __init__(self, shape: AttentionShape, question: AnyQuestion, clock: Clock, bind: Bind):
        self._shape = shape
        self._question = question
        self._clock = clock
        self._bind = bind
        self._out = question.new_result()
        self._entries: list[Entry] = []
        self._runs: list[Callable[[], Any]] = []
        self._places: dict[str, int] = {}  # of those who passed, among the runs
        self._failures: dict[int, str] = {}  # of runs that raised while they were timed
        self._rivals: list[str] = []

    def invite_own(self, configs: Mapping[str, KernelConfig | None]) -> None:
        """Check our kernels as contenders. A config of None means that no config fits."""
        for name, config in configs.items():
            if config is None:
                self._entries.append(Entry(name=name, problem=self._no_block()))
            else:
                self.invite(Entry(name=name, config=config), functools.partial(self._own, config))

    def invite(
        self, entry: Entry, make: Callable[[], Compute], around: AbstractContextManager[None] | None = None
    ) -> None:
        """Check a contender; one that fails or is wrong is kept with the reason and not timed.

        Args:
            entry: the contender.
            make: returns what it computes.
            around: entered for the check; what it raises is the contender's failure.
        """
        if self._takes_part(entry):
            return
        question = self._question
        try:
            with around or nullcontext():
                compute = make()
                question.poison(self._out)
                problem = question.problem(compute(question.q, question.k, question.v)) or ""
        except Exception as error:
            problem = self._failure(error)
        self._entries.append(replace(entry, problem=problem))
        if not problem:
            self._places[entry.name] = len(self._runs)
            self._runs.append(functools.partial(compute, question.q, question.k, question.v))

    def _failure(self, error: Exception) -> str:
        """Return the words about a contender that raised.

        Raises:
            RuntimeError: the GPU is lost for everyone.
        """
        self._clock.synchronize()
        return f"{type(error).__name__}: {error}"

    def _takes_part(self, entry: Entry) -> bool:
        """Return whether this config takes part under another name already, whose check and times it then shares.

        Timed again right after itself, it would find its code in the caches.
        """
        if entry.config is None:
            return False
        twin = next((other for other in self._entries if other.config == entry.config), None)
        if twin is None:
            return False
        self._entries.append(replace(entry, problem=twin.problem))
        if twin.name in self._places:
            self._places[entry.name] = self._places[twin.name]
        return True

    def invite_torch(self, name: str, backend: str) -> None:
        """Check one of PyTorch's back ends as `invite` does."""
        shape, question = self._shape, self._question
        if isinstance(question, GradientQuestion):
            self.invite(Entry(name=name), functools.partial(sdpa_gradients, shape, backend, question))
        else:
            extras = question.inputs.extras if isinstance(question, FeatureQuestion) else NO_EXTRAS
            self.invite(Entry(name=name), functools.partial(sdpa_compute, shape, backend, extras))

    def invite_rival(self, name: str, rival: Rival) -> None:
        """Check a function that a file names as `invite` does, and once more after it was timed."""
        make = functools.partial(rival.compute, self._shape, self._question)
        self.invite(Entry(name=name), make, inputs_kept(self._question))
        if name in self._places:
            self._rivals.append(name)

    def invite_stock_autotune(self, contenders: Contenders, cc: tuple[int, int], compiler: Compiler) -> None:
        """Let stock autotune search the feasible space, and invite its winner."""
        question, name = self._question, "triton_autotune"
        if not isinstance(question, Question):
            problem = "stock autotune tunes one function of a forward without features, and no other"
            self._entries.append(Entry(name=name, problem=problem))
            return
        configs = [config for config in contenders.space.feasible if not self._launches_several(config)]
        try:
            tuning = run_stock_autotune(
                configs,
                self._shape,
                cc,
                compiler=compiler,
                bind=self._bind,
                arguments=(question.q, question.k, question.v, self._out, None, softmax_scale(self._shape)),
                synchronize=self._clock.synchronize,
            )
        except Exception as error:
            self._entries.append(Entry(name=name, problem=self._failure(error)))
        else:
            entry = Entry(name=name, config=tuning.winner, tuning=tuning)
            self.invite(entry, functools.partial(self._own, tuning.winner))

    def time(self, regime: Regime, monitor: Monitor) -> tuple[Rounds, Load | None]:
        """Return the paired rounds of all who passed, and how the GPU worked meanwhile; no load without rounds."""
        if not self._runs:
            return (), None
        take = self._time_under_load if regime is Regime.SUSTAINED else self._bursts
        launches = [functools.partial(self._launch, place) for place in range(len(self._runs))]
        before = copied_inputs(self._question) if self._rivals else []
        timed = take(launches, monitor)
        if before:
            put_back(self._question, before)  # another run of each shows who changed them
        for name in self._rivals:
            place = self._places[name]
            self._failures.setdefault(place, self._problem_afterwards(self._runs[place]))
        self._disqualify()
        return timed

    def _launch(self, place: int) -> None:
        """Launch a contender that is timed. One that raises costs the others nothing, and loses its times at the
        end."""
        try:
            self._runs[place]()
        except Exception as error:
            self._failures.setdefault(place, f"{type(error).__name__}: {error}")

    def _problem_afterwards(self, run: Callable[[], Any]) -> str:
        """Return why a rival no longer computes what it was timed for; empty if it does."""
        try:
            with inputs_kept(self._question):
                return stale_problem(run, self._question) or ""
        except Exception as error:
            return self._failure(error)

    def _disqualify(self) -> None:
        """Take the times from contenders that failed meanwhile."""
        lost = {name: problem for name, place in self._places.items() if (problem := self._failures.get(place))}
        for name in lost:
            del self._places[name]
        self._entries = [replace(entry, problem=lost.get(entry.name, entry.problem)) for entry in self._entries]

    def _time_under_load(self, launches: Sequence[Thunk], monitor: Monitor) -> tuple[Rounds, Load]:
        before_seconds, timed_seconds = LOAD_SECONDS
        self._clock.loaded_rounds(launches, before_seconds)
        with Watch(monitor) as watch:
            rounds = self._clock.loaded_rounds(launches, timed_seconds)
        return rounds, watch.load()

    def _bursts(self, launches: Sequence[Thunk], monitor: Monitor) -> tuple[Rounds, Load]:
        self._clock.heat(launches[0], FINAL_HEAT_SECONDS[Regime.BURST])
        estimate_us = sum(self._clock.rounds(launches, 1)[0])
        wanted = int(ROUNDS_SECONDS / (REST_SECONDS + 1e-6 * estimate_us))
        count = max(ROUNDS[0], min(ROUNDS[1], wanted))
        with Watch(monitor) as watch:
            orders = (balanced_order(len(launches), number) for number in range(count))
            rounds = tuple(rested_round(self._clock, launches, order) for order in orders)
        return rounds, watch.load()

    def timed_entries(self, rounds: Rounds) -> tuple[Entry, ...]:
        """Return all contenders, those that were timed with their times."""
        samples = {name: column(rounds, place) for name, place in self._places.items()}
        best = fastest_peer({name: statistics.median(times) for name, times in samples.items()})
        best_us = None if best is None else samples[best]
        return tuple(
            replace(entry, timing=self._timing(samples[entry.name], samples.get("cudnn"), best_us))
            if entry.name in samples
            else entry
            for entry in self._entries
        )

    def _timing(
        self, samples_us: Sequence[float], cudnn_us: Sequence[float] | None, best_us: Sequence[float] | None
    ) -> Timing:
        shape, question = self._shape, self._question
        reads = shape.direction is Direction.FORWARD and shape.seqlen_q <= FEW_QUERIES
        return timing_of(samples_us, cudnn_us, best_us, question.flops, question.key_bytes if reads else None)

    def _own(self, config: KernelConfig) -> Compute:
        launch, question = self._bind(config, self._shape), self._question
        if isinstance(question, Question):
            return own_compute(launch, self._shape, self._out)
        return thunk_compute(launch, question, self._out)

    def _no_block(self) -> str:
        """Return why a rule names no config."""
        if self._shape.direction is Direction.BACKWARD or self._shape.seqlen_q < SMALLEST_BLOCK:
            return "this rule is one of a forward whose queries fill a tile"
        return "no block of this rule fits the device"

    def _launches_several(self, config: KernelConfig) -> bool:
        return bool(get_kernel(config.kernel).further_specs(config, self._shape))
