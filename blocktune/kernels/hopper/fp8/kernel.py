"""Attention forward of float8_e4m3fn for Hopper (compute capability 9.0) in Gluon, with bfloat16 output.

8-bit wgmma takes only transposed values. Where few queries read a key, two warps of the attention transpose them
(kernels/hopper/fp8/turn_values.py). Where many do, a kernel before it does so once
(kernels/hopper/fp8/transpose_values.py). Query, key and value may have scales. Any lengths, both causal masks, grouped
heads, heads from 48 to 256 elements that 16 divides; no windows, soft caps or packed sequences.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

from blocktune.kernels.base.feature_arguments import broadcast_strides
from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, LOG2_E, heads_per_group
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec, SoftmaxCost
from blocktune.kernels.base.launch import ExtrasLaunch
from blocktune.kernels.base.loops import ForwardLoops
from blocktune.kernels.base.on_chip import OnChip, shared_tile
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import DescriptorArgument, TensorArgument, specialize
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.hopper.common.consumer_tiles import consumer_tiles, leaving_tile
from blocktune.kernels.hopper.common.descriptors import undescribable
from blocktune.kernels.hopper.common.persistent_blocks import multiprocessors, tile_counter
from blocktune.kernels.hopper.forward.kernel import describe_rows
from blocktune.kernels.hopper.forward.layout import BARRIER_BYTES, REGISTERS, ROWS, WARPS
from blocktune.kernels.hopper.fp8.arguments import Options
from blocktune.kernels.hopper.fp8.defaults import WIDTHS, default_values, tile_width
from blocktune.kernels.hopper.fp8.device_kernel import SCALES, SIZES, STRIDES, flash_fwd_fp8_kernel
from blocktune.kernels.hopper.fp8.launch import TurnedLaunch
from blocktune.kernels.hopper.fp8.row_sums import SHARES_COLUMNS
from blocktune.kernels.hopper.fp8.sums import STRETCH_KEYS, has_float32_sums
from blocktune.kernels.hopper.fp8.transpose_values import TURNING, transpose_values_kernel, turned_sizes
from blocktune.kernels.hopper.fp8.turn_values import UNIT_DIMS, UNIT_KEYS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import AttentionShape, Causal

MIN_HEAD_DIM = 48
ALIGNED_ELEMENTS = 16
"""Of a head: the copy engine's rows begin at multiples of 16 bytes."""


class FlashForwardFp8(AttentionKernel):
    """The warp-specialised forward of 8-bit tensors on Hopper. block_m counts the rows of all consumers."""

    name = "flash_fwd_fp8"
    loops = ForwardLoops(transposes="v", unless="turn_values")
    dtypes = frozenset(("float8_e4m3fn",))
    most_barrier_bytes = BARRIER_BYTES
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
            problems += (f"`block_m` must be {2 * ROWS} for head_dim_v {WIDTHS[-1]}, but got {config.block_m}.",)
        return problems

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of Q and the 16-bit output of all consumers, the slots of K and V, and the shares of sums;
        barriers take another half KiB."""
        width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
        of_sum = 4 if has_float32_sums(config.block_m // ROWS, width_v) else 2
        slots = config.num_stages * config.block_n * (width + width_v)
        shares: int = SHARES_COLUMNS.value * config.block_n
        return config.block_m * (width + of_sum * width_v) + slots + shares

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        """Return the fastest of what was measured on a Hopper GPU, without spills in a loop."""
        values = dict(zip(self.parameters, default_values(shape), strict=True))
        return KernelConfig.of(self.name, values)

    def total_warps(self, config: KernelConfig) -> int:
        return WARPS * (config.block_m // ROWS) + WARPS

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        return SoftmaxCost(rescales=False, products_overlap=True, copying_warps=WARPS, persistent=True)

    def layout_problem(self, q: Any, k: Any, v: Any) -> str | None:
        return undescribable(self.name, query=q, key=k, value=v) or super().layout_problem(q, k, v)

    def own_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
        """Return the tiles: the output leaves with 16 bits, through shared memory of its own or where the float32 sums
        of more than two warpgroups are."""
        widths = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
        element_bytes = FLOAT32_BYTES if has_float32_sums(config.block_m // ROWS, widths[1]) else shape.out_bytes
        out = leaving_tile(config.block_m, widths[1], element_bytes)
        known = consumer_tiles(config, widths, shape.element_bytes, out, transposed_values=True)
        shares = shared_tile("Shares of sums", SHARES_COLUMNS.value, config.block_n, shape.element_bytes)
        return replace(known, tiles=(*known.tiles, shares))

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
        return specialize(flash_fwd_fp8_kernel, arguments | _rest(config, shape), _options(config))

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
            _options(config),
            tuple((slot, partial(describe_rows, *block)) for slot, block in enumerate(_blocks(config, shape))),
        )
        return attend if turns_values(config) else TurnedLaunch(attend=attend, sizes=turned_sizes(shape))


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


def _options(config: KernelConfig) -> dict[str, int]:
    """Return the options of a launch: after a pass over the values it may begin while the last of it runs."""
    return {"num_warps": WARPS} if turns_values(config) else {"num_warps": WARPS, "launch_pdl": 1}


def _rest(config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
    """Return the sizes and constants of a launch."""
    heads, right = shape.batch * shape.num_heads, shape.causal_offset
    values = (shape.seqlen_q, shape.seqlen_k, shape.num_heads, shape.group_size, heads, heads_per_group(shape), right)
    return dict(zip(SIZES, values, strict=True)) | {"OPTIONS": _constants(config, shape)}


def _constants(config: KernelConfig, shape: AttentionShape) -> Options:
    """Return the constants of a config. A row that sees its last key at most needs no check of the end of the keys, and
    one block is masked alone if the diagonal meets the edge of one."""
    right, causal, consumers = shape.causal_offset, shape.causal is not Causal.NONE, config.block_m // ROWS
    inside = causal and right <= shape.seqlen_k - shape.seqlen_q
    consumer_regs, producer_regs = REGISTERS[consumers]
    return Options(
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        CONSUMERS=consumers,
        RAGGED=shape.seqlen_k % config.block_n != 0 and not inside,
        RIGHT=causal,
        ALIGNED=not causal or (right >= 0 and right % config.block_n == 0),
        Q_REGISTERS=bool(config.parameters["q_registers"]),
        TURNS=turns_values(config),
        ONE_STRETCH=shape.seqlen_k <= STRETCH_KEYS,
        CONSUMER_REGS=consumer_regs,
        PRODUCER_REGS=producer_regs,
    )


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
