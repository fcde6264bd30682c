"""The models' predictions for each step of a ladder (tuner/compare/ladder_ideas.py).

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
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.compare.ladder_ideas import PADDED
from blocktune.tuner.compare.report import Timing
from blocktune.tuner.cost.bands import Band
from blocktune.tuner.cost.roofline import library_instruction, roofline
from blocktune.tuner.occupancy.calculator import Occupancy
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses
from blocktune.tuner.traffic.backward import standard_backward_traffic
from blocktune.tuner.traffic.by_kernel import traffic_of
from blocktune.tuner.traffic.model import standard_traffic

STANDARD_MEMORY_SHARE = 0.36
"""What PyTorch's three operations reach of the rate of device memory while they move scores and probabilities: 69 GB in
40.0 ms of a forward on an H200 (blocktune/results/h200.ladder.json). A backward's are taken to reach the same."""

NOTABLE = 0.02
"""Relative difference below which two counts are called the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Device memory that a step moves: `counted` without any cache, `least` where L2 keeps every key that it can."""

    counted: int
    least: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderStep:
    """One step on one device.

    idea: what it changes. problem: why it was not run or not predicted; empty where it was. grid_blocks: of the launch
    that takes longest. columns: of keys and values together, as they are multiplied. products: matrix products of a
    pair of tiles, all launches together. traffic: by the IO model. timing is None where nothing
    was measured, predicted_us where nothing could be predicted, its error band where none is known. over_before: how
    much faster than the last earlier step that has a time of the same origin; over_v2: than v2; predicted ones need a
    band. why: what the models see change.
    """

    name: str
    idea: str = ""
    config: KernelConfig | None = None
    problem: str = ""
    occupied: Occupancy | None = None
    shared: SharedAccesses | None = None
    softmax: SoftmaxCost | None = None
    grid_blocks: int | None = None
    columns: int = 0
    products: int = 0
    traffic: Bytes | None = None
    predicted_us: float | None = None
    band: Band | None = None
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
            "idea": self.idea,
            "config": self.config and self.config.to_json(),
            "problem": self.problem,
            "timing": self.timing and asdict(self.timing),
            "predicted_us": self.predicted_us,
            "predicted_band": self.band and self.band.to_json(),
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


def kernels_of(step: str, direction: Direction = Direction.FORWARD) -> tuple[AttentionKernel, ...]:
    """Return the kernels that a step of a direction's ladder may take, in registry order."""
    return tuple(kernel for kernel in KERNELS.values() if step in kernel.ladder_steps and kernel.direction is direction)


def bytes_of(shape: AttentionShape, config: KernelConfig | None) -> Bytes:
    """Return what a step moves, all its launches together."""
    if config is None:
        total = sum(moved for _, moved in _standard_operations(shape))
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


def products_of(shape: AttentionShape, config: KernelConfig, device: DeviceSpec) -> int:
    """Return the matrix products of a pair of tiles: those of the longest launch, and of one that takes comparably
    long."""
    kernel = get_kernel(config.kernel)
    second = kernel.second_launch(config, shape, device.limits) if shape.direction is Direction.BACKWARD else None
    return kernel.softmax_cost(config).products + (second.softmax.products if second else 0)


def predicted_standard_us(shape: AttentionShape, device: DeviceSpec) -> float:
    """Predict PyTorch's operations, one after another, each at its ceiling of arithmetic or at what PyTorch reaches of
    device memory.

    Raises:
        UsageError: a rate of the device is unknown.
    """
    line = roofline(shape, standard_traffic(shape), device, instruction=library_instruction(shape.dtype))
    pairs = 2 * shape.batch * shape.num_heads * shape.seqlen_q * shape.seqlen_k
    bytes_per_us = 1e3 * STANDARD_MEMORY_SHARE * line.memory_gbs
    return sum(
        max(pairs * columns / line.peak_tflops / 1e6, moved / bytes_per_us)
        for columns, moved in _standard_operations(shape)
    )


def _standard_operations(shape: AttentionShape) -> tuple[tuple[int, int], ...]:
    """Return the operations of standard attention, each as the columns of its product (0: none) and the bytes that it
    moves."""
    if shape.direction is Direction.BACKWARD:
        columns = {"dv": shape.head_dim_v, "dp": shape.head_dim_v, "ds": 0, "dq": shape.head_dim, "dk": shape.head_dim}
        return tuple((columns[each.name], each.total_bytes) for each in standard_backward_traffic(shape).passes)
    traffic = standard_traffic(shape)
    return (
        (shape.head_dim, traffic.q_read + traffic.k_read + traffic.s_written),
        (0, traffic.s_read + traffic.p_written),
        (shape.head_dim_v, traffic.p_read + traffic.v_read + traffic.o_written),
    )


def why(before: LadderStep, after: LadderStep, device: DeviceSpec) -> str:
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


def _memory(before: LadderStep, after: LadderStep) -> list[str]:
    old, new = before.traffic, after.traffic
    if old is None or new is None or (_same(old.counted, new.counted) and _same(old.least, new.least)):
        return []
    return [f"device memory: {_span(new)} instead of {_span(old)}"]


def _grid(before: LadderStep, after: LadderStep, device: DeviceSpec) -> list[str]:
    if after.grid_blocks is None or after.grid_blocks == before.grid_blocks:
        return []
    instead = f" instead of {before.grid_blocks:,}" if before.grid_blocks else ""
    idle = device.num_sms - after.grid_blocks
    return [f"{after.grid_blocks:,} blocks{instead} for {device.num_sms} SMs" + (f", {idle} idle" if idle > 0 else "")]


def _occupancy(before: LadderStep, after: LadderStep) -> list[str]:
    new, old = after.occupied, before.occupied
    if new is None or (old is not None and old.fraction == new.fraction):
        return []
    limiters = " and ".join(str(name).replace("_", " ") for name in new.limiters)
    instead = f" instead of {100 * old.fraction:.4g} %" if old is not None else ""
    return [f"occupancy {100 * new.fraction:.4g} %{instead}, limited by {limiters}"]


def _products(before: LadderStep, after: LadderStep) -> list[str]:
    facts = []
    if before.columns and after.columns != before.columns and after.config and before.config:
        facts.append(f"{after.columns} columns are multiplied instead of {before.columns}")
    if after.products and before.products and after.products != before.products:
        facts.append(f"{after.products} matrix products for every pair of tiles instead of {before.products}")
    if after.tensor_cores and before.tensor_cores and after.tensor_cores != before.tensor_cores:
        facts.append(f"products by {after.tensor_cores} instead of {before.tensor_cores}")
    elif after.tensor_cores == "none" and before.tensor_cores is None:
        facts.append("products without tensor cores")
    return facts


def _conflicts(before: LadderStep, after: LadderStep) -> list[str]:
    """Return the conflicts of the banks of shared memory, where a loop reads it by itself."""
    old, new = before.shared, after.shared
    if new is None or not (new.load_excess or (old and old.load_excess)):
        return []
    instead = f" instead of {old.ways:.1f}" if old and old.loads else ""
    share = f"{100 * new.conflict_share:.0f} % of them by bank conflicts" if new.load_excess else "no bank conflicts"
    return [f"shared memory: {new.ways:.1f} wavefronts per load{instead}, {share}"]


def _softmax(before: LadderStep, after: LadderStep) -> list[str]:
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
    if new.adds_walked != old.adds_walked:
        facts.append("dQ is added to sums in device memory" if new.adds_walked else "dQ is summed on the chip")
    if new.copying_warps and not old.copying_warps:
        facts.append("warps of their own copy the tiles")
    return facts


def _spills(before: LadderStep, after: LadderStep) -> list[str]:
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


def last_timed(steps: Sequence[LadderStep]) -> LadderStep | None:
    """Return the last step without a problem."""
    return next((step for step in reversed(steps) if not step.problem), None)
