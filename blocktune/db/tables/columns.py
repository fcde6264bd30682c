"""The measured columns: each is declared here, once.

The tables (db/tables/models.py), the bounds, rows and documents of the records that inherit from these classes, and
sweep files are derived from the fields. They stand in the order of the table's columns: the recovery of a damaged file
(db/recovery/salvage.py) has nothing else to know a column by. A new one is `Later()`: it comes last, after the
checksums, which follow these in the tables. A new field needs a migration, and whoever measures it.
"""

from dataclasses import dataclass
from typing import Annotated

from blocktune.kernels.values.column_kinds import Derived, Later, Prose, Real, Several, Whole, Word

TIME = Real(1e-3, 1e10, decimals=3)  # up to nearly three hours for one call; CUDA's events resolve 0.5 us
RATIO = Real(1e-6, 1e6)
ANCHOR_RATIO = Real(1e-6, 1e6, decimals=6)
SECONDS = Real(0, 1e7, decimals=3)
FRACTION = Real(0, 1)
ENERGY = Real(1e-6, 1e10, decimals=3)
ROUNDS = Several(TIME, 10_000)
LIMITERS = Several(Word(32, "[a-z_]{1,32}", "the name of a limit"), 16)
ERROR = Prose(1_000_000)
CLOCK, TEMPERATURE = Whole(0, 100_000), Whole(0, 1000)
REASONS, PROCESSES = Whole(0, 2**63 - 1), Whole(0, 1_000_000)
OBJECTIVE = Word(16, "time|energy", "an objective")
VOTES = Several(Word(42, "[0-9a-f]{16}:[0-9a-f]{16}:[0-9]{8}", "the hashes of a machine and a config, and a day"), 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialColumns:
    """The measured columns of one candidate, besides its resources and the state of the GPU.

    error: why there is no time. Where there is a time, how it was taken if not as usual: twice, or with few rounds.
    time_us: the median of samples_us.
    relative_to_anchor: the median of time over the anchor's time in the same round; None when it was not timed.
    samples_us: the timed rounds.
    energy_mj: of a launch, by bursts in the finals; None for who did not take part, and where the GPU does not tell it.
    """

    error: Annotated[str, ERROR] = ""
    time_us: Annotated[float | None, TIME] = None
    relative_to_anchor: Annotated[float | None, ANCHOR_RATIO] = None
    predicted_us: Annotated[float | None, TIME, Derived()] = None
    samples_us: Annotated[tuple[float, ...], ROUNDS] = ()
    compile_seconds: Annotated[float, SECONDS] = 0.0
    bench_seconds: Annotated[float, SECONDS] = 0.0
    blocks_per_sm: Annotated[int | None, Whole(0, 1024), Derived()] = None
    occupancy: Annotated[float | None, FRACTION, Derived()] = None
    limiters: Annotated[tuple[str, ...], LIMITERS, Derived()] = ()
    energy_mj: Annotated[float | None, ENERGY, Later()] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """The state of the GPU during one measurement, by NVML; None where NVML has no answer.

    sm_clock_mhz, memory_clock_mhz: medians.
    temperature_c: the highest.
    power_w: the mean of a measurement that took a second or more, or of the bursts of a finalist, and None for shorter
        ones: NVML's own power is a mean over the last second, so a sample of a candidate's rounds shows what ran before
        them.
    throttle_reasons: every reason that occurred, as bits.
    """

    sm_clock_mhz: Annotated[int | None, CLOCK] = None
    memory_clock_mhz: Annotated[int | None, CLOCK] = None
    temperature_c: Annotated[int | None, TEMPERATURE] = None
    power_w: Annotated[float | None, Real(0, 100_000, decimals=1)] = None
    throttle_reasons: Annotated[int | None, REASONS] = None
    other_processes: Annotated[int | None, PROCESSES] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BestColumns:
    """The columns by which a winner was compared.

    speedup_over_default and its low/high are ratios of the default's time to the winner's in the interleaved final
    rounds (median, 5th and 95th percentile); None when nothing was measured.
    energy_mj and its likes are of a launch; None where the GPU does not tell it. objective: by which the winner was
    chosen, a name of `Objective`. votes: which config each contributed machine found fastest, see db/exchange/votes.py.
    """

    time_us: Annotated[float | None, TIME] = None
    predicted_us: Annotated[float | None, TIME] = None
    default_time_us: Annotated[float | None, TIME] = None
    paper_time_us: Annotated[float | None, TIME] = None
    speedup_over_default: Annotated[float | None, RATIO] = None
    speedup_low: Annotated[float | None, RATIO] = None
    speedup_high: Annotated[float | None, RATIO] = None
    trials: Annotated[int, Whole()] = 0
    energy_mj: Annotated[float | None, ENERGY, Later()] = None
    default_energy_mj: Annotated[float | None, ENERGY, Later()] = None
    paper_energy_mj: Annotated[float | None, ENERGY, Later()] = None
    objective: Annotated[str, OBJECTIVE, Later()] = "time"
    votes: Annotated[tuple[str, ...], VOTES, Later()] = ()
