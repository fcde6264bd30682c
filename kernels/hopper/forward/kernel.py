"""Attention forward for Hopper (compute capability 9.0) in Gluon: warp-specialised, asynchronous, persistent.

The device functions and what makes them fast are in kernels/hopper/forward/warps.py. This kernel takes 16-bit types,
any lengths, heads from 40 to 256 elements, both causal masks, windows, a soft cap and packed sequences, in any memory
that the copy engine can address, and leaves everything else to the portable kernels.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocktune.kernels.base.feature_arguments import check_extras
from blocktune.kernels.base.flash_kernel import LOG2_E, heads_per_group
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec, SoftmaxCost
from blocktune.kernels.base.launch import ExtrasLaunch, TritonLaunch
from blocktune.kernels.base.loops import ForwardLoops
from blocktune.kernels.base.on_chip import OnChip
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import DescriptorArgument, TensorArgument, specialize
from blocktune.kernels.hardware.limits import MULTIPROCESSORS, ComputeLimits
from blocktune.kernels.hopper.common.consumer_tiles import consumer_tiles, leaving_tile
from blocktune.kernels.hopper.common.descriptors import describe, describe_packed, undescribable
from blocktune.kernels.hopper.common.persistent_blocks import multiprocessors, tile_counter
from blocktune.kernels.hopper.common.slots import new_barriers, new_tile_numbers, new_tile_ring, open_slot
from blocktune.kernels.hopper.forward.arguments import Memory, Options, Sizes
from blocktune.kernels.hopper.forward.warps import consumer, producer
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import UNLIMITED, Features
from blocktune.kernels.values.shape import AttentionShape, Causal

ROWS = 64
"""Query rows of a consumer warpgroup: one wgmma."""
WARPS = 4
"""Of a consumer; also what the producer takes: one warp that copies, and three idle ones up to a whole warpgroup."""
WIDTHS = (64, 96, 128, 192, 256)
"""Head dimensions that tiles have; those between are filled up with zeros by the copy engine."""
MIN_HEAD_DIM = 40
"""Below, half of a tile or more would be zeros."""
ALIGNED_ELEMENTS = 8
"""Of a head: the copy engine's rows begin at multiples of 16 bytes."""
REGISTERS = {2: (240, 24), 3: (160, 32), 4: (112, 32)}
"""Registers a thread of the consumers and of the producer, by the number of consumers: they share 65,536."""
SHARED_BYTES = 227 << 10
"""What a block of compute capability 9.0 can have."""
BARRIER_BYTES = 1 << 10
"""More than the barriers and the ring of tiles take."""
SIZES = ("seqlen_q", "seqlen_k", "num_heads", "group_size", "batch_heads", "head_group", "right", "left")


@gluon.jit
def tiles(
    dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, PANELS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Shared memory as kernels/hopper/forward/steps.py has it."""
    if PANELS == 1:
        return (gl.allocate_shared_memory(dtype, [COUNT, ROWS, W], LAYOUT),)
    else:
        first = gl.allocate_shared_memory(dtype, [COUNT, ROWS, 2 * W], LAYOUT)
        return first, gl.allocate_shared_memory(dtype, [COUNT, ROWS, W], LAYOUT)


@gluon.jit(do_not_specialize=["lse_rows", *SIZES])
def flash_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, counter, cu_q, cu_k, scale_log2, bend, lse_rows,
    seqlen_q, seqlen_k, num_heads, group_size, batch_heads, head_group, right, left,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, QK_PANELS: gl.constexpr,
    V_PANELS: gl.constexpr, RAGGED: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr, LOWER_RIGHT: gl.constexpr,
    ALIGNED: gl.constexpr, SOFTCAP: gl.constexpr, SPLIT_RELEASE: gl.constexpr, EARLY_P: gl.constexpr,
    KEEP_P: gl.constexpr, SHARE_O: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Descriptors of q, k, v and the output with blocks of 64 (q, output) or BLOCK_N rows (k, v) and a panel's columns;
    lse [batch, num_heads, lse_rows] or None; counter: two int32 zeros, and zeros again at the end. scale_log2: the
    softmax scale times log2(e).

    Query i sees the keys i + left .. i + right (LEFT, RIGHT: where there are such bounds) that there are (RAGGED: the
    last block may reach beyond them). ALIGNED: in the one block that has to be masked every row sees a key. SOFTCAP:
    scores are tanh(bend * q k^T / (2 log2(e))), and scale_log2 is the cap times log2(e).

    With cu_q and cu_k int32 [batch + 1] the sequences are packed: [1, heads, tokens, head_dim], lse [num_heads,
    lse_rows], seqlen_q is the longest, and the bounds are of each sequence (LOWER_RIGHT: plus its seqlen_k - seqlen_q).
    """
    dtype: gl.constexpr = q_desc.dtype
    RANK: gl.constexpr = len(q_desc.block_type.shape)
    QK_W: gl.constexpr = q_desc.block_type.shape[RANK - 1]
    V_W: gl.constexpr = v_desc.block_type.shape[RANK - 1]
    QK_L: gl.constexpr = gl.NVMMASharedLayout(q_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2)
    V_L: gl.constexpr = gl.NVMMASharedLayout(v_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2)
    # [CONSUMERS, 64, head_dim]
    q_smem = tiles(dtype, CONSUMERS, 64, QK_W, QK_PANELS, QK_L)
    # [STAGES, BLOCK_N, head_dim]
    k_smem = tiles(dtype, STAGES, BLOCK_N, QK_W, QK_PANELS, QK_L)
    v_smem = tiles(dtype, STAGES, BLOCK_N, V_W, V_PANELS, V_L)
    # [CONSUMERS, 64, head_dim_v]
    if SHARE_O:  # the output leaves where Q was
        o_smem = q_smem
    else:
        o_smem = tiles(dtype, CONSUMERS, 64, V_W, V_PANELS, V_L)
    memory = Memory(
        q=q_smem,
        k=k_smem,
        v=v_smem,
        o=o_smem,
        q_full=new_barriers(CONSUMERS),
        q_empty=new_barriers(CONSUMERS),
        full=new_barriers(STAGES),
        k_empty=new_barriers(STAGES),
        v_empty=new_barriers(STAGES),
        ring=new_tile_ring(new_tile_numbers()),
    )
    for i in gl.static_range(CONSUMERS):
        open_slot(memory.q_full, memory.q_empty, i, 1)
    for i in gl.static_range(STAGES):
        open_slot(memory.full, memory.k_empty, i, CONSUMERS)
        mbarrier.init(memory.v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        open_slot(memory.ring.full, memory.ring.empty, i, CONSUMERS)
    fence_async_shared()
    sizes = Sizes(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        group_size=group_size,
        batch_heads=batch_heads,
        head_group=head_group,
        right=right,
        left=left,
    )
    OPTIONS: gl.constexpr = Options(
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
        CONSUMERS=CONSUMERS,
        QK_PANELS=QK_PANELS,
        V_PANELS=V_PANELS,
        RAGGED=RAGGED,
        RIGHT=RIGHT,
        LEFT=LEFT,
        LOWER_RIGHT=LOWER_RIGHT,
        ALIGNED=ALIGNED,
        SOFTCAP=SOFTCAP,
        SPLIT_RELEASE=SPLIT_RELEASE,
        EARLY_P=EARLY_P,
        KEEP_P=KEEP_P,
        SHARE_O=SHARE_O,
    )
    gl.static_assert(CONSUMERS >= 2 and CONSUMERS <= 4)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (o_desc, lse, memory, cu_q, cu_k, scale_log2, bend, sizes, lse_rows, 0, OPTIONS)),
            (consumer, (o_desc, lse, memory, cu_q, cu_k, scale_log2, bend, sizes, lse_rows, 1, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, memory, counter, cu_q, cu_k, sizes, OPTIONS)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize([
            (consumer, (o_desc, lse, memory, cu_q, cu_k, scale_log2, bend, sizes, lse_rows, 0, OPTIONS)),
            (consumer, (o_desc, lse, memory, cu_q, cu_k, scale_log2, bend, sizes, lse_rows, 1, OPTIONS)),
            (consumer, (o_desc, lse, memory, cu_q, cu_k, scale_log2, bend, sizes, lse_rows, 2, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, memory, counter, cu_q, cu_k, sizes, OPTIONS)),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (o_desc, lse, memory, cu_q, cu_k, scale_log2, bend, sizes, lse_rows, 0, OPTIONS)),
            (consumer, (o_desc, lse, memory, cu_q, cu_k, scale_log2, bend, sizes, lse_rows, 1, OPTIONS)),
            (consumer, (o_desc, lse, memory, cu_q, cu_k, scale_log2, bend, sizes, lse_rows, 2, OPTIONS)),
            (consumer, (o_desc, lse, memory, cu_q, cu_k, scale_log2, bend, sizes, lse_rows, 3, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, memory, counter, cu_q, cu_k, sizes, OPTIONS)),
        ], [4, 4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip


class FlashForwardHopper(AttentionKernel):
    """The warp-specialised forward kernel of Hopper. block_m counts the rows of all consumers."""

    name = "flash_fwd_hopper"
    loops = ForwardLoops()  # counted as if a window hid no keys
    ladder_steps = ("hopper",)
    features = frozenset(("window", "softcap", "varlen"))
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (128, 192, 256),
        "block_n": (64, 128),
        "num_warps": (4,),
        "num_stages": (2, 3, 4),
        "split_release": (0, 1),
        "early_p": (0, 1),
        "keep_p": (0, 1),
    }

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if limits.cc != (9, 0):
            return f"{self.name} is made of wgmma (compute capability 9.0 alone), but got {limits.name}"
        if shape.element_bytes != 2:
            return f"{self.name} computes float16 and bfloat16, but got {shape.dtype}"
        for name, dim in (("head_dim", shape.head_dim), ("head_dim_v", shape.head_dim_v)):
            if not MIN_HEAD_DIM <= dim <= WIDTHS[-1] or dim % ALIGNED_ELEMENTS:
                return (
                    f"`{MIN_HEAD_DIM} <= {name} <= {WIDTHS[-1]}`, a multiple of {ALIGNED_ELEMENTS}, must hold for "
                    f"{self.name}, but got {name}={dim}"
                )
        return None

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of Q and the output of all consumers (`shares_memory`) and the slots of K and V; barriers
        take another half KiB."""
        q_bytes, o_bytes, slot_bytes = _tile_bytes(config, shape)
        tile_bytes = max(q_bytes, o_bytes) if shares_memory(config, shape) else q_bytes + o_bytes
        return tile_bytes + config.num_stages * slot_bytes

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        """Return what was best on an H200, or near it and without spills in a loop: at head_dim 64 and 128 over lengths
        from 512 to 16384, causal at 96 and 256. At others the largest tiles that compile without spills."""
        width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
        masks = mask_constants(128, shape)  # they leave no room for float32 probabilities and the next scores
        early_p = int(masks["RAGGED"] or not masks["ALIGNED"])
        if max(width, width_v) == 64 and shape.seqlen_q <= 2 * ROWS:
            values: tuple[int, ...] = (128, 128, 4, 0, 0, 1)  # larger tiles would be empty
        elif max(width, width_v) == 64 and shape.seqlen_k <= 4096:
            values = (256, 64, 3 if shape.features.window else 4, 0, 1, 0)
        elif max(width, width_v) == 64:
            values = (192, 128, 4, 0, 1, 0)
        elif width > 192 or width_v > 128:
            values = (128, 64, 2, 1, early_p, early_p)
        elif width + width_v < 256:
            values = (128, 128, 3, 0, early_p, early_p)
        elif width == 192 or shape.features.varlen:
            early_p |= width + width_v > 256
            values = (128, 128, 2, 1, early_p, early_p)
        else:
            values = _default_of_128(shape)
        block_m, block_n, *own = values
        return KernelConfig.of(self.name, dict(zip(self.parameters, (block_m, block_n, WARPS, *own), strict=True)))

    def total_warps(self, config: KernelConfig) -> int:
        return WARPS * (config.block_m // ROWS) + WARPS

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        return SoftmaxCost(rescales=False, products_overlap=True, copying_warps=WARPS, persistent=True)

    def own_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
        """Return the tiles: the output leaves through shared memory of its own, or where there is no room, through that
        of Q."""
        widths = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
        own = None if shares_memory(config, shape) else leaving_tile(config.block_m, widths[1], shape.element_bytes)
        return consumer_tiles(config, widths, shape.element_bytes, own)

    def layout_problem(self, q: Any, k: Any, v: Any) -> str | None:
        return undescribable(self.name, query=q, key=k, value=v) or super().layout_problem(q, k, v)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_fwd_hopper_kernel)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        lengths = TensorArgument("int32") if shape.features.varlen else None
        outer = (1,) * (3 if shape.features.varlen else 2)
        blocks = (DescriptorArgument(shape.dtype, (*outer, *block), swizzled=True) for block in _blocks(config, shape))
        arguments: dict[str, Any] = dict(zip(("q_desc", "k_desc", "v_desc", "o_desc"), blocks, strict=True))
        arguments |= {"lse": None, "counter": TensorArgument("int32"), "cu_q": lengths, "cu_k": lengths}
        arguments |= {"scale_log2": 1.0, "bend": 1.0, "lse_rows": shape.seqlen_q}
        arguments |= sizes_of(shape) | _constants(config, shape)
        return specialize(flash_fwd_hopper_kernel, arguments, {"num_warps": WARPS})

    def bind(self, config: KernelConfig, shape: AttentionShape) -> TritonLaunch:
        tiles = -(-shape.seqlen_q // config.block_m) * shape.batch * shape.num_heads
        make = _describe_packed if shape.features.varlen else describe_rows
        fixed = (*sizes_of(shape).values(), *_constants(config, shape).values())
        return (ExtrasLaunch if shape.features else TritonLaunch)(
            flash_fwd_hopper_kernel,
            (min(multiprocessors(), tiles), 1, 1),
            partial(_leading_with_extras, shape.features) if shape.features else _leading,
            partial(_fixed, fixed) if shape.features else partial(trailing, fixed),
            {"num_warps": WARPS},
            tuple((slot, partial(make, *block)) for slot, block in enumerate(_blocks(config, shape))),
        )


def tile_width(head_dim: int) -> int:
    """Return the columns of a tile that holds heads of this dimension."""
    return next(width for width in WIDTHS if width >= head_dim)


def _default_of_128(shape: AttentionShape) -> tuple[int, ...]:
    """Return all of `parameters` but `num_warps` where heads take 128 columns. Full attention and windows take three
    consumers 5 to 9 % less time a row, which pays where no multiprocessor has much more rows than with two."""
    (right, left), short = _bounds(shape), shape.seqlen_k <= 1024
    masked = int(not mask_constants(128, shape)["ALIGNED"])
    if right is not None and left is None:
        return (128, 64, 3, 0, 0, 0) if short else (128, 128, 2, 1, masked, masked)
    if _rows_in_turn(3 * ROWS, shape) <= 1.04 * _rows_in_turn(2 * ROWS, shape):
        return (192, 64, 4, 0, 1, 0) if masked else (192, 64, 3, 0, 0, 0)
    return (128, 128, 3, 0, 0, 0) if short and not masked else (128, 128, 2, 1, masked, masked)


def _rows_in_turn(block_m: int, shape: AttentionShape) -> int:
    """Return the rows of all tiles that the busiest multiprocessor takes."""
    tiles = -(-shape.seqlen_q // block_m) * shape.batch * shape.num_heads
    return -(-tiles // MULTIPROCESSORS) * block_m


def panels_of(width: int) -> int:
    """Return the panels of a tile: three where the width is no power of two."""
    return 3 if width % 3 == 0 else 1


def shares_memory(config: KernelConfig, shape: AttentionShape) -> bool:
    """Return whether the output leaves where Q was, because there is no room for both: then the next tile's Q waits for
    it."""
    width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
    panels, panels_v = panels_of(width), panels_of(width_v)
    place = 2 * width // 3 if panels > panels_v else width  # a whole tile needs one, not the three panels of another
    if panels_v > panels or width_v > place:
        return False
    q_bytes, o_bytes, slot_bytes = _tile_bytes(config, shape)
    return q_bytes + o_bytes + config.num_stages * slot_bytes + BARRIER_BYTES > SHARED_BYTES


def _tile_bytes(config: KernelConfig, shape: AttentionShape) -> tuple[int, int, int]:
    """Return the bytes of Q and the output of all consumers, and of a slot of K and V."""
    row, row_v = (shape.element_bytes * tile_width(dim) for dim in (shape.head_dim, shape.head_dim_v))
    return config.block_m * row, config.block_m * row_v, config.block_n * (row + row_v)


def _blocks(config: KernelConfig, shape: AttentionShape) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) that a copy of q, k, v and the output moves."""
    width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
    panel, panel_v = width // panels_of(width), width_v // panels_of(width_v)
    return (ROWS, panel), (config.block_n, panel), (config.block_n, panel_v), (ROWS, panel_v)


def _bounds(shape: AttentionShape) -> tuple[int | None, int | None]:
    """Return (right, left): query i sees the keys i + left .. i + right, None without such a bound. Of packed sequences
    each has its own diagonal, which is not in these."""
    features, diagonal = shape.features, 0 if shape.features.varlen else shape.diagonal
    window_left, window_right = features.window or (UNLIMITED, UNLIMITED)
    window_right = 0 if shape.causal is not Causal.NONE else window_right
    right = None if window_right == UNLIMITED else diagonal + window_right
    return right, None if window_left == UNLIMITED else diagonal - window_left


def sizes_of(shape: AttentionShape) -> dict[str, int]:
    heads, (right, left) = shape.batch * shape.num_heads, _bounds(shape)
    values = (shape.seqlen_q, shape.seqlen_k, shape.num_heads, shape.group_size, heads, heads_per_group(shape))
    return dict(zip(SIZES, (*values, right or 0, left or 0), strict=True))


def _constants(config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
    consumers, own = config.block_m // ROWS, config.parameters
    consumer_regs, producer_regs = REGISTERS[consumers]
    width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
    return {
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "CONSUMERS": consumers,
        "QK_PANELS": panels_of(width),
        "V_PANELS": panels_of(width_v),
        **mask_constants(config.block_n, shape),
        "SOFTCAP": shape.features.softcap,
        "SPLIT_RELEASE": bool(own["split_release"]),
        "EARLY_P": bool(own["early_p"]),
        "KEEP_P": bool(own["keep_p"]),
        "SHARE_O": shares_memory(config, shape),
        "CONSUMER_REGS": consumer_regs,
        "PRODUCER_REGS": producer_regs,
    }


def mask_constants(block_n: int, shape: AttentionShape) -> dict[str, bool]:
    """Return which masks there are. A row that sees its last key at most needs no check of the end of the keys."""
    varlen, (right, left) = shape.features.varlen, _bounds(shape)
    lower_right = varlen and shape.causal is not Causal.UPPER_LEFT and (right, left) != (None, None)
    last_seen = 0 if lower_right else shape.seqlen_k - shape.seqlen_q
    inside = right is not None and right <= last_seen and (lower_right or not varlen)
    starts_a_block = right is None or (right >= 0 and right % block_n == 0)
    return {
        "RAGGED": (varlen or shape.seqlen_k % block_n != 0) and not inside,
        "RIGHT": right is not None,
        "LEFT": left is not None,
        "LOWER_RIGHT": lower_right,
        "ALIGNED": not varlen and left is None and starts_a_block,
    }


def describe_rows(rows: int, columns: int, tensor: Any) -> Any:
    return describe(tensor, rows, columns)


def _describe_packed(rows: int, columns: int, tensor: Any) -> Any:
    return describe_packed(tensor, rows, columns)


def _leading(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> tuple[Any, ...]:
    return q, k, v, out, lse, tile_counter(q.device), None, None, scale * LOG2_E, 0.0


def _leading_with_extras(
    features: Features, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras
) -> tuple[Any, ...]:
    """Return the leading arguments with those of features.

    Raises:
        UsageError: the tensor of a feature is missing.
    """
    check_extras(features, extras)
    bend, scale = (2 * LOG2_E * scale / extras.softcap, extras.softcap) if features.softcap else (0.0, scale)
    lengths = extras.cu_seqlens_q, extras.cu_seqlens_k
    return q, k, v, out, lse, tile_counter(q.device), *lengths, scale * LOG2_E, bend, q.shape[2]  # rows of a head


def _fixed(fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    del q, k, v, out
    return fixed


def trailing(fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    return q.shape[2], *fixed
