"""The tables of runtime and bytes against block size, of a recorded sweep, as figure 2 of the FlashAttention paper has
them (Dao et al., arXiv 2205.14135)."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blocktune.db.records.records import Trial
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.traffic.by_kernel import traffic_of
from blocktune.tuner.traffic.least import least_bytes
from tools.pages.document_tables import markdown_table
from tools.pages.recorded.sweeps import recorded_sweep
from tools.pages.searches.sweep_sources import sources_of

COLUMNS = ("kernel", "tile", "fastest", "over the best", "bytes, no cache", "over the least", "its config")
BLOCK_NAMES = {"block_m": "queries", "block_n": "keys"}
NO_SWEEP = "No sweep is here yet: `tune lab record` makes it, `make results` shows it."


@dataclass(frozen=True, slots=True)
class BlockSize:
    """Tiles of one size of a kernel: the fastest trial that has them."""

    kernel: str
    block: str
    size: int
    fastest: Trial

    @property
    def bytes_(self) -> int:
        """Moved by the fastest config where nothing is found in a cache."""
        config = self.fastest.config
        return traffic_of(KERNELS[config.kernel], config, self.fastest.shape).total_bytes


def block(path: Path) -> str:
    """Return what the block sizes of a sweep took and move, with what the sweep is of."""
    if not path.exists():
        return NO_SWEEP
    sweep = recorded_sweep(path)
    older = sum(sources_of([path]).older.values())
    count = len(sweep.trials)
    caption = (
        f"{sweep.shape.label} on {sweep.device.name}: the fastest recorded config with tiles of each size. {older:,} "
        f"of {count:,} configs were measured with earlier sources of their kernels."
    )
    return f"{caption}\n\n{markdown_table(COLUMNS, rows_of(sweep))}"


def rows_of(sweep: Sweep) -> list[tuple[str, ...]]:
    """Return a row for each kernel and size of a tile."""
    sizes = list(block_sizes(sweep.trials))
    best_us = min(_time_us(size.fastest) for size in sizes)
    return [_row(size, best_us, sweep.shape) for size in sizes]


def block_sizes(trials: Iterable[Trial]) -> Iterable[BlockSize]:
    """Yield the sizes of tiles in order, of kernels that there still are and that were measured with several."""
    found: dict[tuple[str, str, int], list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.time_us is not None and trial.config.kernel in KERNELS:
            for name in BLOCK_NAMES:
                found[trial.config.kernel, name, trial.config.parameters[name]].append(trial)
    for kernel, name, size in sorted(found):
        if sum(key[:2] == (kernel, name) for key in found) > 1:
            yield BlockSize(kernel, name, size, min(found[kernel, name, size], key=_time_us))


def _row(size: BlockSize, best_us: float, shape: AttentionShape) -> tuple[str, ...]:
    time_us, moved = _time_us(size.fastest), size.bytes_
    return (
        f"`{size.kernel}`",
        f"{size.size} {BLOCK_NAMES[size.block]}",
        f"{time_us:,.0f} µs",
        f"{time_us / best_us:.2f}",
        f"{moved / 1e9:,.2f} GB",
        f"{moved / least_bytes(shape):,.1f}",
        size.fastest.config.label.removeprefix(f"{size.kernel} "),
    )


def _time_us(trial: Trial) -> float:
    assert trial.time_us is not None
    return trial.time_us
