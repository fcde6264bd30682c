"""Comparisons as rows of the store: a trial for each config of ours, and the winner among them."""

from collections.abc import Sequence
from datetime import UTC, datetime

from blocktune.db.records.records import Best, Environment, Outcome, Trial
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.tuner.compare.report import Comparison, Entry, Timing


def trials_of(comparison: Comparison, device: DeviceSpec, environment: Environment) -> list[Trial]:
    """Return a trial for each of our configs that was timed."""
    return [
        Trial(
            device=device,
            environment=environment,
            shape=comparison.shape,
            config=config,
            kernel_hash=get_kernel(config.kernel).source_hash,
            outcome=Outcome.OK,
            time_us=timing.median_us,
        )
        for config, timing in _own_timings(comparison).items()
    ]


def winner_in(comparison: Comparison, device: DeviceSpec, environment: Environment) -> Best | None:
    """Return the winner among our configs: the default, unless another one is faster by more than the rounds vary; None
    where none was timed."""
    timings = _own_timings(comparison)
    if not timings:
        return None
    default, paper = (_timed(comparison.entry(name)) for name in ("default", "paper"))
    config, timing = min(timings.items(), key=lambda pair: pair[1].median_us)
    if default is not None and timing.high_us >= default[1].low_us:
        config, timing = default
    return Best(
        device=device,
        environment=environment,
        shape=comparison.shape,
        config=config,
        kernel_hash=get_kernel(config.kernel).source_hash,
        origin=Origin.MEASURED,
        time_us=timing.median_us,
        trials=len(timings),
        created_at=datetime.now(UTC),
        default=None if default is None else default[0],
        default_time_us=None if default is None else default[1].median_us,
        paper=None if paper is None else paper[0],
        paper_time_us=None if paper is None else paper[1].median_us,
        speedup_over_default=None if default is None else default[1].median_us / timing.median_us,
    )


def all_rows(
    comparisons: Sequence[Comparison], device: DeviceSpec, environment: Environment
) -> tuple[list[Best], list[Trial]]:
    """Return the winners and trials of comparisons."""
    bests = [winner_in(comparison, device, environment) for comparison in comparisons]
    trials = [trial for comparison in comparisons for trial in trials_of(comparison, device, environment)]
    return [best for best in bests if best is not None], trials


def _own_timings(comparison: Comparison) -> dict[KernelConfig, Timing]:
    """Return the times of our configs, each once."""
    found = (_timed(entry) for entry in comparison.entries)
    return dict(pair for pair in found if pair is not None)


def _timed(entry: Entry | None) -> tuple[KernelConfig, Timing] | None:
    """Return the config of a contender with its times, if it is ours and was timed."""
    if entry is None or entry.config is None or entry.timing is None:
        return None
    return entry.config, entry.timing
