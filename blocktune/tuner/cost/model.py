"""Predicts a config's time from a device's rates: a ranking, not a stopwatch.

What a key tile costs a multiprocessor is counted for each unit, and how much of it overlaps, in
`tuner/cost/iterations.py`; causal skipping, waves, prologue and epilogue and the bytes of device memory come on top
here, and launches before and after the longest one.

    breakdown = predict_launches(kernel, config, shape, device, code)
    print(f"{breakdown.total_us:.0f} us, bound by {breakdown.binding}")
"""

from dataclasses import replace

from blocktune.kernels.base.kernel import AttentionKernel, SoftmaxCost
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import NO_FEATURES, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.cost.breakdown import CostBreakdown
from blocktune.tuner.cost.constants import CONSTANTS, CostConstants
from blocktune.tuner.cost.estimated_resources import estimated_second_code
from blocktune.tuner.cost.feature_costs import typical_lengths
from blocktune.tuner.cost.iterations import L2_BYTES_PER_CLOCK, KeyIterations, joined
from blocktune.tuner.cost.roofline import require_rates
from blocktune.tuner.occupancy.calculator import Occupancy, occupancy
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.traffic.by_kernel import traffic_of
from blocktune.tuner.traffic.launches import Passes
from blocktune.tuner.traffic.sparse import USUAL_DENSITY


def predict(
    shape: AttentionShape,
    config: KernelConfig,
    code: CompiledCode,
    device: DeviceSpec,
    softmax: SoftmaxCost | None = None,
    parts: int = 1,
    constants: CostConstants = CONSTANTS,
    *,
    least_bytes: int = 0,
) -> CostBreakdown:
    """Return the predicted time of one launch of a compiled config.

    Args:
        shape: the problem, as a plain forward.
        config: its block sizes.
        code: what the compiler made of the config.
        device: with its rates.
        softmax: what the kernel's softmax costs; None is the textbook form.
        parts: shares that the keys of every query are cut into; a second launch merges more than one.
        constants: what the model takes for granted.
        least_bytes: of device memory, where the launch moves more than inputs and outputs.

    Raises:
        UsageError: a rate of the device is unknown, or the config does not fit it.
    """
    require_rates(device)
    occupied = occupancy(code.resources, device.limits)
    if occupied.blocks_per_sm == 0:
        raise UsageError(f"{config.label} does not fit an SM of {device.name}, so it has no time. Take smaller blocks.")
    softmax = softmax or SoftmaxCost()
    iterations = KeyIterations(shape, config, code, device, softmax, constants)
    return _Launch(shape, config, iterations, occupied, device, softmax, parts, constants, least_bytes).breakdown()


def predict_launches(
    kernel: AttentionKernel,
    config: KernelConfig,
    shape: AttentionShape,
    device: DeviceSpec,
    code: CompiledCode,
    constants: CostConstants = CONSTANTS,
) -> CostBreakdown:
    """Return the predicted time of everything that a call of a compiled config launches.

    Raises:
        UsageError: a rate of the device is unknown, or the config does not fit it.
    """
    softmax = kernel.softmax_cost(config)
    blocks, folded = folded_forward(kernel, config, shape)
    least = traffic_of(kernel, config, shape, perfect_l2=True).total_bytes if softmax.round_trip else 0
    parts = parts_of(folded, shape)
    longest = predict(folded, blocks, code, device, softmax, parts, constants, least_bytes=least)
    both = longest.followed_by(predict_second(kernel, config, shape, device, constants))
    return both.beside(_moving_us(kernel, config, shape, device, constants))


def predict_us(
    kernel: AttentionKernel,
    config: KernelConfig,
    shape: AttentionShape,
    device: DeviceSpec,
    code: CompiledCode,
    constants: CostConstants = CONSTANTS,
) -> float:
    """Return the predicted time of a compiled config in microseconds.

    Raises:
        UsageError: a rate of the device is unknown, or the config does not fit it.
    """
    return predict_launches(kernel, config, shape, device, code, constants).total_us


def predict_second(
    kernel: AttentionKernel,
    config: KernelConfig,
    shape: AttentionShape,
    device: DeviceSpec,
    constants: CostConstants = CONSTANTS,
) -> CostBreakdown | None:
    """Return the predicted time of the launch after the longest one, or None if the longest one is the last.

    The code of that launch is estimated.

    Raises:
        UsageError: a rate of the device is unknown, or the launch does not fit it.
    """
    launch = kernel.second_launch(config, shape, device.limits)
    if launch is None:
        return None
    return predict(
        launch.shape, launch.config, estimated_second_code(launch, device), device, launch.softmax, 1, constants
    )


def folded_forward(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape
) -> tuple[KernelConfig, AttentionShape]:
    """Return the plain forward with the grid and tiles of a config's longest launch; under a block mask, with as many
    of the keys as a query sees."""
    blocks, folded = kernel.as_forward(config, typical_lengths(shape))
    density = density_of(shape)
    if density == 1.0:
        return blocks, folded
    seen = density * folded.visible_pairs / folded.seqlen_q
    return blocks, replace(folded, seqlen_k=max(1, round(seen)), causal=Causal.NONE, features=NO_FEATURES)


def density_of(shape: AttentionShape) -> float:
    """Return the share of pairs that a block mask is taken to leave; 1 without one."""
    return USUAL_DENSITY if shape.features.mask is MaskKind.BLOCK_SPARSE else 1.0


def parts_of(folded: AttentionShape, shape: AttentionShape) -> int:
    """Return into how many shares a kernel cuts the keys of a shape, by the forward that it turns the shape into: every
    share is a batch entry of its own."""
    return max(1, folded.batch // shape.batch)


def _moving_us(
    kernel: AttentionKernel,
    config: KernelConfig,
    shape: AttentionShape,
    device: DeviceSpec,
    constants: CostConstants,
) -> float:
    """Return the time of the launches that only move bytes."""
    names = kernel.loops.moving_passes
    if not names:
        return 0.0
    traffic = traffic_of(kernel, config, shape, perfect_l2=True)
    passes = [one for one in traffic.passes if one.name in names] if isinstance(traffic, Passes) else []
    moved = sum(one.total_bytes for one in passes)
    rate = constants.memory_share * float(device.memory_gbs or 0) * 1e3
    return len(passes) * constants.next_launch_us + moved / rate


class _Launch:
    """One launch: its iterations, in blocks, in waves, which overlap with device memory."""

    def __init__(
        self,
        shape: AttentionShape,
        config: KernelConfig,
        iterations: KeyIterations,
        occupied: Occupancy,
        device: DeviceSpec,
        softmax: SoftmaxCost,
        parts: int,
        constants: CostConstants,
        least_bytes: int,
    ) -> None:
        self._shape, self._config, self._iterations, self._device = shape, config, iterations, device
        self._softmax, self._parts, self._constants, self._least_bytes = softmax, parts, constants, least_bytes
        self._visits = iterations.visits
        self._heads = shape.batch * shape.num_heads
        self._grid = self._visits.query_tiles * self._heads
        self._blocks = min(occupied.blocks_per_sm, -(-self._grid // device.num_sms))

    def breakdown(self) -> CostBreakdown:
        iterations, blocks = self._iterations, self._blocks
        tiles = self._visits.total * self._heads / self._device.num_sms  # key tiles per SM
        edges = self._grid / self._device.num_sms * self._edge_cycles() / blocks
        even = tiles * iterations.tile_cycles(blocks) + edges
        whole = self._makespan_cycles(late=True)
        hbm = self._hbm_bytes() / (self._constants.memory_share * float(self._device.memory_gbs or 0) * 1e3)
        launches = self._constants.launch_us + self._merge_us()
        return CostBreakdown(
            tensor_us=self._us(tiles * iterations.tensor),
            exp_us=self._us(tiles * iterations.exp),
            arithmetic_us=self._us(tiles * iterations.arithmetic),
            spill_us=self._us(tiles * iterations.spill),
            shared_us=self._us(tiles * iterations.shared),
            l2_us=self._us(tiles * (iterations.load + iterations.adding)),
            hbm_us=hbm,
            latency_us=self._us(tiles * iterations.waiting_cycles(blocks) / blocks),
            edge_us=launches + self._us(edges),
            tail_us=self._us(max(0.0, whole - even)),
            total_us=launches + self._beside_memory_us(whole, hbm),
        )

    def _beside_memory_us(self, whole: float, hbm_us: float) -> float:
        """Return the time of a launch of `whole` cycles whose bytes take `hbm_us`.

        Warps that walk alone keep the memory busy while others of them wait for it, so that its rate and its latency
        are not paid one after the other.
        """
        if self._softmax.lone_warps:
            bare = self._us(self._makespan_cycles(late=False))
            return max(self._us(whole), joined(bare, hbm_us, self._constants.burstiness))
        return joined(self._us(whole), hbm_us, self._constants.burstiness)

    def _merge_us(self) -> float:
        """Return the time of merging shares of the keys, without the bytes that this moves."""
        if self._parts == 1:
            return 0.0
        if self._softmax.merges_inside:
            return self._constants.inner_merge_us
        return self._constants.overlapped_merge_us if self._softmax.merge_overlaps else self._constants.merge_us

    def _edge_cycles(self) -> float:
        """Return the cycles of a block besides its iterations.

        Where products overlap, the first softmax and the last product have nothing to overlap with.
        """
        iterations, softmax = self._iterations, self._softmax
        fixed = self._constants.next_tile_cycles if softmax.persistent else self._constants.block_start_cycles
        alone = min(iterations.tensor / 2, iterations.exp + iterations.arithmetic) if softmax.products_overlap else 0.0
        return fixed + alone + self._config.block_m * iterations.row_bytes / L2_BYTES_PER_CLOCK

    def _block_cycles(self, blocks: int, visited: float, *, late: bool) -> float:
        """Return the cycles of a block that visits `visited` key tiles while `blocks` blocks are resident."""
        return visited * blocks * self._iterations.tile_cycles(blocks, late=late) + self._edge_cycles()

    def _makespan_cycles(self, *, late: bool) -> float:
        """Return the cycles until the last block ends. Full attention: equal blocks in waves, the last of which may be
        partly filled and is faster for it. Causal: unequal blocks, the longest first, which leaves about a mean block
        uneven at the end."""
        slots = self._blocks * self._device.num_sms
        mean = self._block_cycles(self._blocks, self._visits.mean, late=late)
        if self._shape.causal is not Causal.NONE:
            longest = self._block_cycles(self._blocks, self._visits.longest, late=late)
            return max(longest, (self._grid / slots + self._constants.uneven_end) * mean)
        waves, rest = divmod(self._grid, slots)
        left = -(-rest // self._device.num_sms)
        return waves * mean + (self._block_cycles(left, self._visits.mean, late=late) if left else 0.0)

    def _hbm_bytes(self) -> float:
        """Return every tensor once; keys and values once a wave of their head where those in flight do not fit L2. What
        a share of the keys gave is written and read in float32: an output, its maximum and its sum."""
        shape, key_bytes = self._shape, self._iterations.key_bytes
        queries = shape.batch * shape.num_heads * shape.seqlen_q * self._iterations.row_bytes
        keys = shape.batch * shape.num_heads_kv * shape.seqlen_k * key_bytes
        slots = self._blocks * self._device.num_sms
        heads_in_flight = min(self._heads, -(-slots // self._visits.query_tiles))
        in_flight = -(-heads_in_flight // shape.group_size) * shape.seqlen_k * key_bytes
        fits = self._device.l2_bytes is None or in_flight <= self._device.l2_bytes
        rows = shape.batch * shape.num_heads * shape.seqlen_q if self._parts > 1 else 0
        merged = 2 * 4 * rows * (shape.head_dim_v + 2)
        again = 1 if fits else -(-self._visits.query_tiles // slots)
        return max(self._least_bytes, queries + merged + keys * again)

    def _us(self, cycles: float) -> float:
        """Return cycles in microseconds at the sustained clock, derived from the advertised matrix rate: it is given at
        less than the boost clock."""
        device = self._device
        clock_mhz = float(device.clock_mhz or 0)
        if device.tensor_tflops and device.tensor_flops_per_clock:
            clock_mhz = device.tensor_tflops * 1e6 / (device.tensor_flops_per_clock * device.num_sms)
        return cycles / (self._constants.sustained_clock * clock_mhz)
