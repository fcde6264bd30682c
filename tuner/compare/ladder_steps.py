"""The steps of the ladder from standard attention to the fastest kernel, and what the models say about each.

`tuner/compare/ladder.py` climbs it. A step's `idea` says what it changes; `why` compares what the models count before
and after. Neither says how fast anything is: times are measured, or predicted and marked as such.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blocktune.kernels.base.flash_kernel import padded_width
from blocktune.kernels.base.kernel import AttentionKernel, SoftmaxCost
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.historical.padded import next_width
from blocktune.kernels.registry import KERNELS, get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compare.report import Timing
from blocktune.tuner.cost.roofline import library_instruction, roofline
from blocktune.tuner.occupancy.calculator import Occupancy
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses
from blocktune.tuner.traffic.by_kernel import traffic_of
from blocktune.tuner.traffic.model import standard_traffic

STANDARD, CHUNKED, EFFICIENT, V1, PAPER, V2, PADDED, TRANSPOSED, TUNED, HOPPER = (
    "standard",
    "chunked",
    "efficient",
    "v1",
    "paper",
    "v2",
    "padded",
    "transposed",
    "tuned",
    "hopper",
)

IDEAS = {
    STANDARD: "three operations of PyTorch, with all scores and probabilities in device memory between them",
    CHUNKED: "PyTorch's operations on a piece of the queries and keys at a time, whose results are merged",
    EFFICIENT: "PyTorch's memory-efficient kernel: the chunks of a tile of queries in one launch, scores on the chip",
    V1: "scores stay on the chip: keys outside, queries inside, one block per head; the output makes the round trip",
    PAPER: "v1 with the blocks that its paper prescribes: as many keys and queries as fill the shared memory",
    V2: "loops exchanged: one block for each tile of queries, which keeps its output and divides it once, at the end",
    PADDED: "v2 with the head dimension padded to the next power of two, against bank conflicts",
    TRANSPOSED: "v2 over keys that a kernel of its own transposed in advance; that kernel is timed too",
    TUNED: "v2's algorithm in ordinary Triton with the best blocks, stages and schedule known here",
    HOPPER: "warps that copy while other warps compute, with the instructions of Hopper",
}
"""What each step is, first to last. A kernel names those that it may stand for, but for those of PyTorch."""

PYTORCH = (STANDARD, CHUNKED, EFFICIENT)
"""The steps that PyTorch computes. No model knows the code of the last two, so that they are only measured."""

STANDARD_MEMORY_SHARE = 0.36
"""What PyTorch's three operations reach of the rate of device memory while they move scores and probabilities: 69 GB in
40.0 ms on an H200 (results/h200.ladder.json)."""

NOTABLE = 0.02
"""Relative difference below which two counts are called the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Device memory that a step moves: `counted` without any cache, `least` where L2 keeps every key that it can."""

    counted: int
    least: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step on one device.

    problem: why it was not run or not predicted; empty where it was. grid_blocks: of the launch that takes longest.
    columns: of keys and values together, as they are multiplied. traffic: by the IO model. timing is None where nothing
    was measured, predicted_us where nothing could be predicted. over_before: how much faster than the last earlier step
    that has a time of the same origin; over_v2: than v2. why: what the models see change.
    """

    name: str
    config: KernelConfig | None = None
    problem: str = ""
    occupied: Occupancy | None = None
    shared: SharedAccesses | None = None
    softmax: SoftmaxCost | None = None
    grid_blocks: int | None = None
    columns: int = 0
    traffic: Bytes | None = None
    predicted_us: float | None = None
    timing: Timing | None = None
    over_before: float | None = None
    over_v2: float | None = None
    why: str = ""

    @property
    def tensor_cores(self) -> str | None:
        return None if self.occupied is None else self.occupied.resources.tensor_cores

    def to_json(self) -> dict[str, Any]:
        occupied, traffic = self.occupied, self.traffic
        return {
            "name": self.name,
            "idea": IDEAS[self.name],
            "config": self.config and self.config.to_json(),
            "problem": self.problem,
            "timing": self.timing and asdict(self.timing),
            "predicted_us": self.predicted_us,
            "over_before": self.over_before,
            "over_v2": self.over_v2,
            "hbm_bytes": traffic and traffic.counted,
            "hbm_bytes_least": traffic and traffic.least,
            "grid_blocks": self.grid_blocks,
            "occupancy": occupied and occupied.fraction,
            "blocks_per_sm": occupied and occupied.blocks_per_sm,
            "limiters": [str(name) for name in occupied.limiters] if occupied else [],
            "tensor_cores": self.tensor_cores,
            "resources": occupied and occupied.resources.to_json(),
            "shared_accesses": self.shared and self.shared.report(),
            "why": self.why,
        }


def kernels_of(step: str) -> tuple[AttentionKernel, ...]:
    """Return the kernels that a step may take, in registry order."""
    return tuple(kernel for kernel in KERNELS.values() if step in kernel.ladder_steps)


def bytes_of(shape: AttentionShape, config: KernelConfig | None) -> Bytes:
    """Return what a step moves, all its launches together."""
    if config is None:
        total = standard_traffic(shape).total_bytes
        return Bytes(counted=total, least=total)
    kernel = get_kernel(config.kernel)
    counted, least = (traffic_of(kernel, config, shape, perfect_l2=perfect).total_bytes for perfect in (False, True))
    return Bytes(counted=counted, least=least)


def columns_of(name: str, shape: AttentionShape) -> int:
    """Return the columns of keys and values that are multiplied."""
    width = next_width if name == PADDED else padded_width
    return width(shape.head_dim) + width(shape.head_dim_v)


def grid_of(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the blocks of the attention itself, or where a block takes one tile after another, tiles."""
    blocks, folded = get_kernel(config.kernel).as_forward(config, shape)
    return folded.batch * folded.num_heads * -(-folded.seqlen_q // blocks.block_m)


def predicted_standard_us(shape: AttentionShape, device: DeviceSpec) -> float:
    """Predict product, softmax and product, one after another, each at its ceiling of arithmetic or at what PyTorch's
    operations reach of device memory.

    Raises:
        UsageError: a rate of the device is unknown.
    """
    traffic = standard_traffic(shape)
    line = roofline(shape, traffic, device, instruction=library_instruction(shape.dtype))
    pairs = 2 * shape.batch * shape.num_heads * shape.seqlen_q * shape.seqlen_k
    first = traffic.q_read + traffic.k_read + traffic.s_written
    second = traffic.p_read + traffic.v_read + traffic.o_written
    bytes_a_us = 1e3 * STANDARD_MEMORY_SHARE * line.memory_gbs

    def product_us(dim: int, moved: int) -> float:
        return max(pairs * dim / line.peak_tflops / 1e6, moved / bytes_a_us)

    softmax_us = (traffic.s_read + traffic.p_written) / bytes_a_us
    return product_us(shape.head_dim, first) + softmax_us + product_us(shape.head_dim_v, second)


def why(before: Step, after: Step, device: DeviceSpec) -> str:
    """Return what the models see change between two steps, the same wherever nothing does."""
    facts = [
        *_memory(before, after),
        *_grid(before, after, device),
        *_occupancy(before, after),
        *_products(before, after),
        *_conflicts(before, after),
        *_softmax(before, after),
        *_spills(before, after),
    ]
    return "; ".join(facts) if facts else "no model sees a difference"


def _memory(before: Step, after: Step) -> list[str]:
    old, new = before.traffic, after.traffic
    if old is None or new is None or (_same(old.counted, new.counted) and _same(old.least, new.least)):
        return []
    return [f"device memory: {_span(new)} instead of {_span(old)}"]


def _grid(before: Step, after: Step, device: DeviceSpec) -> list[str]:
    if after.grid_blocks is None or after.grid_blocks == before.grid_blocks:
        return []
    instead = f" instead of {before.grid_blocks:,}" if before.grid_blocks else ""
    idle = device.num_sms - after.grid_blocks
    return [f"{after.grid_blocks:,} blocks{instead} for {device.num_sms} SMs" + (f", {idle} idle" if idle > 0 else "")]


def _occupancy(before: Step, after: Step) -> list[str]:
    new, old = after.occupied, before.occupied
    if new is None or (old is not None and old.fraction == new.fraction):
        return []
    limiters = " and ".join(str(name).replace("_", " ") for name in new.limiters)
    instead = f" instead of {100 * old.fraction:.4g} %" if old is not None else ""
    return [f"occupancy {100 * new.fraction:.4g} %{instead}, limited by {limiters}"]


def _products(before: Step, after: Step) -> list[str]:
    facts = []
    if before.columns and after.columns != before.columns and after.config and before.config:
        facts.append(f"{after.columns} columns are multiplied instead of {before.columns}")
    if after.tensor_cores and before.tensor_cores and after.tensor_cores != before.tensor_cores:
        facts.append(f"products by {after.tensor_cores} instead of {before.tensor_cores}")
    elif after.tensor_cores == "none" and before.tensor_cores is None:
        facts.append("products without tensor cores")
    return facts


def _conflicts(before: Step, after: Step) -> list[str]:
    """Return the conflicts of the banks of shared memory, where a loop reads it by itself."""
    old, new = before.shared, after.shared
    if new is None or not (new.load_excess or (old and old.load_excess)):
        return []
    instead = f" instead of {old.ways:.1f}" if old and old.loads else ""
    share = f"{100 * new.conflict_share:.0f} % of them by bank conflicts" if new.load_excess else "no bank conflicts"
    return [f"shared memory: {new.ways:.1f} wavefronts per load{instead}, {share}"]


def _softmax(before: Step, after: Step) -> list[str]:
    old, new = before.softmax, after.softmax
    if old is None or new is None:
        return []
    facts = []
    if new.products_overlap != old.products_overlap:
        facts.append(
            "a product runs during the softmax" if new.products_overlap else "no product runs during the softmax"
        )
    if new.rescales != old.rescales:
        facts.append("the output is rescaled with every tile" if new.rescales else "nothing is rescaled")
    if new.copying_warps and not old.copying_warps:
        facts.append("warps of their own copy the tiles")
    return facts


def _spills(before: Step, after: Step) -> list[str]:
    spilled = [step.occupied.resources.spill_bytes if step.occupied else 0 for step in (before, after)]
    return (
        [f"{spilled[1]:,} B of registers spilled per thread instead of {spilled[0]:,}"] if len(set(spilled)) > 1 else []
    )


def _same(old: int, new: int) -> bool:
    return abs(new - old) <= NOTABLE * old


def _span(traffic: Bytes) -> str:
    if traffic.counted == traffic.least:
        return size(traffic.counted)
    return f"{size(traffic.least)} (keys in L2) to {size(traffic.counted)} (no cache)"


def size(size_bytes: int) -> str:
    """Return the bytes for people, in powers of ten."""
    value, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"


def last_timed(steps: Sequence[Step]) -> Step | None:
    """Return the last step without a problem."""
    return next((step for step in reversed(steps) if not step.problem), None)
