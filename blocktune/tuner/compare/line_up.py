"""The contenders of one shape: checked one by one, then timed in turns."""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

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
from blocktune.tuner.compare.rivals_file import Rival, stale_problem
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
        self._runs: list[Thunk] = []
        self._places: dict[str, int] = {}  # of those who passed, among the runs
        self._rivals: dict[str, Thunk] = {}

    def invite_own(self, configs: Mapping[str, KernelConfig | None]) -> None:
        """Check our kernels as contenders. A config of None means that no config fits."""
        for name, config in configs.items():
            if config is None:
                self._entries.append(Entry(name=name, problem=self._no_block()))
            else:
                self.invite(Entry(name=name, config=config), functools.partial(self._own, config))

    def invite(self, entry: Entry, make: Callable[[], Compute]) -> None:
        """Check a contender; one that fails or is wrong is kept with the reason and not timed."""
        if self._takes_part(entry):
            return
        question = self._question
        try:
            compute = make()
            question.poison(self._out)
            problem = question.problem(compute(question.q, question.k, question.v)) or ""
        except Exception as error:
            self._clock.synchronize()  # raises if the GPU is lost for everyone
            problem = f"{type(error).__name__}: {error}"
        self._entries.append(replace(entry, problem=problem))
        if not problem:
            self._places[entry.name] = len(self._runs)
            self._runs.append(functools.partial(compute, question.q, question.k, question.v))

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
        self.invite(Entry(name=name), functools.partial(rival.compute, self._shape, self._question))
        if name in self._places:
            self._rivals[name] = self._runs[self._places[name]]

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
            self._clock.synchronize()
            self._entries.append(Entry(name=name, problem=f"{type(error).__name__}: {error}"))
        else:
            entry = Entry(name=name, config=tuning.winner, tuning=tuning)
            self.invite(entry, functools.partial(self._own, tuning.winner))

    def time(self, regime: Regime, monitor: Monitor) -> tuple[Rounds, Load | None]:
        """Return the paired rounds of all who passed, and how the GPU worked meanwhile; no load without rounds."""
        if not self._runs:
            return (), None
        take = self._time_under_load if regime is Regime.SUSTAINED else self._bursts
        timed = take(monitor)
        self._disqualify()
        return timed

    def _disqualify(self) -> None:
        """Take the times from rivals that no longer compute what they are timed for."""
        for name, run in self._rivals.items():
            problem = stale_problem(run, self._question)
            if problem:
                del self._places[name]
                self._entries = [
                    replace(entry, problem=problem) if entry.name == name else entry for entry in self._entries
                ]

    def _time_under_load(self, monitor: Monitor) -> tuple[Rounds, Load]:
        before_seconds, timed_seconds = LOAD_SECONDS
        self._clock.loaded_rounds(self._runs, before_seconds)
        with Watch(monitor) as watch:
            rounds = self._clock.loaded_rounds(self._runs, timed_seconds)
        return rounds, watch.load()

    def _bursts(self, monitor: Monitor) -> tuple[Rounds, Load]:
        self._clock.heat(self._runs[0], FINAL_HEAT_SECONDS[Regime.BURST])
        estimate_us = sum(self._clock.rounds(self._runs, 1)[0])
        wanted = int(ROUNDS_SECONDS / (REST_SECONDS + 1e-6 * estimate_us))
        count = max(ROUNDS[0], min(ROUNDS[1], wanted))
        with Watch(monitor) as watch:
            orders = (balanced_order(len(self._runs), number) for number in range(count))
            rounds = tuple(rested_round(self._clock, self._runs, order) for order in orders)
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
