"""The Hopper forward of kernels/hopper/forward/kernel.py for short sequences: tiles meet without a gap.

The device functions, what makes them fast and why nothing hangs are in kernels/hopper/forward/short/warps.py. With few
keys a tile has few steps, and what happens between two tiles counts. Windows, soft caps, packed sequences and tiles of
three panels are left to the other kernel.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.base.feature_arguments import sinks_of
from blocktune.kernels.base.flash_kernel import LOG2_E
from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.base.launch import ExtrasLaunch, TritonLaunch
from blocktune.kernels.base.loops import ForwardLoops
from blocktune.kernels.base.on_chip import OnChip
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import DescriptorArgument, TensorArgument, specialize
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.hopper.common.consumer_tiles import consumer_tiles, leaving_tile
from blocktune.kernels.hopper.common.persistent_blocks import multiprocessors, tile_counter
from blocktune.kernels.hopper.common.slots import new_barriers, new_tile_numbers, new_tile_ring
from blocktune.kernels.hopper.forward.arguments import Memory, Scaling, ShortOptions, Sizes, Tensors
from blocktune.kernels.hopper.forward.defaults import (
    TWO_WITH_QUERIES,
    columns_in_registers,
    default_values,
    reads_slowly,
    three_are_ahead,
)
from blocktune.kernels.hopper.forward.device_kernel import SIZES, open_slots, tiles
from blocktune.kernels.hopper.forward.kernel import FlashForwardHopper, describe_rows, trailing
from blocktune.kernels.hopper.forward.layout import (
    BARRIER_BYTES,
    PANEL,
    REGISTERS,
    ROWS,
    SHARED_BYTES,
    WARPS,
    WIDTHS,
    mask_constants,
    panels_of,
    sizes_of,
    tile_width,
)
from blocktune.kernels.hopper.forward.short.warps import consumer, producer
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import AttentionShape

MOST_KEYS = {64: 2048, 128: 1024, 256: 1024}
"""By the columns of a tile. With more, steps count and not what is between tiles: on an H200 this kernel then takes as
much time as the other one, or up to 3 % more."""


@gluon.jit(do_not_specialize=["lse_rows", *SIZES[:-1]])
def flash_fwd_hopper_short_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, sinks, counter, scale_log2, lse_rows,
    seqlen_q, seqlen_k, num_heads, group_size, batch_heads, head_group, right, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Compute attention as `flash_fwd_hopper_kernel` does, of a `ShortOptions`.

    Descriptors of q, k, v and the output have blocks of 64 rows (q, output) or BLOCK_N (k, v) and a head's columns (q,
    k, v) or a panel's (output).
    """
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    STAGES: gl.constexpr = OPTIONS.STAGES
    dtype: gl.constexpr = q_desc.dtype
    QK_W: gl.constexpr = q_desc.block_type.shape[3]
    V_W: gl.constexpr = v_desc.block_type.shape[3]
    O_W: gl.constexpr = o_desc.block_type.shape[3]
    QK_L: gl.constexpr = gl.NVMMASharedLayout(q_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2)
    V_L: gl.constexpr = gl.NVMMASharedLayout(v_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2)
    O_L: gl.constexpr = gl.NVMMASharedLayout(o_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2)
    # [CONSUMERS, 64, head_dim]
    q_smem = tiles(dtype, CONSUMERS, 64, QK_W, 1, QK_L)
    # [STAGES, BLOCK_N, head_dim]
    k_smem = tiles(dtype, STAGES, OPTIONS.BLOCK_N, QK_W, 1, QK_L)
    v_smem = tiles(dtype, STAGES, OPTIONS.BLOCK_N, V_W, 1, V_L)
    memory = Memory(
        q=q_smem,
        k=k_smem,
        v=v_smem,
        o=gl.allocate_shared_memory(dtype, [CONSUMERS * OPTIONS.O_SLOTS, 64, O_W], O_L),
        q_full=new_barriers(CONSUMERS),
        q_empty=new_barriers(CONSUMERS),
        full=new_barriers(STAGES),
        k_empty=new_barriers(STAGES),
        v_empty=new_barriers(STAGES),
        ring=new_tile_ring(new_tile_numbers()),
    )
    open_slots(memory, CONSUMERS, STAGES)
    tensors = Tensors(q_desc, k_desc, v_desc, o_desc, lse, counter, None, None, sinks)
    scaling = Scaling(scale_log2)
    sizes = Sizes(seqlen_q, seqlen_k, num_heads, group_size, batch_heads, head_group, right, 0, lse_rows)
    CONSUMER_REGS: gl.constexpr = OPTIONS.CONSUMER_REGS
    PRODUCER_REGS: gl.constexpr = OPTIONS.PRODUCER_REGS
    gl.static_assert(CONSUMERS >= 2 and CONSUMERS <= 4)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (tensors, memory, scaling, sizes, 0, OPTIONS)),
            (consumer, (tensors, memory, scaling, sizes, 1, OPTIONS)),
            (producer, (tensors, memory, sizes, OPTIONS)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize([
            (consumer, (tensors, memory, scaling, sizes, 0, OPTIONS)),
            (consumer, (tensors, memory, scaling, sizes, 1, OPTIONS)),
            (consumer, (tensors, memory, scaling, sizes, 2, OPTIONS)),
            (producer, (tensors, memory, sizes, OPTIONS)),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (tensors, memory, scaling, sizes, 0, OPTIONS)),
            (consumer, (tensors, memory, scaling, sizes, 1, OPTIONS)),
            (consumer, (tensors, memory, scaling, sizes, 2, OPTIONS)),
            (consumer, (tensors, memory, scaling, sizes, 3, OPTIONS)),
            (producer, (tensors, memory, sizes, OPTIONS)),
        ], [4, 4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip


class FlashForwardHopperShort(FlashForwardHopper):
    """The forward kernel of Hopper for few keys. Launches are those of `FlashForwardHopper`, and its parameters but
    for queries in registers, panels of the output, which it has always, and slots of one tile."""

    name = "flash_fwd_hopper_short"
    features: ClassVar[frozenset[str]] = frozenset()
    loops = ForwardLoops()
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        name: choices
        for name, choices in FlashForwardHopper.parameters.items()
        if name not in ("q_registers", "output_panels")
    } | {"num_stages": (2, 3, 4), "split_release": (0, 1)}

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if (told := super().shape_problem(shape, limits)) is not None:
            return told
        for name, dim in (("head_dim", shape.head_dim), ("head_dim_v", shape.head_dim_v)):
            if panels_of(tile_width(dim)) > 1:
                return (
                    f"{self.name} has tiles of head_dim 64, 128 or 256, but {name}={dim} takes {tile_width(dim)}: "
                    f"{FlashForwardHopper.name} has those"
                )
        widths = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
        if min(widths) == WIDTHS[-1]:
            return (
                f"{self.name} leaves head_dim {min(widths)} to {FlashForwardHopper.name}, which has slots of one tile"
            )
        width = max(widths)
        if shape.seqlen_k > MOST_KEYS[width]:
            return (
                f"`seqlen_k <= {MOST_KEYS[width]}` must hold for {self.name} at head_dim {width}, but got "
                f"seqlen_k={shape.seqlen_k}: with more keys {FlashForwardHopper.name} is as fast, or faster"
            )
        return None

    def steps_back(self, shape: AttentionShape) -> bool:
        """Return whether the other kernel is faster, by 2 to 10 % on an H200: with queries in registers, and where rows
        are read slowly."""
        has_queries = default_values(shape) == TWO_WITH_QUERIES or columns_in_registers(shape) > 0
        return has_queries or reads_slowly(shape) or super().steps_back(shape)

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of Q of all consumers, the slots of K and V, and the panels of the output; barriers take
        another half KiB."""
        return _loaded_bytes(config, shape) + output_panels(config, shape) * _panel_bytes(config, shape)

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        """Return what was best on an H200 at head_dim 64 and 128, or within 1 % of it."""
        found = dict(super().default_config(shape, limits).parameters)
        found = {name: value for name, value in found.items() if name in self.parameters}
        if {tile_width(shape.head_dim), tile_width(shape.head_dim_v)} == {128} and not three_are_ahead(shape):
            found |= {"block_m": 128, "block_n": 64, "num_stages": 4, "split_release": 0, "early_p": 0, "keep_p": 0}
        return KernelConfig.of(self.name, found)

    def own_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
        """Return the tiles: the output leaves through as many panels as there is room for."""
        widths = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
        panels = leaving_tile(config.block_m, PANEL * output_panels(config, shape), shape.element_bytes)
        return consumer_tiles(config, widths, shape.element_bytes, panels)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_fwd_hopper_short_kernel)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        blocks = (DescriptorArgument(shape.dtype, (1, 1, *block), swizzled=True) for block in _blocks(config, shape))
        arguments: dict[str, Any] = dict(zip(("q_desc", "k_desc", "v_desc", "o_desc"), blocks, strict=True))
        arguments |= {"lse": None, "sinks": None, "counter": TensorArgument("int32"), "scale_log2": 1.0}
        arguments |= {"lse_rows": shape.seqlen_q}
        arguments |= _sizes(config, shape) | {"OPTIONS": _options(config, shape)}
        return specialize(flash_fwd_hopper_short_kernel, arguments, {"num_warps": WARPS})

    def _bind(self, config: KernelConfig, shape: AttentionShape, *, takes_extras: bool) -> TritonLaunch:
        count = -(-shape.seqlen_q // config.block_m) * shape.batch * shape.num_heads
        fixed = (*_sizes(config, shape).values(), _options(config, shape))
        return (ExtrasLaunch if takes_extras else TritonLaunch)(
            flash_fwd_hopper_short_kernel,
            (min(multiprocessors(), count), 1, 1),
            _leading,
            partial(trailing, fixed),
            {"num_warps": WARPS},
            tuple((slot, partial(describe_rows, *block)) for slot, block in enumerate(_blocks(config, shape))),
        )


def output_panels(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the panels of memory that a consumer has for its output on its way out: all that it has, or as many as
    there is room for and divide these, which take turns."""
    room = SHARED_BYTES - BARRIER_BYTES - _loaded_bytes(config, shape)
    count = tile_width(shape.head_dim_v) // PANEL
    panel_bytes = _panel_bytes(config, shape)
    return max((n for n in range(1, count + 1) if count % n == 0 and n * panel_bytes <= room), default=1)


def joins_tiles(config: KernelConfig, shape: AttentionShape) -> bool:
    """Return whether the scores of a tile's first block are computed together with the last product of the tile before,
    as in any step. Both need their slot at once: no warpgroup may skip blocks in between. Three and four consumers fill
    the gap for each other, and have no registers for it."""
    masks = mask_constants(config.block_n, shape)
    skips = masks["RIGHT"] and not (masks["ALIGNED"] and config.block_m == config.block_n)
    return config.block_m == 2 * ROWS and not skips


def _loaded_bytes(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the bytes of Q of all consumers and of the slots of K and V."""
    row, row_v = (shape.element_bytes * tile_width(dim) for dim in (shape.head_dim, shape.head_dim_v))
    return config.block_m * row + config.num_stages * config.block_n * (row + row_v)


def _panel_bytes(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the bytes of a panel of the output of all consumers."""
    return config.block_m * PANEL * shape.element_bytes


def _blocks(config: KernelConfig, shape: AttentionShape) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) that a copy of q, k, v and the output moves."""
    width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
    return (ROWS, width), (config.block_n, width), (config.block_n, width_v), (ROWS, PANEL)


def _sizes(config: KernelConfig, shape: AttentionShape) -> dict[str, int]:
    """Return the sizes of the other kernel, without a left bound."""
    return {name: size for name, size in sizes_of(config, shape).items() if name != "left"}


def _options(config: KernelConfig, shape: AttentionShape) -> ShortOptions:
    consumers, own, masks = config.block_m // ROWS, config.parameters, mask_constants(config.block_n, shape)
    consumer_regs, producer_regs = REGISTERS[consumers]
    return ShortOptions(
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        CONSUMERS=consumers,
        **{name: masks[name] for name in ("RAGGED", "RIGHT", "ALIGNED")},
        SPLIT_RELEASE=bool(own["split_release"]),
        EARLY_P=bool(own["early_p"]),
        KEEP_P=bool(own["keep_p"]),
        O_SLOTS=output_panels(config, shape),
        JOINED=joins_tiles(config, shape),
        CONSUMER_REGS=consumer_regs,
        PRODUCER_REGS=producer_regs,
    )


def _leading(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> tuple[Any, ...]:
    return q, k, v, out, lse, sinks_of(extras), tile_counter(q.device), scale * LOG2_E
