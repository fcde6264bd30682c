"""Predicts the time of a config from the rates of a device: a ranking, not a stopwatch.

What a key tile costs a multiprocessor is counted for each unit: matrix products, exponentials, the other arithmetic of
the softmax, spilled registers, bytes from L2. `round_cycles` says how much of it overlaps, given how many warpgroups
are resident; causal skipping, waves, prologue and epilogue and the bytes of device memory come on top.

    breakdown = predict(shape, config, resources, occupancy(resources, device.limits), device)
    print(f"{breakdown.total_us:.0f} us, bound by {breakdown.binding}")
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from blocktune.kernels.base.flash_kernel import padded_width
from blocktune.kernels.base.kernel import AttentionKernel, SoftmaxCost
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.limits import WARP_SIZE
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.cost.constants import CONSTANTS, CostConstants
from blocktune.tuner.cost.estimated_resources import estimated_second_resources
from blocktune.tuner.cost.queueing import round_cycles
from blocktune.tuner.occupancy.calculator import Occupancy, occupancy
from blocktune.tuner.traffic.visited_tiles import Visits, visits_of

L2_BYTES_PER_CLOCK = 64.0
"""Of one SM: the width of its port. The L2 itself delivers less to all of them (A100: 5120 B a clock, 47 an SM; NVIDIA,
"Ampere Architecture In-Depth"), but requests of neighbours for the same keys are answered together."""

ADDED_BYTES_PER_CLOCK = 16.0
"""Of one SM: float32 additions in L2, four a clock. Measured on an H200: 12 to 17 B, by atomics and by the copy engine
alike, while the block waits."""

LOCAL_BYTES_PER_CLOCK = 64.0
"""Of one SM, for spilled registers: they travel through L1, which moves half a 128-byte line a clock both ways."""

OPERAND_BYTES_PER_CLOCK = 128.0
"""Of one SM: shared memory feeds both operands of a score product, one bank's word each of 32 banks a clock."""

WARPGROUP_ROWS = 64
"""Rows of a warpgroup that walks along the keys on its own, since other warps copy for it."""

MMA_ROWS = 16
"""Rows of a matrix instruction's result that one warp holds."""

MASK_INSTRUCTIONS = 2.0
"""A comparison and a selection more for every score of a masked tile."""

OLDER_MMA_SHARE = 0.6
"""`mma.sync` reaches this share of the matrix rate where a newer instruction exists (Hopper and later)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBreakdown:
    """The prediction, in microseconds.

    Every term but the last two is what its unit would take if it alone worked, evenly on all SMs; they overlap, so the
    total is less than their sum. latency_us: waiting of the resident warpgroups for no unit. edge_us: launches, and
    prologues and epilogues of blocks. tail_us: what an uneven last wave adds.
    """

    tensor_us: float
    exp_us: float
    arithmetic_us: float
    spill_us: float
    l2_us: float
    hbm_us: float
    latency_us: float
    edge_us: float
    tail_us: float
    total_us: float

    @property
    def binding(self) -> str:
        """The largest term: `tensor`, `exp`, `arithmetic`, `spill`, `l2`, `hbm`, `latency`, `edge` or `tail`."""
        terms = {name.removesuffix("_us"): time for name, time in asdict(self).items() if name != "total_us"}
        return max(terms, key=lambda name: terms[name])

    def followed_by(self, second: "CostBreakdown | None") -> "CostBreakdown":
        """Both launches, one after the other."""
        if second is None:
            return self
        return CostBreakdown(**{name: time + getattr(second, name) for name, time in asdict(self).items()})

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"binding": self.binding}


def predict(
    shape: AttentionShape,
    config: KernelConfig,
    resources: KernelResources,
    occupied: Occupancy,
    device: DeviceSpec,
    softmax: SoftmaxCost | None = None,
    parts: int = 1,
    constants: CostConstants = CONSTANTS,
) -> CostBreakdown:
    """The predicted time of a compiled config.

    Args:
        shape: the problem.
        config: its block sizes.
        resources: of the compiled code.
        occupied: the answer of `occupancy` for these resources on this device.
        device: with its rates.
        softmax: what the kernel's softmax costs; None is the textbook form.
        parts: shares that the keys of every query are cut into; a second launch merges more than one.
        constants: what the model takes for granted.

    Raises:
        UsageError: a rate of the device is unknown, or the config does not fit it.
    """
    require_rates(device)
    if occupied.blocks_per_sm == 0:
        raise UsageError(f"A config must fit an SM to be timed, but {config.label} does not fit {device.name}.")
    return _Model(shape, config, resources, occupied, device, softmax or SoftmaxCost(), parts, constants).breakdown()


def predict_us(
    kernel: AttentionKernel,
    config: KernelConfig,
    shape: AttentionShape,
    device: DeviceSpec,
    resources: KernelResources,
    constants: CostConstants = CONSTANTS,
) -> float:
    """The predicted time of a compiled config in microseconds.

    Raises:
        UsageError: a rate of the device is unknown, or the config does not fit it.
    """
    occupied = occupancy(resources, device.limits)
    blocks, folded = kernel.as_forward(config, shape)
    parts = parts_of(folded, shape)
    first = predict(folded, blocks, resources, occupied, device, kernel.softmax_cost(config), parts, constants)
    return first.followed_by(predict_second(kernel, config, shape, device, constants)).total_us


def predict_second(
    kernel: AttentionKernel,
    config: KernelConfig,
    shape: AttentionShape,
    device: DeviceSpec,
    constants: CostConstants = CONSTANTS,
) -> CostBreakdown | None:
    """The predicted time of the launch behind the longest one, whose resources are estimated; None if there is none.

    Raises:
        UsageError: a rate of the device is unknown, or the launch does not fit it.
    """
    launch = kernel.second_launch(config, shape, device.limits)
    if launch is None:
        return None
    resources = estimated_second_resources(launch, device)
    occupied = occupancy(resources, device.limits)
    return predict(launch.shape, launch.config, resources, occupied, device, launch.softmax, 1, constants)


def parts_of(folded: AttentionShape, shape: AttentionShape) -> int:
    """Into how many shares a kernel cuts the keys of a shape, by the forward that it turns the shape into: every share
    is a batch entry of its own."""
    return max(1, folded.batch // shape.batch)


def missing_rates(device: DeviceSpec) -> tuple[str, ...]:
    """The rates that a prediction needs and this device lacks."""
    names = ("tensor_flops_per_clock", "clock_mhz", "memory_gbs")
    return tuple(name for name in names if getattr(device, name) is None)


def require_rates(device: DeviceSpec) -> None:
    """Raises:
    UsageError: a rate that a prediction needs is unknown.
    """
    missing = missing_rates(device)
    if missing:
        raise UsageError(
            f"A prediction needs the rates of the device, but {', '.join(missing)} of {device.name} is unknown. "
            "Add its row to kernels/gpus.csv, or name a similar device of `tune devices`."
        )


class _Model:
    """One prediction; cycles are those of one SM, for one key tile of one block unless said otherwise."""

    def __init__(
        self,
        shape: AttentionShape,
        config: KernelConfig,
        resources: KernelResources,
        occupied: Occupancy,
        device: DeviceSpec,
        softmax: SoftmaxCost,
        parts: int,
        constants: CostConstants,
    ) -> None:
        self._shape, self._config, self._resources, self._device = shape, config, resources, device
        self._softmax, self._parts, self._constants = softmax, parts, constants
        self._warps = resources.num_warps - softmax.copying_warps  # that compute
        self._visits: Visits = visits_of(shape, config.block_m, config.block_n)
        self._heads = shape.batch * shape.num_heads
        self._grid = self._visits.query_tiles * self._heads
        self._blocks = min(occupied.blocks_per_sm, -(-self._grid // device.num_sms))
        share = self._computed_share()
        self._tensor = share * self._tensor_cycles()
        self._exp = share * self._scores / device.limits.exp_per_clock
        self._arithmetic = share * self._arithmetic_cycles()
        spilled = self._constants.spilled_rounds * resources.spill_bytes * WARP_SIZE * self._warps
        self._spill = 2 * spilled / LOCAL_BYTES_PER_CLOCK  # stored, then loaded
        self._load = config.block_n * self._row_bytes / L2_BYTES_PER_CLOCK
        added = 4 * config.block_n * padded_width(shape.head_dim) if softmax.adds_walked else 0
        self._adding = added / ADDED_BYTES_PER_CLOCK

    def breakdown(self) -> CostBreakdown:
        tiles = self._visits.total * self._heads / self._device.num_sms  # key tiles an SM
        edges = self._grid / self._device.num_sms * self._edge_cycles() / self._blocks
        even = tiles * self._tile_cycles(self._blocks) + edges
        whole = self._makespan_cycles()
        hbm = self._hbm_bytes() / (self._constants.memory_share * self._memory_gbs * 1e3)
        launches = self._constants.launch_us + self._merge_us()
        return CostBreakdown(
            tensor_us=self._us(tiles * self._tensor),
            exp_us=self._us(tiles * self._exp),
            arithmetic_us=self._us(tiles * self._arithmetic),
            spill_us=self._us(tiles * self._spill),
            l2_us=self._us(tiles * (self._load + self._adding)),
            hbm_us=hbm,
            latency_us=self._us(tiles * self._waiting_cycles(self._blocks) / self._blocks),
            edge_us=launches + self._us(edges),
            tail_us=self._us(max(0.0, whole - even)),
            total_us=launches + _joined(self._us(whole), hbm, self._constants.burstiness),
        )

    # ---- what one key tile needs

    def _computed_share(self) -> float:
        """How much of the visited tiles is computed: a warpgroup that walks on its own skips tiles right of its own
        diagonal, which only lower ones of its block need. Rows past the end are computed like the last ones."""
        groups = self._config.block_m // WARPGROUP_ROWS
        if not self._softmax.copying_warps or self._shape.causal is Causal.NONE or groups < 2:
            return 1.0
        own = visits_of(self._shape, WARPGROUP_ROWS, self._config.block_n)
        beyond = self._visits.query_tiles * groups - own.query_tiles
        return (own.total + beyond * own.longest) / (self._visits.total * groups)

    @property
    def _scores(self) -> int:
        return self._config.block_m * self._config.block_n

    @property
    def _row_bytes(self) -> int:
        """Of one key and its value; also of one query and its output."""
        return (self._shape.head_dim + self._shape.head_dim_v) * self._shape.element_bytes

    @property
    def _lanes(self) -> int:
        """Float32 operations an SM issues a clock: 64 on Volta, Turing and the A100, 128 on all others."""
        return 64 if self._device.limits.cc <= (8, 0) else 128

    def _tensor_cycles(self) -> float:
        """Dimensions are padded to powers of two, as Triton multiplies them."""
        width = padded_width(self._shape.head_dim)
        flops = self._softmax.products * self._scores * (width + padded_width(self._shape.head_dim_v))
        instruction = self._resources.tensor_cores
        if instruction == "none":
            return flops / (2 * self._lanes)
        rate = float(self._device.tensor_flops_per_clock or 0)
        if self._shape.element_bytes == 4:
            rate /= 2  # tf32
        elif self._shape.element_bytes == 1:
            rate *= 2
        if instruction == "mma" and self._device.limits.mma != "mma":
            rate *= OLDER_MMA_SHARE
        starved = 0.0
        if instruction == "wgmma":  # with few keys, reading both operands of the scores takes longer than their product
            read = self._scores * (1 / WARPGROUP_ROWS + 1 / self._config.block_n) * width * self._shape.element_bytes
            starved = max(0.0, read / OPERAND_BYTES_PER_CLOCK - 2 * self._scores * width / rate)
        return flops / rate + starved

    def _arithmetic_cycles(self) -> float:
        masked = MASK_INSTRUCTIONS * self._visits.masked / self._visits.total
        operations = self._scores * (self._softmax.instructions_per_score + masked)
        operations += self._config.block_m * self._constants.row_operations
        if self._softmax.rescales:
            operations += self._config.block_m * padded_width(self._shape.head_dim_v)
        operations += self._softmax.address_instructions * self._config.block_n * self._row_bytes / 16
        return operations / self._lanes

    # ---- how they overlap

    def _tile_cycles(self, blocks: int) -> float:
        """Cycles an SM takes for one key tile when so many blocks are resident. Warpgroups for which others copy wait
        for the same tile at the same time; else one may compute while another waits."""
        waiting = self._late_cycles(blocks)
        if self._softmax.copying_warps:
            return self._round_cycles(blocks, 0.0) + waiting / blocks + self._adding
        return self._round_cycles(blocks, waiting) + self._adding

    def _waiting_cycles(self, blocks: int) -> float:
        """Of a warpgroup in every round, for no unit."""
        return self._idle_cycles() + self._late_cycles(blocks)

    def _idle_cycles(self) -> float:
        """The same where every tile is there in time."""
        rows_a_warp = self._config.block_m // self._warps
        return self._constants.round_latency_cycles + (
            self._constants.cross_warp_cycles if rows_a_warp < MMA_ROWS else 0.0
        )

    def _late_cycles(self, blocks: int) -> float:
        """Waiting for a tile, which is requested as many rounds of its block ahead as there are free buffers."""
        held = self._constants.held_rounds if self._softmax.products_overlap else 0.0
        ahead = max(0.0, self._config.num_stages - 1 - held) * blocks * self._round_cycles(blocks, 0.0)
        latency = (
            self._constants.load_latency_cycles
            + self._constants.memory_latency_cycles / self._visits.query_tiles
            + self._load
        )
        return latency * math.exp(-self._constants.latency_regularity * ahead / latency)

    def _round_cycles(self, blocks: int, late: float) -> float:
        """Compute and loads together. A strand is one warp on each scheduler; it has its part of every tile."""
        per_block = self._warps / self._device.limits.sub_partitions
        # warpgroups that a copying warp feeds wait for tiles, not for each other
        drift = 1.0 if self._softmax.copying_warps else self._constants.second_warpgroup
        strands = blocks * (1 + (per_block - 1) * drift if per_block > 1 else per_block)
        softmax = _joined(self._exp, self._arithmetic, self._constants.softmax_overlap)
        compute = round_cycles(
            self._tensor / per_block,
            (softmax / per_block, self._spill / per_block),
            self._idle_cycles() + late,
            max(1.0, strands),
            products_overlap=self._softmax.products_overlap,
        )
        return _joined(compute * per_block / min(1.0, strands), self._load, self._constants.burstiness)

    # ---- the whole grid

    def _merge_us(self) -> float:
        """Of the second launch, beside the bytes that it moves."""
        if self._parts == 1:
            return 0.0
        return self._constants.overlapped_merge_us if self._softmax.merge_overlaps else self._constants.merge_us

    def _edge_cycles(self) -> float:
        """Of a block beside its rounds. Where products overlap, the first softmax and the last product have nothing to
        overlap with."""
        fixed = self._constants.next_tile_cycles if self._softmax.persistent else self._constants.block_start_cycles
        alone = min(self._tensor / 2, self._exp + self._arithmetic) if self._softmax.products_overlap else 0.0
        return fixed + alone + self._config.block_m * self._row_bytes / L2_BYTES_PER_CLOCK

    def _block_cycles(self, blocks: int, visited: float) -> float:
        """How long a block runs that visits so many key tiles, among so many resident ones."""
        return visited * blocks * self._tile_cycles(blocks) + self._edge_cycles()

    def _makespan_cycles(self) -> float:
        """Full attention: equal blocks in waves, the last of which may be partly filled and is faster for it. Causal:
        unequal blocks, the longest first, which leaves about a mean block uneven at the end."""
        slots = self._blocks * self._device.num_sms
        mean = self._block_cycles(self._blocks, self._visits.mean)
        if self._shape.causal is not Causal.NONE:
            longest = self._block_cycles(self._blocks, self._visits.longest)
            return max(longest, (self._grid / slots + self._constants.uneven_end) * mean)
        waves, rest = divmod(self._grid, slots)
        left = -(-rest // self._device.num_sms)
        return waves * mean + (self._block_cycles(left, self._visits.mean) if left else 0.0)

    def _hbm_bytes(self) -> float:
        """Every tensor once; keys and values once a wave of their head where those in flight do not fit L2. What a
        share of the keys gave is written and read in float32: an output, its maximum and its sum."""
        shape = self._shape
        queries = shape.batch * shape.num_heads * shape.seqlen_q * self._row_bytes
        keys = shape.batch * shape.num_heads_kv * shape.seqlen_k * self._row_bytes
        slots = self._blocks * self._device.num_sms
        heads_in_flight = min(self._heads, -(-slots // self._visits.query_tiles))
        in_flight = -(-heads_in_flight // shape.group_size) * shape.seqlen_k * self._row_bytes
        fits = self._device.l2_bytes is None or in_flight <= self._device.l2_bytes
        rows = shape.batch * shape.num_heads * shape.seqlen_q if self._parts > 1 else 0
        merged = 2 * 4 * rows * (shape.head_dim_v + 2)
        return queries + merged + keys * (1 if fits else -(-self._visits.query_tiles // slots))

    @property
    def _memory_gbs(self) -> float:
        return float(self._device.memory_gbs or 0)

    def _us(self, cycles: float) -> float:
        """At the sustained clock, derived from the advertised matrix rate: it is given at less than the boost clock."""
        device = self._device
        clock_mhz = float(device.clock_mhz or 0)
        if device.tensor_tflops and device.tensor_flops_per_clock:
            clock_mhz = device.tensor_tflops * 1e6 / (device.tensor_flops_per_clock * device.num_sms)
        return cycles / (self._constants.sustained_clock * clock_mhz)


def _joined(first: float, second: float, exponent: float) -> float:
    """Two times of which much overlaps: from their sum, with exponent 1, to the longer one."""
    return float((first**exponent + second**exponent) ** (1 / exponent))
