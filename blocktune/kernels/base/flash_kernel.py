"""What the FlashAttention-2 forward kernels have in common on the host: rules, resources and arguments."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from blocktune.kernels.base.kernel import MIN_HEAD_DIM, AttentionKernel, SoftmaxCost
from blocktune.kernels.base.precision import is_one_product, product_precision
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.tile_bounds import forward_columns, most_forward_columns
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.hardware.limits import WARP_SIZE, MatrixUnit
from blocktune.kernels.layouts.forward_bytes import forward_bytes, most_forward_bytes
from blocktune.kernels.layouts.forward_tiles import ForwardTiles
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal

LOG2_E = 1.4426950408889634
ROWS_PER_WARP = 16
"""Rows of a score tile that one warp owns in a tensor-core product."""
WARPGROUP_ROWS, WARPGROUP_WARPS = 64, 4
"""The smallest tile that wgmma and tcgen05 multiply, and its warps."""
FLOAT32_BYTES = 4
ADDRESS_BYTES = 8
MOST_FLOAT32_ELEMENTS = 204
"""Elements of Q, scores, output, and K or V of a thread, read off the code of compute capabilities 8.0 to 12.0."""
SWIZZLE_BYTES = 128
"""The longest row of shared memory that is swizzled as a whole; wider blocks are made of such rows."""
GROUP_BYTES = 16 << 20
"""Keys and values of the heads that causal programs work on together: a part of every large GPU's L2 cache."""

RUN_TIME_SIZES = ("num_heads", "group_size", "batch_heads", "head_group", "seqlen_q", "seqlen_k", "causal_offset")
"""Integers that are not compiled in: one compilation serves all lengths, batches and head counts."""

IN_ORDER, AHEAD, AHEAD_FIXED = 0, 1, 2
"""Values of the parameter `schedule`: scores, softmax and second product of a tile in order; the scores of the next
tile ahead of the second product; the same against a fixed softmax reference (see
kernels/portable/forward/softmax.py)."""


def padded_width(head_dim: int) -> int:
    """Return the head dimension rounded up to what Triton can express: a power of two, at least 16."""
    return max(MIN_HEAD_DIM, 1 << (head_dim - 1).bit_length())


def operand_widths(shape: AttentionShape) -> tuple[int, int]:
    """Return the padded columns of a block of Q and K, and of a block of V, as `swizzled_alike` wants them."""
    return swizzled_alike(padded_width(shape.head_dim), padded_width(shape.head_dim_v), shape.element_bytes)


def swizzled_alike(width: int, width_v: int, element_bytes: int) -> tuple[int, int]:
    """Return the columns of blocks of K and V, the narrower one widened until its rows are swizzled as the other's.

    ptxas 12.8 loses the copy of a base address that two wgmma descriptors with different high words (swizzle, stride)
    start from, and then reads a register that holds something else. K and V have one base where they take turns in one
    buffer, so their blocks are swizzled alike: rows of SWIZZLE_BYTES, or equal ones below.
    """
    least = min(max(width, width_v), SWIZZLE_BYTES // element_bytes)
    return max(width, least), max(width_v, least)


def heads_per_group(shape: AttentionShape) -> int:
    """Return how many heads' keys and values fill `GROUP_BYTES`; at least 8, unless they fill twice as much."""
    head_bytes = shape.seqlen_k * (shape.head_dim + shape.head_dim_v) * shape.element_bytes
    wanted = max(GROUP_BYTES // head_bytes, min(8, 2 * GROUP_BYTES // head_bytes), 1)
    return min(shape.batch * shape.num_heads, wanted)


def contiguous_strides(shape: AttentionShape, letter: str) -> dict[str, int]:
    """Return stride_{letter}b, -h and -m (-n for K and V) of the contiguous tensor q, k, v or o (the output), in
    elements. A page takes the place of a batch entry."""
    keys = shape.features.page_size or shape.seqlen_k
    heads, rows = (shape.num_heads, shape.seqlen_q) if letter in "qo" else (shape.num_heads_kv, keys)
    dim = shape.head_dim if letter in "qk" else shape.head_dim_v
    row = "m" if letter in "qo" else "n"
    return {f"stride_{letter}b": heads * rows * dim, f"stride_{letter}h": rows * dim, f"stride_{letter}{row}": dim}


def all_strides(shape: AttentionShape, letters: str) -> dict[str, int]:
    """Return `contiguous_strides` of several tensors."""
    return {name: value for letter in letters for name, value in contiguous_strides(shape, letter).items()}


class FlashKernel(AttentionKernel):
    """Base of the forward kernels; a subclass names its jitted function and says how K and V reach it."""

    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (32, 64, 128, 256),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
        "schedule": (IN_ORDER, AHEAD, AHEAD_FIXED),
    }
    preferences: ClassVar[tuple[tuple[int, int, int, int, int], ...]]
    """Default configs as (block_m, block_n, num_warps, num_stages, schedule), best first."""
    float32_groups: ClassVar[tuple[tuple[int, int, int, int, int], ...]] = (
        (128, 64, 8, 1, IN_ORDER),
        (32, 32, 4, 1, IN_ORDER),
    )
    """Those of float32 with `wgmma`. On an H200 the first takes 10 to 30 % less time than smaller tiles with 64 to 128
    columns. With more it does not fit, and the second one takes 30 % less than 64 x 32."""

    @property
    @abstractmethod
    def function(self) -> Any:
        """The jitted function."""

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        """Return the broken rules, besides the range of every parameter: what `schedule_problem` says."""
        problems = super().rule_violations(config, shape, limits)
        return problems or schedule_problem(config, shape, limits)

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        names = tuple(self.parameters)
        in_groups = limits.mma == "wgmma" and shape.dtype == "float32"
        preferences = (*self.float32_groups, *self.preferences) if in_groups else self.preferences
        candidates = [KernelConfig.of(self.name, dict(zip(names, values, strict=True))) for values in preferences]
        # running ahead was measured on wgmma only
        if limits.mma != "wgmma":
            candidates = [config for config in candidates if config.parameters["schedule"] == IN_ORDER]
        if limits.mma == "mma" and shape.dtype == "float32":
            candidates = [config for config in candidates if holds_float32(config, shape)]
        return self.first_fitting(candidates, shape, limits)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(self.function)

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of Q, the buffers of K and V, P where warps exchange it, the kernel's barriers, and tiles on
        their way from one layout to another (notes/models/shared_memory.md)."""
        return forward_bytes(self.forward_tiles(config, shape, limits))

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return most_forward_bytes(self.forward_tiles(config, shape, limits))

    def forward_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> ForwardTiles:
        """Return the tiles that take shared memory."""
        width, width_v = operand_widths(shape)
        return ForwardTiles(
            block_m=config.block_m,
            block_n=config.block_n,
            width=width,
            width_v=width_v,
            element_bytes=shape.element_bytes,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            unit=product_unit(config, limits),
            cc=limits.cc,
            ahead=config.parameters["schedule"] != IN_ORDER,
            barrier_bytes=self.barrier_bytes(config, shape, limits, buffer_depth(config, shape, limits)),
            one_product=is_one_product(shape.dtype),
        )

    def tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        if product_unit(config, limits) != "tcgen05":
            return 0
        return forward_columns(config, operand_widths(shape), shape.element_bytes)

    def most_tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        if product_unit(config, limits) != "tcgen05":
            return 0
        return most_forward_columns(config, operand_widths(shape), shape.element_bytes)

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        schedule = config.parameters["schedule"]
        if schedule == AHEAD_FIXED:  # no maximum, which is two of the instructions
            return SoftmaxCost(instructions_per_score=3.5, rescales=False, products_overlap=True)
        return SoftmaxCost(products_overlap=schedule == AHEAD)

    def barrier_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits, depth: int) -> int:
        """Return the bytes of shared memory of the barriers that the loads into `depth` buffers of K and of V complete
        on."""
        return 0

    def constants(self, config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
        """Return the constexpr arguments that all forward kernels share."""
        own, (width, width_v) = config.parameters, operand_widths(shape)
        return {
            "HEAD_DIM": shape.head_dim,
            "HEAD_DIM_V": shape.head_dim_v,
            "WIDTH": width,
            "WIDTH_V": width_v,
            "CAUSAL": shape.causal is not Causal.NONE,
            "RAGGED": shape.seqlen_k % config.block_n != 0,
            "PRECISION": product_precision(shape.dtype),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "SCHEDULE": own["schedule"],
            "STAGES": config.num_stages,
        }

    def sizes(self, shape: AttentionShape) -> dict[str, int]:
        """Return the run-time integers that all forward kernels share."""
        values = (
            shape.num_heads,
            shape.group_size,
            shape.batch * shape.num_heads,
            heads_per_group(shape),
            shape.seqlen_q,
            shape.seqlen_k,
            shape.causal_offset,
        )
        return dict(zip(RUN_TIME_SIZES, values, strict=True))

    def options(self, config: KernelConfig) -> dict[str, int]:
        return {"num_warps": config.num_warps, "num_stages": config.num_stages}

    def grid(self, config: KernelConfig, shape: AttentionShape) -> tuple[int, int, int]:
        return (-(-shape.seqlen_q // config.block_m) * shape.batch * shape.num_heads, 1, 1)


def holds_float32(config: KernelConfig, shape: AttentionShape) -> bool:
    """Return whether ptxas keeps at the registers of a thread what it holds of the tiles of float32 products by `mma`.
    With more it gives up, and compiles for 32 registers with 40 kB of spills a thread."""
    width, width_v = operand_widths(shape)
    rows = config.block_m * (width + width_v + config.block_n)
    return rows + config.block_n * max(width, width_v) <= MOST_FLOAT32_ELEMENTS * WARP_SIZE * config.num_warps


def product_unit(config: KernelConfig, limits: ComputeLimits) -> MatrixUnit:
    """Return the instruction of a config's matrix products: a tile lower than a warpgroup's, or of fewer warps, is left
    to `mma`, which every GPU with tensor cores that Triton uses has."""
    whole = config.block_m >= WARPGROUP_ROWS and config.num_warps >= WARPGROUP_WARPS
    return "mma" if limits.mma in ("wgmma", "tcgen05") and not whole else limits.mma


def schedule_problem(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
    """Return why the config cannot run ahead: those schedules carry 16-bit probabilities, and in Triton 3.6 a pass over
    the layouts of tensor memory (`TritonNvidiaGPUOptimizeTMemLayoutsPass`) fails at every `AHEAD_FIXED` of tcgen05."""
    schedule = config.parameters["schedule"]
    if schedule != IN_ORDER and shape.element_bytes != 2:
        return (f"`schedule` 1 and 2 of {config.kernel} need a 16-bit data type, but got {shape.dtype}.",)
    if schedule == AHEAD_FIXED and product_unit(config, limits) == "tcgen05":
        return (
            f"`schedule` 2 of {config.kernel} needs products that leave tensor memory alone, but those of "
            f"{config.block_m} rows on compute capability {limits.name} use it. Take schedule 0 or 1.",
        )
    return ()


def tf32_tiles(shape: AttentionShape) -> int:
    """Return how many tiles an operand in shared memory is: of float32, its TF32 numbers and what they leave of it."""
    return 2 if shape.dtype == "float32" else 1


def buffer_depth(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the buffers of K, and as many of V, that loads fill in turns."""
    unit = product_unit(config, limits)
    if unit == "none":
        return 0  # no asynchronous copies: every tile is loaded when it is needed
    # 16-bit products of wgmma and tcgen05 read the buffers themselves; otherwise one tile of each is in registers
    return config.num_stages - (unit == "mma" or shape.element_bytes != 2)


def exchanges_in_turns(config: KernelConfig, limits: ComputeLimits) -> bool:
    """Return whether P goes through shared memory before V comes: on wgmma ahead with one stage, where warps share
    rows."""
    ahead = config.parameters["schedule"] != IN_ORDER
    return product_unit(config, limits) == "wgmma" and ahead and config.num_stages == 1 and _shares_rows(config)


def exchanges_probabilities(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> bool:
    """Return whether P goes through shared memory, in addition to the buffers.

    It does where a warp's rows of P are not the ones that the warp multiplies with V.
    """
    in_order, unit = config.parameters["schedule"] == IN_ORDER, product_unit(config, limits)
    if unit == "wgmma":  # several warps share rows; in order P takes no memory of its own
        return not in_order and config.num_stages > 1 and _shares_rows(config)
    # mma.sync splits an accumulator that is wider than high between warps by columns; with one stage there is no other
    # buffer while a float32 P is there, and V comes after it
    beside = shape.element_bytes == 2 or config.num_stages > 1
    return unit == "mma" and beside and config.block_m < operand_widths(shape)[1]


def _shares_rows(config: KernelConfig) -> bool:
    """Return whether a block has more warps than groups of rows that a warp multiplies."""
    return config.block_m < ROWS_PER_WARP * config.num_warps


def looked_up_bytes(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the bytes of buffers with the pages that keys are in, one a tile or one a key, and with the scales of
    tokens."""
    features, n = shape.features, config.block_n
    pages = (n if n > features.page_size else 1) * (features.page_size > 0)
    return (config.num_stages - 1) * (pages + 2 * n * features.token_scales) * FLOAT32_BYTES


def more_pages_bytes(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes of pages that may come on top, where a tile has several: a second buffer, if rows of keys and
    of values are of different widths and fewer than threads, or what takes addresses to other threads where nothing
    else is exchanged."""
    copied = config.num_stages > 1 and limits.mma != "none"
    if not copied or not 0 < shape.features.page_size < config.block_n:
        return 0
    width, width_v = operand_widths(shape)
    if width != width_v and config.block_n < WARP_SIZE * config.num_warps:
        return (config.num_stages - 1) * config.block_n * FLOAT32_BYTES
    alone = product_unit(config, limits) == "mma" and config.block_m >= width_v
    return config.block_n * ADDRESS_BYTES * alone
