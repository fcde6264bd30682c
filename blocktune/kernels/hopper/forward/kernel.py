"""Attention forward for Hopper (compute capability 9.0) in Gluon: warp-specialised, asynchronous, persistent.

The device functions and what makes them fast are in kernels/hopper/forward/consumer.py. This kernel takes 16-bit types,
any lengths, heads from 24 to 256 elements, both causal masks, windows, a soft cap, ALiBi, boolean and additive masks,
dropout, packed sequences, caches and their pages, in any memory that the copy engine can address, and leaves everything
else to the portable kernels.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

from blocktune.kernels.base.direct_launch import Describe
from blocktune.kernels.base.feature_arguments import CACHE_FEATURES, DENSE_FEATURES, few_queries_problem
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec, Launch, SoftmaxCost
from blocktune.kernels.base.launch import ExtrasLaunch, TritonLaunch
from blocktune.kernels.base.loops import ForwardLoops
from blocktune.kernels.base.on_chip import ChipTile, OnChip, shared_tile
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import DescriptorArgument, TensorArgument, specialize
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.hopper.biases.arguments import alibi_code, mask_code
from blocktune.kernels.hopper.common.consumer_tiles import consumer_tiles, leaving_tile
from blocktune.kernels.hopper.common.descriptors import describe, describe_packed, inseparable, undescribable
from blocktune.kernels.hopper.common.persistent_blocks import multiprocessors
from blocktune.kernels.hopper.forward.arguments import Options
from blocktune.kernels.hopper.forward.defaults import default_values, waits_for_mask
from blocktune.kernels.hopper.forward.device_kernel import flash_fwd_hopper_kernel
from blocktune.kernels.hopper.forward.launch import (
    NO_CACHE,
    MaskedLaunch,
    example_biases,
    leading,
    leading_with_extras,
    mask_spec,
)
from blocktune.kernels.hopper.forward.layout import (
    ALIGNED_ELEMENTS,
    BARRIER_BYTES,
    MIN_HEAD_DIM,
    MIN_PAGE,
    NARROW_HEADS,
    PAGING_REGISTERS,
    PANEL,
    PANEL_SLOTS,
    REGISTERS,
    ROWS,
    WARPS,
    WIDTHS,
    blocks_of,
    draws_lines,
    has_one_ring,
    leaves_in_panels,
    line_bytes,
    mask_constants,
    memory_bytes,
    panels_of,
    queries_problem,
    ring_problem,
    shares_memory,
    sizes_of,
    spill_reason,
    tile_width,
)
from blocktune.kernels.hopper.forward.lines import LINE_COLUMNS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape


class FlashForwardHopper(AttentionKernel):
    """The warp-specialised forward kernel of Hopper. block_m counts the rows of all consumers."""

    name = "flash_fwd_hopper"
    loops = ForwardLoops(lays_out_masks=True)  # counted as if a window hid no keys
    ladder_steps: ClassVar[tuple[str, ...]] = ("hopper",)
    features = DENSE_FEATURES | CACHE_FEATURES
    most_barrier_bytes = BARRIER_BYTES
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (128, 192, 256),
        "block_n": (64, 128),
        "num_warps": (4,),
        "num_stages": (2, 3, 4, 5),
        "split_release": (0, 1, 2),
        "early_p": (0, 1),
        "keep_p": (0, 1),
        "q_registers": (0, 64, 128, 192),
        "output_panels": (0, 1),
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
        page = shape.features.page_size
        if page and page < MIN_PAGE:
            return f"`page_size >= {MIN_PAGE}` must hold for {self.name}, but got page_size={page}"
        return few_queries_problem(self.name, shape)

    def steps_back(self, shape: AttentionShape) -> bool:
        """Return whether the portable kernels are faster, or nothing is known: with head_dim 24 they took 18 to 42 %
        more time on an H200, with 32 they take less. Of calls with a mask the small ones wait for the kernel that packs
        it."""
        if mask_code(shape):
            return waits_for_mask(shape)
        widest = max(shape.head_dim, shape.head_dim_v)
        return widest == NARROW_HEADS or (widest < NARROW_HEADS and bool(shape.features))

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        problems = super().rule_violations(config, shape, limits)
        return problems or tuple(problem for problem in self._own_problems(config, shape) if problem)

    def _own_problems(self, config: KernelConfig, shape: AttentionShape) -> Iterator[str | None]:
        """Give what is wrong with the queries in registers, with the slots, and with panels of the output."""
        yield queries_problem(config, shape)
        yield ring_problem(config, shape)
        width_v = tile_width(shape.head_dim_v)
        if leaves_in_panels(config) and (panels_of(width_v) > 1 or width_v <= PANEL_SLOTS * PANEL):
            yield f"`output_panels` must be 0 at head_dim_v {width_v}, which is no more or no power of two."

    def slow_reason(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        del limits
        return spill_reason(config, shape)

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of all tiles; barriers take another half KiB."""
        return memory_bytes(config, shape) + line_bytes(config) * draws_lines(config, shape)

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        """Return the first config of a search, and what a call gets where nothing is known (`defaults.py`)."""
        block_m, block_n, *own = default_values(shape)
        names = FlashForwardHopper.parameters
        values = (block_m, block_n, WARPS, *own, *[0] * (len(names) - 3 - len(own)))
        return KernelConfig.of(self.name, dict(zip(names, values, strict=True)))

    def total_warps(self, config: KernelConfig) -> int:
        return WARPS * (config.block_m // ROWS) + WARPS

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        return SoftmaxCost(
            rescales=False,
            products_overlap=True,
            copying_warps=WARPS,
            persistent=True,
            stages_per_tile=2 if has_one_ring(config) else 1,
        )

    def own_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
        """Return the tiles: the output leaves through shared memory of its own, whole or by panels, or where there is
        no room, through that of Q."""
        widths = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
        columns = PANEL_SLOTS * PANEL if leaves_in_panels(config) else widths[1]
        own = None if shares_memory(config, shape) else leaving_tile(config.block_m, columns, shape.element_bytes)
        return consumer_tiles(config, widths, shape.element_bytes, own, one_ring=has_one_ring(config))

    def further_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[ChipTile, ...]:
        """Return the places of a block's keys, if ALiBi is a product."""
        if not draws_lines(config, shape):
            return ()
        return (shared_tile("Places of keys", config.block_n, LINE_COLUMNS.value, shape.element_bytes),)

    def layout_problem(self, q: Any, k: Any, v: Any) -> str | None:
        return undescribable(self.name, query=q, key=k, value=v) or super().layout_problem(q, k, v)

    def cache_problem(self, k: Any, v: Any) -> str | None:
        return inseparable(self.name, key=k, value=v)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_fwd_hopper_kernel)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        return specialize(flash_fwd_hopper_kernel, self.example_arguments(config, shape), {"num_warps": WARPS})

    def example_arguments(self, config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
        """Return arguments of the attention for contiguous tensors, without a log-sum-exp."""
        features, integers = shape.features, TensorArgument("int32")
        blocks = (
            DescriptorArgument(shape.dtype, (*[1] * (3 if in_line else 2), *block), swizzled=True)
            for block, in_line in zip(blocks_of(config, shape), _rows_in_line(features), strict=True)
        )
        arguments: dict[str, Any] = dict(zip(("q_desc", "k_desc", "v_desc", "o_desc"), blocks, strict=True))
        arguments |= {"lse": None, "counter": integers, "cu_q": integers if features.varlen else None}
        arguments |= {"cu_k": integers if features.varlen and not features.cached else None}
        arguments |= dict.fromkeys(("lengths", "k_rows", "v_rows", "table", "table_line"))
        if features.cached:
            arguments |= {"lengths": integers, "k_rows": 1, "v_rows": 1}
        if features.page_size:
            arguments |= {"table": integers, "table_line": 1}
        arguments |= {"sinks": None, "scale_log2": 1.0, "bend": 1.0, "lse_rows": shape.seqlen_q}
        arguments |= example_biases(shape)
        return arguments | sizes_of(config, shape) | {"OPTIONS": options_of(config, shape)}

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        return (mask_spec(shape),) if mask_code(shape) else ()

    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        return self._bind(config, shape, takes_extras=bool(shape.features))

    def bind_with_sinks(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        return self._bind(config, shape, takes_extras=True)

    def _bind(self, config: KernelConfig, shape: AttentionShape, *, takes_extras: bool) -> Launch:
        tiles = -(-shape.seqlen_q // config.block_m) * shape.batch * shape.num_heads
        fixed = (*sizes_of(config, shape).values(), options_of(config, shape))
        grid, options = (min(multiprocessors(), tiles), 1, 1), {"num_warps": WARPS}
        described = self.descriptions(config, shape)
        if mask_code(shape):
            return MaskedLaunch(shape, grid, fixed, options, described)
        return (ExtrasLaunch if takes_extras else TritonLaunch)(
            flash_fwd_hopper_kernel,
            grid,
            partial(leading_with_extras, shape) if takes_extras else leading,
            partial(_fixed, fixed) if takes_extras else partial(trailing, (*NO_CACHE, *fixed)),
            options,
            described,
        )

    def descriptions(self, config: KernelConfig, shape: AttentionShape) -> tuple[tuple[int, Describe], ...]:
        """Return what makes the descriptors of q, k, v and the output, with their places among the arguments."""
        blocks = zip(blocks_of(config, shape), _rows_in_line(shape.features), strict=True)
        return tuple(
            (slot, partial(_describe_packed if in_line else describe_rows, *block))
            for slot, (block, in_line) in enumerate(blocks)
        )


def options_of(config: KernelConfig, shape: AttentionShape) -> Options:
    """Return the constants of a config."""
    consumers, own = config.block_m // ROWS, config.parameters
    consumer_regs, producer_regs = REGISTERS[consumers]
    width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
    return Options(
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        CONSUMERS=consumers,
        QK_PANELS=panels_of(width),
        V_PANELS=panels_of(width_v),
        V_WIDTH=width_v // panels_of(width_v),
        PAGE_SIZE=shape.features.page_size,
        **mask_constants(config.block_n, shape),
        SOFTCAP=shape.features.softcap,
        ALIBI=alibi_code(shape),
        MASK=mask_code(shape),
        DROPOUT=shape.features.dropout,
        LINES=draws_lines(config, shape),
        SPLIT_RELEASE=own["split_release"] == 1,
        ONE_RING=has_one_ring(config),
        EARLY_P=bool(own["early_p"]),
        KEEP_P=bool(own["keep_p"]),
        Q_REGISTERS=own["q_registers"],
        FREE_Q=own["q_registers"] >= width and not shares_memory(config, shape),
        SHARE_O=shares_memory(config, shape),
        O_SLOTS=PANEL_SLOTS * leaves_in_panels(config),
        CONSUMER_REGS=consumer_regs,
        PRODUCER_REGS=max(producer_regs, PAGING_REGISTERS * (shape.features.page_size > 0)),
    )


def _rows_in_line(features: Features) -> tuple[bool, ...]:
    """Return which of q, k, v and the output have the descriptor of rows in a line, whatever they belong to."""
    keys = features.varlen or features.cached
    return features.varlen, keys, keys, features.varlen


def describe_rows(rows: int, columns: int, tensor: Any) -> Any:
    return describe(tensor, rows, columns)


def _describe_packed(rows: int, columns: int, tensor: Any) -> Any:
    return describe_packed(tensor, rows, columns)


def _fixed(fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    del q, k, v, out
    return fixed


def trailing(fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    return q.shape[2], *fixed
