"""Attention forward of float8_e4m3fn for Hopper (compute capability 9.0) in Gluon, with bfloat16 output.

A launch is two kernels: kernels/hopper/fp8/transpose_values.py writes the values transposed, since 8-bit wgmma takes
nothing else, and the warps of kernels/hopper/fp8/warps.py compute. Query, key and value may have scales. Any lengths,
both causal masks, grouped heads, heads from 48 to 256 elements that 16 divides; no windows, soft caps or packed
sequences.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocktune.kernels.base.feature_arguments import broadcast_strides
from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, LOG2_E, heads_per_group
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec, SoftmaxCost
from blocktune.kernels.base.launch import ExtrasLaunch
from blocktune.kernels.base.loops import ForwardLoops
from blocktune.kernels.base.on_chip import OnChip
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import DescriptorArgument, TensorArgument, specialize
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.hopper.common.consumer_tiles import consumer_tiles, leaving_tile
from blocktune.kernels.hopper.common.descriptors import undescribable
from blocktune.kernels.hopper.common.persistent_blocks import multiprocessors, tile_counter
from blocktune.kernels.hopper.common.slots import new_barriers, new_tile_numbers, new_tile_ring, open_slot
from blocktune.kernels.hopper.forward.arguments import Sizes
from blocktune.kernels.hopper.forward.device_kernel import tiles
from blocktune.kernels.hopper.forward.kernel import describe_rows
from blocktune.kernels.hopper.forward.layout import REGISTERS, ROWS, WARPS
from blocktune.kernels.hopper.fp8.arguments import Memory, Options, Scales
from blocktune.kernels.hopper.fp8.launch import TurnedLaunch
from blocktune.kernels.hopper.fp8.steps import has_float32_sums, stretch_keys
from blocktune.kernels.hopper.fp8.transpose_values import TURNING, WORD_BYTES, transpose_values_kernel, turned_sizes
from blocktune.kernels.hopper.fp8.turn_values import TURNERS, UNIT_DIMS, UNIT_KEYS, turner, values
from blocktune.kernels.hopper.fp8.warps import consumer, producer
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import AttentionShape, Causal

WIDTHS = (64, 128, 256)
"""Head dimensions that tiles have; those between are filled up with zeros by the copy engine."""
MIN_HEAD_DIM = 48
ALIGNED_ELEMENTS = 16
"""Of a head: the copy engine's rows begin at multiples of 16 bytes."""
SIZES = ("seqlen_q", "seqlen_k", "num_heads", "group_size", "batch_heads", "head_group", "right")
SCALES = ("scale_q", "scale_k", "scale_v")
STRIDES = ("scale_qb", "scale_qh", "scale_kb", "scale_kh", "scale_vb", "scale_vh")


@gluon.constexpr_function
def worker_warps(consumers, turns):
    """Return the warps of all partitions behind the first consumer."""
    return [4] * (consumers - 1) + [TURNERS.value] * turns + [1]


@gluon.constexpr_function
def worker_registers(consumers, turns, of_consumer, of_producer):
    """Return the registers a thread of these partitions."""
    return [of_consumer] * (consumers - 1) + [of_producer] * (turns + 1)


@gluon.jit(do_not_specialize=[*STRIDES, *SIZES])
def flash_fwd_fp8_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, counter, scale_log2, scale_q, scale_k, scale_v,
    scale_qb, scale_qh, scale_kb, scale_kh, scale_vb, scale_vh,
    seqlen_q, seqlen_k, num_heads, group_size, batch_heads, head_group, right,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, RAGGED: gl.constexpr, RIGHT: gl.constexpr,
    ALIGNED: gl.constexpr, Q_REGISTERS: gl.constexpr, TURNS: gl.constexpr, ONE_STRETCH: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Descriptors of q and k (e4m3) and the output with blocks of 64 (q, output) or BLOCK_N rows (k), of the values as
    kernels/hopper/fp8/transpose_values.py writes them with blocks [width, BLOCK_N]; lse [batch, num_heads, seqlen_q] or
    None; counter: two int32 zeros, and zeros again at the end. scale_log2: the softmax scale times log2(e). scale_q,
    scale_k, scale_v: what the numbers of a head are multiplied with, float32 with strides of (batch, head), or None for
    1.

    Query i sees the keys .. i + right (RIGHT: where there is such a bound) that there are (RAGGED: the last block may
    reach beyond them). ALIGNED: in the one block that has to be masked every row sees a key.
    """
    dtype: gl.constexpr = q_desc.dtype
    QK_W: gl.constexpr = q_desc.block_type.shape[3]
    V_W: gl.constexpr = o_desc.block_type.shape[3]
    QK_L: gl.constexpr = gl.NVMMASharedLayout(q_desc.layout.swizzle_byte_width, element_bitwidth=8, rank=2)
    V_L: gl.constexpr = gl.NVMMASharedLayout(v_desc.layout.swizzle_byte_width, element_bitwidth=8, rank=2)
    O_L: gl.constexpr = gl.NVMMASharedLayout(o_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2)
    # [CONSUMERS, 64, head_dim]
    q_smem = tiles(dtype, CONSUMERS, 64, QK_W, 1, QK_L)
    # [STAGES, BLOCK_N, head_dim]
    k_smem = tiles(dtype, STAGES, BLOCK_N, QK_W, 1, QK_L)
    # [STAGES, head_dim_v, BLOCK_N]
    v_smem = values(dtype, STAGES, V_W, BLOCK_N, V_L, TURNS)
    # [CONSUMERS, 64, head_dim_v] of the output, or 64 rows of float32 sums and then the output
    o_smem = tiles(o_desc.dtype, CONSUMERS, 128 if has_float32_sums(CONSUMERS, V_W) else 64, V_W, 1, O_L)
    memory = Memory(
        q=q_smem,
        k=k_smem,
        v=v_smem,
        o=o_smem,
        q_full=new_barriers(CONSUMERS),
        q_empty=new_barriers(CONSUMERS),
        full=new_barriers(STAGES),
        raw_full=new_barriers(STAGES) if TURNS else None,
        ring=new_tile_ring(new_tile_numbers()),
    )
    for i in gl.static_range(CONSUMERS):
        open_slot(memory.q_full, memory.q_empty, i, 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(memory.full.index(i), count=2 if TURNS else 1)
        if TURNS:
            mbarrier.init(memory.raw_full.index(i), count=1)
    for i in gl.static_range(2):
        open_slot(memory.ring.full, memory.ring.empty, i, CONSUMERS + 1 if TURNS else CONSUMERS)
    fence_async_shared()
    scales = Scales(
        log2=scale_log2,
        q=scale_q,
        k=scale_k,
        v=scale_v,
        qb=scale_qb,
        qh=scale_qh,
        kb=scale_kb,
        kh=scale_kh,
        vb=scale_vb,
        vh=scale_vh,
    )
    sizes = Sizes(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        group_size=group_size,
        batch_heads=batch_heads,
        head_group=head_group,
        right=right,
        left=None,
    )
    OPTIONS: gl.constexpr = Options(
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
        CONSUMERS=CONSUMERS,
        RAGGED=RAGGED,
        RIGHT=RIGHT,
        ALIGNED=ALIGNED,
        Q_REGISTERS=Q_REGISTERS,
        ONE_STRETCH=ONE_STRETCH,
    )
    gl.static_assert(CONSUMERS >= 2 and CONSUMERS <= 4)
    WARPS: gl.constexpr = worker_warps(CONSUMERS, TURNS)
    REGS: gl.constexpr = worker_registers(CONSUMERS, TURNS, CONSUMER_REGS, PRODUCER_REGS)
    if CONSUMERS == 2 and not TURNS:
        gl.warp_specialize([
            (consumer, (o_desc, lse, memory, scales, sizes, 0, OPTIONS)),
            (consumer, (o_desc, lse, memory, scales, sizes, 1, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, memory, counter, sizes, OPTIONS)),
        ], WARPS, REGS)  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (o_desc, lse, memory, scales, sizes, 0, OPTIONS)),
            (consumer, (o_desc, lse, memory, scales, sizes, 1, OPTIONS)),
            (turner, (memory, sizes, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, memory, counter, sizes, OPTIONS)),
        ], WARPS, REGS)  # fmt: skip
    elif CONSUMERS == 3 and not TURNS:
        gl.warp_specialize([
            (consumer, (o_desc, lse, memory, scales, sizes, 0, OPTIONS)),
            (consumer, (o_desc, lse, memory, scales, sizes, 1, OPTIONS)),
            (consumer, (o_desc, lse, memory, scales, sizes, 2, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, memory, counter, sizes, OPTIONS)),
        ], WARPS, REGS)  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize([
            (consumer, (o_desc, lse, memory, scales, sizes, 0, OPTIONS)),
            (consumer, (o_desc, lse, memory, scales, sizes, 1, OPTIONS)),
            (consumer, (o_desc, lse, memory, scales, sizes, 2, OPTIONS)),
            (turner, (memory, sizes, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, memory, counter, sizes, OPTIONS)),
        ], WARPS, REGS)  # fmt: skip
    elif not TURNS:
        gl.warp_specialize([
            (consumer, (o_desc, lse, memory, scales, sizes, 0, OPTIONS)),
            (consumer, (o_desc, lse, memory, scales, sizes, 1, OPTIONS)),
            (consumer, (o_desc, lse, memory, scales, sizes, 2, OPTIONS)),
            (consumer, (o_desc, lse, memory, scales, sizes, 3, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, memory, counter, sizes, OPTIONS)),
        ], WARPS, REGS)  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (o_desc, lse, memory, scales, sizes, 0, OPTIONS)),
            (consumer, (o_desc, lse, memory, scales, sizes, 1, OPTIONS)),
            (consumer, (o_desc, lse, memory, scales, sizes, 2, OPTIONS)),
            (consumer, (o_desc, lse, memory, scales, sizes, 3, OPTIONS)),
            (turner, (memory, sizes, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, memory, counter, sizes, OPTIONS)),
        ], WARPS, REGS)  # fmt: skip


class FlashForwardFp8(AttentionKernel):
    """The warp-specialised forward of 8-bit tensors on Hopper. block_m counts the rows of all consumers."""

    name = "flash_fwd_fp8"
    loops = ForwardLoops(transposes="v")
    dtypes = frozenset(("float8_e4m3fn",))
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (128, 192, 256),
        "block_n": (64, 128),
        "num_warps": (4,),
        "num_stages": (2, 3, 4, 5, 6),
        "q_registers": (0, 1),
        "turn_values": (0, 1),
    }

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if limits.cc != (9, 0):
            return f"{self.name} is made of wgmma (compute capability 9.0 alone), but got {limits.name}"
        for name, dim in (("head_dim", shape.head_dim), ("head_dim_v", shape.head_dim_v)):
            if not MIN_HEAD_DIM <= dim <= WIDTHS[-1] or dim % ALIGNED_ELEMENTS:
                return (
                    f"`{MIN_HEAD_DIM} <= {name} <= {WIDTHS[-1]}`, a multiple of {ALIGNED_ELEMENTS}, must hold for "
                    f"{self.name}, but got {name}={dim}"
                )
        return None

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        problems = super().rule_violations(config, shape, limits)
        if not problems and tile_width(shape.head_dim_v) == WIDTHS[-1] and config.block_m > 2 * ROWS:
            problems += (f"`block_m` must be {2 * ROWS} for {WIDTHS[-1]} columns of values, but got {config.block_m}.",)
        return problems

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of Q and the 16-bit output of all consumers, and the slots of K and V; barriers take another
        half KiB."""
        width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
        of_sum = 4 if has_float32_sums(config.block_m // ROWS, width_v) else 2
        return config.block_m * (width + of_sum * width_v) + config.num_stages * config.block_n * (width + width_v)

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        """Return the fastest of what was measured on a Hopper GPU, without spills in a loop. Heads of 64 columns leave
        registers for more than two consumers; with a causal mask smaller blocks of keys are less in vain. Values of 256
        columns leave none for larger blocks and queries."""
        width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
        if width_v == WIDTHS[-1]:
            widest = {"block_m": 2 * ROWS, "block_n": 64, "num_warps": WARPS, "num_stages": 4, "q_registers": 1, "turn_values": 0}
            return KernelConfig.of(self.name, widest)
        many = width == width_v == WIDTHS[0] and shape.seqlen_q > 2 * ROWS
        masked = many and shape.causal is not Causal.NONE
        values = {
            "block_m": 4 * ROWS if masked else 3 * ROWS if many else 2 * ROWS,
            "block_n": 64 if masked else 128,
            "num_warps": WARPS,
            "num_stages": 6 if masked else 3 if width == WIDTHS[-1] else 4,
            "q_registers": int(width == WIDTHS[1] or (many and not masked)),
            "turn_values": 0,
        }
        return KernelConfig.of(self.name, values)

    def total_warps(self, config: KernelConfig) -> int:
        return WARPS * (config.block_m // ROWS) + WARPS

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        return SoftmaxCost(rescales=False, products_overlap=True, copying_warps=WARPS, persistent=True)

    def layout_problem(self, q: Any, k: Any, v: Any) -> str | None:
        problem = undescribable(self.name, query=q, key=k) or super().layout_problem(q, k, v)
        if problem is not None:
            return problem
        needed = (stride for stride, size in zip(v.stride()[:3], v.shape, strict=False) if size > 1)
        if v.data_ptr() % WORD_BYTES or any(stride % WORD_BYTES for stride in needed):
            return f"{WORD_BYTES} must divide the address and the strides in bytes of value for {self.name}"
        return None

    def own_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
        """Return the tiles: the output leaves with 16 bits, through shared memory of its own or where the float32 sums
        of more than two warpgroups are."""
        widths = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
        element_bytes = FLOAT32_BYTES if has_float32_sums(config.block_m // ROWS, widths[1]) else shape.out_bytes
        out = leaving_tile(config.block_m, widths[1], element_bytes)
        return consumer_tiles(config, widths, shape.element_bytes, out, transposed_values=True)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_fwd_fp8_kernel, transpose_values_kernel)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        blocks = _blocks(config, shape)
        dtypes = (shape.dtype, shape.dtype, shape.dtype, shape.out_dtype)
        arguments: dict[str, Any] = {
            f"{letter}_desc": DescriptorArgument(dtype, (1, 1, *block), swizzled=True)
            for letter, dtype, block in zip("qkvo", dtypes, blocks, strict=True)
        }
        arguments |= {"lse": None, "counter": TensorArgument("int32"), "scale_log2": 1.0}
        arguments |= dict.fromkeys(SCALES) | dict.fromkeys(STRIDES, 0)
        return specialize(flash_fwd_fp8_kernel, arguments | _rest(config, shape), {"num_warps": WARPS})

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        """Return the pass that transposes the values, unless the attention does."""
        if turns_values(config):
            return ()
        tensor, row = TensorArgument(shape.dtype), shape.head_dim_v
        head = shape.seqlen_k * row
        arguments: dict[str, Any] = {"V": tensor, "VT": tensor}
        arguments |= {"stride_vb": shape.num_heads_kv * head, "stride_vh": head, "stride_vn": row}
        return (specialize(transpose_values_kernel, arguments | turned_sizes(shape), TURNING),)

    def bind(self, config: KernelConfig, shape: AttentionShape) -> ExtrasLaunch | TurnedLaunch:
        tile_count = -(-shape.seqlen_q // config.block_m) * shape.batch * shape.num_heads
        attend = ExtrasLaunch(
            flash_fwd_fp8_kernel,
            (min(multiprocessors(), tile_count), 1, 1),
            _leading,
            partial(_trailing, tuple(_rest(config, shape).values())),
            {"num_warps": WARPS},
            tuple((slot, partial(describe_rows, *block)) for slot, block in enumerate(_blocks(config, shape))),
        )
        return attend if turns_values(config) else TurnedLaunch(attend=attend, sizes=turned_sizes(shape))


def tile_width(head_dim: int) -> int:
    """Return the columns of a tile that holds heads of this dimension."""
    return next(width for width in WIDTHS if width >= head_dim)


def turns_values(config: KernelConfig) -> bool:
    """Return whether the attention itself transposes the values, and no pass before it."""
    return bool(config.parameters["turn_values"])


def _blocks(config: KernelConfig, shape: AttentionShape) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) that a copy of q, k, the values and the output moves: of transposed values, or of units
    that are transposed where they stand."""
    width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
    values = width_v, config.block_n
    if turns_values(config):
        values = config.block_n if width_v <= UNIT_DIMS.value else UNIT_KEYS.value, width_v
    return (ROWS, width), (config.block_n, width), values, (ROWS, width_v)


def _rest(config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
    """Return the sizes and constants of a launch. A row that sees its last key at most needs no check of the end of the
    keys, and one block is masked alone if the diagonal meets the edge of one."""
    heads, right, causal = shape.batch * shape.num_heads, shape.causal_offset, shape.causal is not Causal.NONE
    values = (shape.seqlen_q, shape.seqlen_k, shape.num_heads, shape.group_size, heads, heads_per_group(shape), right)
    consumers = config.block_m // ROWS
    inside = causal and right <= shape.seqlen_k - shape.seqlen_q
    return dict(zip(SIZES, values, strict=True)) | {
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "CONSUMERS": consumers,
        "RAGGED": shape.seqlen_k % config.block_n != 0 and not inside,
        "RIGHT": causal,
        "ALIGNED": not causal or (right >= 0 and right % config.block_n == 0),
        "Q_REGISTERS": bool(config.parameters["q_registers"]),
        "TURNS": turns_values(config),
        "ONE_STRETCH": shape.seqlen_k <= stretch_keys(tile_width(shape.head_dim_v)),
        "CONSUMER_REGS": REGISTERS[consumers][0],
        "PRODUCER_REGS": REGISTERS[consumers][1],
    }


def _leading(
    q: Any, k: Any, turned: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS
) -> tuple[Any, ...]:
    """Return the leading arguments: the values come as `TurnedLaunch` has them written."""
    scales = extras.scale_q, extras.scale_k, extras.scale_v
    strides = (stride for tensor in scales for stride in broadcast_strides(tensor, 2))
    return q, k, turned, out, lse, tile_counter(q.device), scale * LOG2_E, *scales, *strides


def _trailing(fixed: tuple[Any, ...], *tensors: Any) -> tuple[Any, ...]:
    del tensors
    return fixed
