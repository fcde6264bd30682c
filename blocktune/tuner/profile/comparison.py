"""Predictions for a config, each next to the counter that shows it.

    for row in comparison(analysis, counters): print(row.name, row.predicted, row.counted)

A unit is compared by how long it is busy, whatever the clock: the model's term, and the counter's percentage of the
time that the launches took. Nsight Compute empties the caches in front of every launch.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from blocktune.kernels.registry import get_kernel
from blocktune.tuner.cost.analysis import Analysis
from blocktune.tuner.cost.model import folded_forward
from blocktune.tuner.profile.counters import TIME, Counters
from blocktune.tuner.traffic.visited_tiles import visits_of

SECTOR_BYTES = 32
"""Of L2: its counters are in sectors."""

TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
SPECIAL = "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed"
ISSUE = "sm__inst_issued.avg.pct_of_peak_sustained_elapsed"
L2_TO_SM, L2_WRITTEN = "l1tex__m_xbar2l1tex_read_bytes.sum", "lts__t_sectors_srcunit_tex_op_write.sum"
DRAM_READ, DRAM_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"

METRICS = (TIME, TENSOR, SPECIAL, ISSUE, L2_TO_SM, L2_WRITTEN, DRAM_READ, DRAM_WRITTEN, CONFLICTS, OCCUPANCY)
"""What a profile asks for by name, besides the section of stall reasons, whose metrics differ between chips."""

STALL_TERMS = {
    "math_pipe_throttle": "tensor",
    "gmma": "tensor",
    "short_scoreboard": "exp",
    "mio_throttle": "shared",
    "not_selected": "arithmetic",
    "dispatch_stall": "arithmetic",
    "wait": "arithmetic",
    "long_scoreboard": "l2",
    "lg_throttle": "spill",
    "barrier": "latency",
    "membar": "latency",
    "branch_resolving": "latency",
    "no_instruction": "latency",
}
"""The term of the cost model that a stall reason speaks for most, by NVIDIA's description of the reason (Nsight Compute
documentation, "Warp Stall Reasons"). Memory that comes late shows as long_scoreboard whether L2 or DRAM sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A prediction and its counter. unit: `us`, `bytes`, `%` or `` for a count; None where one of both is unknown.

    remark: what keeps the two from being the same thing.
    """

    name: str
    unit: str
    predicted: float | None
    counted: float | None
    remark: str = ""

    @property
    def ratio(self) -> float | None:
        """The prediction over the counter."""
        return self.predicted / self.counted if self.predicted is not None and self.counted else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A reason for which warps wait. warps: of a scheduler, whenever it issues; share: of all reasons; term: of the
    cost model, empty for reasons that it does not have; term_us: what it takes alone."""

    reason: str
    warps: float
    share: float
    term: str
    term_us: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def comparison(analysis: Analysis, counters: Counters) -> tuple[Row, ...]:
    """Return a row for everything that the models predict and a counter shows."""
    return (*_times(analysis, counters), *_bytes(analysis, counters), *_rest(analysis, counters))


def stalls_of(analysis: Analysis, counters: Counters) -> tuple[Stall, ...]:
    """Return the reasons for which warps waited, the most frequent first; a warp that issues waits for none."""
    waiting = {reason: warps for reason, warps in counters.stalls().items() if reason != "selected"}
    whole = sum(waiting.values())
    return tuple(
        Stall(reason=reason, warps=warps, share=warps / whole, term=term, term_us=_term_us(analysis, term))
        for reason, warps in waiting.items()
        if warps
        for term in (STALL_TERMS.get(reason, ""),)
    )


def in_words(value: float | None, unit: str) -> str:
    """Return a value of a row as people read it."""
    if value is None:
        return "-"
    if unit == "bytes":
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,.0f}" if not unit else f"{value:,.1f} {unit.replace('us', 'µs')}"


def _term_us(analysis: Analysis, term: str) -> float | None:
    return getattr(analysis.breakdown, f"{term}_us") if term and analysis.breakdown else None


def _times(analysis: Analysis, counters: Counters) -> Iterator[Row]:
    yield Row(
        name="time",
        unit="us",
        predicted=_term_us(analysis, "total"),
        counted=counters.total(TIME),
        remark="caches are empty before every launch",
    )
    yield Row(
        name="tensor cores busy",
        unit="us",
        predicted=_term_us(analysis, "tensor"),
        counted=counters.busy_us(TENSOR),
    )
    yield Row(
        name="special functions busy",
        unit="us",
        predicted=_term_us(analysis, "exp"),
        counted=counters.busy_us(SPECIAL),
        remark="conversions of numbers count, too",
    )
    yield Row(
        name="schedulers issue",
        unit="us",
        predicted=_term_us(analysis, "arithmetic"),
        counted=counters.busy_us(ISSUE),
        remark="the model has the softmax alone",
    )


def _bytes(analysis: Analysis, counters: Counters) -> Iterator[Row]:
    uncached, once = analysis.traffic[analysis.uncached], analysis.traffic[analysis.once]
    sectors = counters.total(L2_WRITTEN)
    yield Row(
        name="L2 to multiprocessors", unit="bytes", predicted=uncached.arriving_bytes, counted=counters.total(L2_TO_SM),
        remark="reloads of spilled registers count, too",
    )  # fmt: skip
    yield Row(
        name="multiprocessors to L2", unit="bytes", predicted=uncached.written_bytes,
        counted=None if sectors is None else SECTOR_BYTES * sectors,
    )  # fmt: skip
    yield Row(
        name="read from DRAM", unit="bytes", predicted=once.read_bytes, counted=counters.total(DRAM_READ),
        remark="predicted: launches read once",
    )  # fmt: skip
    yield Row(
        name="written to DRAM", unit="bytes", predicted=once.written_bytes, counted=counters.total(DRAM_WRITTEN),
        remark="what L2 still holds comes later",
    )  # fmt: skip


def _rest(analysis: Analysis, counters: Counters) -> Iterator[Row]:
    yield Row(
        name="bank conflicts", unit="", predicted=_conflicts(analysis), counted=counters.total(CONFLICTS),
        remark="the model has the loop alone",
    )  # fmt: skip
    yield Row(
        name="occupancy", unit="%", predicted=100 * _occupancy(analysis), counted=counters.share(OCCUPANCY),
        remark="blocks of warps that end early count less",
    )  # fmt: skip


def _conflicts(analysis: Analysis) -> float | None:
    """Return the wavefronts that bank conflicts add in all rounds of the loop, one for each tile of keys."""
    if analysis.shared is None:
        return None
    kernel = get_kernel(analysis.config.kernel)
    blocks, folded = folded_forward(kernel, analysis.config, analysis.shape)
    tiles = visits_of(folded, blocks.block_m, blocks.block_n).total * folded.batch * folded.num_heads
    warps = analysis.occupied.resources.num_warps - kernel.softmax_cost(analysis.config).copying_warps
    return float((analysis.shared.load_excess + analysis.shared.store_excess) * warps * tiles)


def _occupancy(analysis: Analysis) -> float:
    """Return the share of warps that are resident, less where the grid does not fill the GPU once."""
    waves = analysis.waves
    return analysis.occupied.fraction * (1.0 if waves is None else min(1.0, waves.count))
