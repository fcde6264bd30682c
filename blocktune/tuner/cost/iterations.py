"""The cost of one key tile on a multiprocessor, unit by unit, and how much of it overlaps.

iterations = KeyIterations(shape, config, code, device, softmax, constants)
iterations.tensor, iterations.exp            # cycles of one tile of one block
iterations.tile_cycles(blocks=2)         # cycles that an SM takes for a tile when two blocks are resident
"""

import math

from blocktune.kernels.base.flash_kernel import WARPGROUP_ROWS, padded_width
from blocktune.kernels.base.kernel import SoftmaxCost
from blocktune.kernels.base.precision import THREE_PRODUCTS, product_precision
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.limits import WARP_SIZE
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.cost.constants import CostConstants
from blocktune.tuner.cost.feature_costs import FeatureCosts
from blocktune.tuner.cost.queueing import iteration_cycles
from blocktune.tuner.occupancy.compiled_code import CompiledCode, needs_accesses
from blocktune.tuner.traffic.model import STATISTIC_BYTES
from blocktune.tuner.traffic.visited_tiles import VisitCounts, visits_of

L2_BYTES_PER_CLOCK = 64.0
"""Of one SM: the width of its port. The L2 itself delivers less to all of them (A100: 5120 B per clock, 47 per SM;
NVIDIA, "Ampere Architecture In-Depth"), but requests of neighbours for the same keys are answered together."""

ADDED_BYTES_PER_CLOCK = 16.0
"""Of one SM: float32 additions in L2, four per clock. Measured on an H200: 12 to 17 B, by atomics and by the copy
engine alike."""

LOCAL_BYTES_PER_CLOCK = 64.0
"""Of one SM, for spilled registers: they travel through L1, which moves half a 128-byte line a clock both ways."""

OPERAND_BYTES_PER_CLOCK = 128.0
"""Of one SM: shared memory feeds both operands of a score product, one bank's word each of 32 banks a clock."""

MMA_ROWS = 16
"""Rows of a matrix instruction's result that one warp holds."""

MASK_INSTRUCTIONS = 2.0
"""A comparison and a selection more for every score of a masked tile."""

ROUND_TRIP_OPERATIONS = 12.0
"""For every element of an output that is read, rescaled, added to, divided and written with every tile of keys: a
division is a reciprocal and about eight operations that refine it."""

OLDER_MMA_SHARE = 0.6
"""`mma.sync` reaches this share of the matrix rate where a newer instruction exists (Hopper and later)."""


class KeyIterations:
    """The iterations of a block, one per key tile. Cycles are those of one SM, for one tile of one block."""

    def __init__(
        self,
        shape: AttentionShape,
        config: KernelConfig,
        code: CompiledCode,
        device: DeviceSpec,
        softmax: SoftmaxCost,
        constants: CostConstants,
    ) -> None:
        resources, shared = code.resources, code.shared
        self._shape, self._config, self._resources, self._device = shape, config, resources, device
        self._softmax, self._constants = softmax, constants
        self._known_cycles: dict[tuple[int, float], float] = {}
        self._features = FeatureCosts.of(shape.features, shape.element_bytes)
        self._warps = resources.num_warps - softmax.copying_warps  # that compute
        self.visits: VisitCounts = visits_of(shape, config.block_m, config.block_n)
        share = self._computed_share()
        self.tensor = share * self._tensor_cycles()
        self.exp = share * self._scores * (1 + self._features.exponentials) / device.limits.exp_per_clock
        self.arithmetic = share * self._arithmetic_cycles()
        spilled = constants.spilled_iterations * resources.spill_bytes * WARP_SIZE * self._warps
        self.spill = 2 * spilled / LOCAL_BYTES_PER_CLOCK  # stored, then loaded
        # without tensor cores every operand of a product is a load; one wavefront leaves the banks per clock
        fed = shared is not None and needs_accesses(resources)
        self.shared = float(shared.wavefronts * self._warps) if fed and shared is not None else 0.0
        self.load = self._loaded_bytes() / L2_BYTES_PER_CLOCK
        added = 4 * config.block_n * padded_width(shape.head_dim) if softmax.adds_walked else 0
        self.adding = added / ADDED_BYTES_PER_CLOCK

    @property
    def row_bytes(self) -> int:
        """Of one query and its output."""
        return (self._shape.head_dim + self._shape.head_dim_v) * self._shape.element_bytes

    @property
    def key_bytes(self) -> int:
        """Of one key and its value."""
        return (self._shape.head_dim + self._shape.head_dim_v) * self._shape.kv_bytes

    def tile_cycles(self, blocks: int, *, late: bool = True) -> float:
        """Return the cycles that an SM takes for one key tile when `blocks` blocks are resident.

        Without `late`, every tile counts as there in time. Warpgroups for which others copy wait for the same tile at
        the same time; else one may compute while another waits.
        """
        waiting = self._late_cycles(blocks) if late else 0.0
        if self._softmax.copying_warps:
            cycles = self._cycles_of_iteration(blocks, 0.0) + waiting / blocks
        else:
            cycles = self._cycles_of_iteration(blocks, waiting)
        if self._softmax.adds_ahead:  # the copy engine adds meanwhile
            return joined(cycles, self.adding, self._constants.burstiness)
        return cycles + self.adding

    def waiting_cycles(self, blocks: int) -> float:
        """Return the cycles that a warpgroup waits in every iteration, for no unit."""
        return self._idle_cycles() + self._late_cycles(blocks)

    # ---- what one key tile needs

    def _computed_share(self) -> float:
        """Return how much of the visited tiles is computed: a warpgroup that walks on its own skips tiles right of its
        own diagonal, which only lower ones of its block need. Rows past the end are computed like the last ones."""
        groups = self._config.block_m // WARPGROUP_ROWS
        if not self._softmax.copying_warps or self._shape.causal is Causal.NONE or groups < 2:
            return 1.0
        own = visits_of(self._shape, WARPGROUP_ROWS, self._config.block_n)
        beyond = self.visits.query_tiles * groups - own.query_tiles
        return (own.total + beyond * own.longest) / (self.visits.total * groups)

    @property
    def _scores(self) -> int:
        return self._config.block_m * self._config.block_n

    def _loaded_bytes(self) -> int:
        """Return the bytes of keys, values and a mask, or where these stay, queries and what their rows leave in memory
        between two tiles."""
        if not self._softmax.round_trip:
            return self._config.block_n * (self.key_bytes + self._config.block_m * self._features.mask_bytes)
        shape = self._shape
        travelling = 2 * STATISTIC_BYTES * (shape.head_dim_v + 2)  # read and written, in float32
        return self._config.block_m * (shape.head_dim * shape.element_bytes + travelling)

    def _tensor_cycles(self) -> float:
        """Return the cycles of the products, whose dimensions are padded to powers of two, as Triton multiplies
        them."""
        shape, limits, width = self._shape, self._device.limits, padded_width(self._shape.head_dim)
        flops = self._softmax.products * self._scores * (width + padded_width(shape.head_dim_v))
        instruction = self._resources.tensor_cores
        if instruction == "none":
            return flops / (2 * limits.multiply_adds_per_clock)
        rate = matrix_rate(shape.dtype) * float(self._device.tensor_flops_per_clock or 0)
        if instruction == "mma" and limits.mma != "mma":
            rate *= OLDER_MMA_SHARE
        starved = 0.0
        if instruction == "wgmma":  # with few keys, reading both operands of the scores takes longer than their product
            read = self._scores * (1 / WARPGROUP_ROWS + 1 / self._config.block_n) * width * shape.element_bytes
            starved = max(0.0, read / OPERAND_BYTES_PER_CLOCK - 2 * self._scores * width / rate)
        return flops / rate + starved

    def _arithmetic_cycles(self) -> float:
        softmax, block_m, width_v = self._softmax, self._config.block_m, padded_width(self._shape.head_dim_v)
        masked = MASK_INSTRUCTIONS * self.visits.masked / self.visits.total
        operations = self._scores * (softmax.instructions_per_score + self._features.instructions + masked)
        operations += block_m * self._constants.row_operations
        if softmax.rescales:
            operations += block_m * width_v * (ROUND_TRIP_OPERATIONS if softmax.round_trip else 1.0)
        operations += softmax.address_instructions * self._config.block_n * self.key_bytes / 16
        return operations / self._device.limits.multiply_adds_per_clock

    # ---- how they overlap

    def _idle_cycles(self) -> float:
        """Return the cycles that a warpgroup waits where every tile is there in time."""
        shared_rows = self._config.block_m // self._warps < MMA_ROWS and not self._softmax.lone_warps
        meets = shared_rows or self._softmax.exchanges
        return self._constants.iteration_latency_cycles + (self._constants.cross_warp_cycles if meets else 0.0)

    def _late_cycles(self, blocks: int) -> float:
        """Return the cycles of waiting for a tile, which is requested as many iterations of its block ahead as there
        are free buffers."""
        held = self._constants.held_iterations if self._softmax.products_overlap else 0.0
        tiles = self._config.num_stages / self._softmax.stages_per_tile
        ahead = max(0.0, tiles - 1 - held) * blocks * self._cycles_of_iteration(blocks, 0.0)
        memory = self._constants.load_latency_cycles + self._constants.memory_latency_cycles / self.visits.query_tiles
        latency = memory + self.load
        late = latency * math.exp(-self._constants.latency_regularity * ahead / latency)
        if self._softmax.round_trip:  # the output is requested when the scores are there
            late += self._constants.load_latency_cycles
        return late

    def _cycles_of_iteration(self, blocks: int, late: float) -> float:
        """Return the cycles of compute and loads together, which a launch needs several times for the same blocks."""
        found = self._known_cycles.get((blocks, late))
        if found is None:
            found = self._known_cycles[blocks, late] = self._computed_cycles(blocks, late)
        return found

    def _computed_cycles(self, blocks: int, late: float) -> float:
        """Return the same, computed. A strand is one warp on each scheduler; it has its part of every tile."""
        per_block = self._warps / self._device.limits.sub_partitions
        # warpgroups that a copying warp feeds wait for tiles, not for each other
        apart = self._softmax.copying_warps or self._softmax.lone_warps
        drift = 1.0 if apart else self._constants.second_warpgroup
        strands = blocks * (1 + (per_block - 1) * drift if per_block > 1 else per_block)
        softmax = joined(self.exp, self.arithmetic, self._constants.softmax_overlap)
        compute = iteration_cycles(
            self.tensor / per_block,
            (softmax / per_block, (self.spill + self.shared) / per_block),
            self._idle_cycles() + late,
            max(1.0, strands),
            products_overlap=self._softmax.products_overlap,
        )
        return joined(compute * per_block / min(1.0, strands), self.load, self._constants.burstiness)


def matrix_rate(dtype: str) -> float:
    """Return the products of a type over those of 16 bits in the same time: twice as many of 8 bits, half as many of
    TF32, of which a float32 product takes three where PyTorch's settings ask for its full precision."""
    if dtype == "float32":
        return 0.5 / (3 if product_precision(dtype) == THREE_PRODUCTS else 1)
    return 2.0 if dtype == "float8_e4m3fn" else 1.0


def joined(first: float, second: float, exponent: float) -> float:
    """Return the time of two that overlap much: from their sum, with exponent 1, to the longer one."""
    return float((first**exponent + second**exponent) ** (1 / exponent))
