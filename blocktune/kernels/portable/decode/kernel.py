"""Attention of a few queries over many keys: split-KV decoding (FlashDecoding), with the splits as a parameter.

One query cannot fill a GPU with query blocks, so the keys are cut into `splits` shares, each a program of its own, and
a second launch merges what they yield. Contiguous keys, a cache of which every entry is filled to its own length, a
paged cache, and trees of drafts (speculative decoding).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from blocktune.kernels.base.feature_arguments import DECODED_QUERIES
from blocktune.kernels.base.flash_kernel import (
    FLOAT32_BYTES,
    IN_ORDER,
    WARPGROUP_ROWS,
    all_strides,
    contiguous_strides,
    looked_up_bytes,
    more_pages_bytes,
    operand_widths,
    product_unit,
)
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec, SoftmaxCost
from blocktune.kernels.base.loops import DecodeLoops
from blocktune.kernels.base.on_chip import OnChip, shared_tile, softmax_tiles
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import TensorArgument, named_in_units, specialize
from blocktune.kernels.hardware.limits import MULTIPROCESSORS, WARP_SIZE, ComputeLimits
from blocktune.kernels.layouts.forward_bytes import loop_bytes, output_bytes, uncertain_bytes
from blocktune.kernels.layouts.forward_tiles import ForwardTiles
from blocktune.kernels.portable.decode.defaults import OVERLAPPING_CC, default_decode_config, visible_keys
from blocktune.kernels.portable.decode.launch import (
    EARLY,
    DecodeLaunch,
    decode_launch,
    first_sizes,
    is_paired,
    merge_arguments,
    options_of,
)
from blocktune.kernels.portable.decode.tiles import flash_decode_kernel, merge_splits_kernel
from blocktune.kernels.portable.forward.pointers import FlashForward
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import NO_FEATURES, Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal

MAX_QUERIES, MAX_TREE_QUERIES, MAX_PACKED_QUERIES = DECODED_QUERIES, 64, 256
"""Queries of one call. Up to 32 packing the heads of a group pays, or costs nothing; a tree's bits are two words a
query; 256 where the forward kernels leave most of a GPU idle (`_forward_leaves_idle`, notes/kernels/decoding.md)."""

IDLE_TILES = MULTIPROCESSORS // 2
"""Tiles of 64 queries up to which half of a large GPU has none."""
MANY_KEYS = 2048
"""In sight of a query: with fewer the merge costs what the splits save."""

MAX_PAGE = 256

_FORWARD = FlashForward()
"""Its tiles of float32 are the same, and so is what they take."""


MANY_NUMBERS = 128
"""Of the output in a thread, from which on a loop spills."""


class FlashDecode(AttentionKernel):
    """Split-KV decoding with packed query heads."""

    name = "flash_decode"
    loops = DecodeLoops()
    features: ClassVar[frozenset[str]] = frozenset({"cached", "paged", "tree", "window", "softcap", "alibi"})
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (16, 32, 64),
        "block_n": (32, 64, 128, 256),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4),
        "splits": (1, 2, 4, 8, 16, 32, 64, 128),
        "overlap": (0, 1, 2),
    }
    follows_shape: ClassVar[tuple[str, ...]] = ("block_m", "splits", "overlap")

    def steps_back(self, shape: AttentionShape) -> bool:
        """Return whether forward kernels are faster: over a cache with many queries, unless these occupy few
        multiprocessors."""
        many = shape.features.cached and shape.seqlen_q > MAX_QUERIES
        return many and not shape.features.is_short and not _forward_leaves_idle(shape)

    def slow_reason(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        """Return why a config is slow if its output fills the registers: of 489 configs of 16 bits on Hopper with
        `MANY_NUMBERS` of it in a thread the best took 22 % more than the best of its shape, and half of them three
        times as long."""
        numbers = config.block_m * operand_widths(shape)[1] // (WARP_SIZE * config.num_warps)
        if numbers < MANY_NUMBERS or limits.mma != "wgmma" or shape.element_bytes > 2:
            return None
        return f"{config.block_m} rows of output take {numbers} registers of a thread with {config.num_warps} warps"

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        """Return the broken rules, besides the range of every parameter: a merge that is launched early needs the
        hardware for it, on which alone pairs were measured, and a pair is two splits."""
        problems = super().rule_violations(config, shape, limits)
        if problems:
            return problems
        overlap, splits = config.parameters["overlap"], config.parameters["splits"]
        if overlap and limits.cc < OVERLAPPING_CC:
            return (
                f"`overlap` {overlap} of {self.name} needs programmatic dependent launch (compute capability 9.0), but "
                f"got {limits.name}. Take overlap 0.",
            )
        if is_paired(config) and splits != 2:
            return (f"`overlap` 2 of {self.name} merges two splits, but got {splits}. Take overlap 0 or 1.",)
        return ()

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        problem = self._queries_problem(shape)
        if problem is not None:
            return problem
        page = shape.features.page_size
        if page > MAX_PAGE:
            return f"`page_size <= {MAX_PAGE}` must hold for {self.name}, but got page_size={page}"
        return super().shape_problem(shape, limits)

    def _queries_problem(self, shape: AttentionShape) -> str | None:
        """Return why the shape has too many queries, or None."""
        tree, queries = shape.features.mask is MaskKind.TREE, shape.seqlen_q
        if queries <= (MAX_TREE_QUERIES if tree else MAX_QUERIES):
            return None
        if tree:
            return f"`seqlen_q <= {MAX_TREE_QUERIES}` must hold for a tree in {self.name}, but got seqlen_q={queries}"
        if shape.features.cached and shape.element_bytes == 2:  # forward kernels split no keys
            return None
        if queries <= MAX_PACKED_QUERIES and _forward_leaves_idle(shape):
            return None
        return (
            f"`seqlen_q <= {MAX_QUERIES}` must hold for {self.name}, or `seqlen_q <= {MAX_PACKED_QUERIES}`, "
            f"`batch * num_heads * ceil(seqlen_q / {WARPGROUP_ROWS}) <= {IDLE_TILES}`, `keys in sight >= {MANY_KEYS}` "
            f"and 16 bits, but got seqlen_q={queries}, {_query_tiles(shape)} tiles, {visible_keys(shape)} keys and "
            f"{shape.dtype}. Leave it to the forward kernels, or pass fewer queries at a time."
        )

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return what the loops of the plain forward take in order, with the places of keys in a cache. After them a
        share's output leaves in float32."""
        tiles = _tiles(config, shape, limits)
        loop = loop_bytes(tiles) + looked_up_bytes(config, shape) * (limits.mma != "none")
        return max(loop, output_bytes(tiles, _output_element_bytes(config, shape)))

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        more = uncertain_bytes(_tiles(config, shape, limits)) + more_pages_bytes(config, shape, limits)
        return self.shared_bytes(config, shape, limits) + more

    def tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _FORWARD.tensor_memory_columns(_in_order(config), shape, limits)

    def most_tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _FORWARD.most_tensor_memory_columns(_in_order(config), shape, limits)

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        return default_decode_config(self, shape, limits)

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        return SoftmaxCost(merge_overlaps=config.parameters["overlap"] == EARLY, merges_inside=is_paired(config))

    def as_forward(self, config: KernelConfig, shape: AttentionShape) -> tuple[KernelConfig, AttentionShape]:
        return config, folded_decode(config.parameters["splits"], shape)

    def own_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip | None:
        """Return the tiles of the packed rows of a group; `shared_bytes` says which products read which memory. A
        share's output leaves in float32 when the loop has ended. Plain multiply-adds and float32 keep what those of an
        ordinary forward keep."""
        if limits.mma == "none" or shape.dtype == "float32":
            return None
        m, n, short = config.block_m, config.block_n, shape.element_bytes
        width, width_v = operand_widths(shape)
        whole = product_unit(config, limits) != "mma"
        depth = config.num_stages - (0 if whole else 1)
        keys = [shared_tile("K or V, in turns", n, max(width, width_v), short)]
        if depth and config.num_stages > 1:
            keys = [shared_tile("K", n, width, short, depth), shared_tile("V", n, width_v, short, depth)]
        softmax = softmax_tiles(m, n, width_v, short)
        if not whole and m < width_v:
            softmax = tuple(shared_tile("P", m, n, short) if tile.name == "P" else tile for tile in softmax)
        leaving = output_bytes(_tiles(config, shape, limits), _output_element_bytes(config, shape))
        tiles = (shared_tile("Q", m, width, short), *keys, *softmax)
        return OnChip(tiles=tiles, leaving_bytes=leaving, num_warps=config.num_warps)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_decode_kernel, merge_splits_kernel)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        launch = self.bind(config, shape)
        return specialize(launch.function, self.example_arguments(config, shape), launch.options)

    def example_arguments(self, config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
        """Return the arguments of the first launch for contiguous tensors."""
        features = shape.features
        tensor, numbers, indices = (TensorArgument(dtype) for dtype in (shape.dtype, "float32", "int32"))
        arguments: dict[str, Any] = {"Q": tensor, "K": tensor, "V": tensor, "Out": tensor, "Lse": None}
        arguments |= {
            "Work": numbers if config.parameters["splits"] > 1 else None,
            "Lengths": indices if features.cached else None,
            "Table": indices if features.page_size else None,
            "Tree": indices if features.mask is MaskKind.TREE else None,
            "Slopes": numbers if features.alibi else None,
            "scale_log2": 1.0,
            "cap_log2": 1.0,
        }
        arguments |= dict.fromkeys(("stride_table", "stride_slopes", "stride_tree_b", "stride_tree_m"), 0)
        arguments |= {"Counter": indices if is_paired(config) else None, "OPTIONS": options_of(config, shape)}
        return arguments | named_in_units(all_strides(shape, "qkvo")) | first_sizes(config, shape)

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        merge = self.bind(config, shape).merge
        if merge is None:
            return ()
        arguments: dict[str, Any] = {"Out": TensorArgument(shape.dtype), "Lse": None, "Work": TensorArgument("float32")}
        arguments |= contiguous_strides(shape, "o") | merge_arguments(config, shape)
        return (specialize(merge_splits_kernel, arguments, merge.options),)

    def bind(self, config: KernelConfig, shape: AttentionShape) -> DecodeLaunch:
        return decode_launch(config, shape)

    def bind_batch_invariant(self, config: KernelConfig, shape: AttentionShape) -> DecodeLaunch:
        return decode_launch(config, shape, batch_invariant=True)


def _tiles(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> ForwardTiles:
    return _FORWARD.forward_tiles(_in_order(config), shape, limits)


def _output_element_bytes(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the bytes of an element of what a program writes: a share of the output is of float32."""
    return FLOAT32_BYTES if config.parameters["splits"] > 1 else shape.element_bytes


def _in_order(config: KernelConfig) -> KernelConfig:
    """Return the same tiles of the plain forward, whose shared memory is that of float32 decoding."""
    return replace(config, kernel=_FORWARD.name, extra=(("schedule", IN_ORDER),))


def folded_decode(splits: int, shape: AttentionShape) -> AttentionShape:
    """Return a plain forward for the models: the packed rows of a key head are the queries of one head, and every split
    is a batch entry of its own. Of the features the type of an 8-bit cache stays, which says what bytes it has."""
    return replace(
        shape,
        batch=shape.batch * splits,
        num_heads=shape.num_heads_kv,
        seqlen_q=shape.group_size * shape.seqlen_q,
        seqlen_k=-(-visible_keys(shape) // splits),
        causal=Causal.NONE,
        features=Features(cached=True, kv=shape.features.kv) if shape.features.is_short else NO_FEATURES,
    )


def _query_tiles(shape: AttentionShape) -> int:
    """Return how many tiles of 64 queries there are."""
    return shape.batch * shape.num_heads * -(-shape.seqlen_q // WARPGROUP_ROWS)


def _forward_leaves_idle(shape: AttentionShape) -> bool:
    """Return whether kernels without splits occupy at most half of a large GPU, and for so long that splits and a merge
    are faster. Of float32, whose whole tiles spill, nothing was measured."""
    idle = _query_tiles(shape) <= IDLE_TILES
    return idle and visible_keys(shape) >= MANY_KEYS and shape.element_bytes == 2
