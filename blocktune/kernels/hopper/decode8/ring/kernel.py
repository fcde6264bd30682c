"""Decoding over 8-bit caches on Hopper with many rows: `flash_decode8` with operands converted on their way from shared
memory to the registers of a warpgroup's products.

The device functions are in the other files of this folder. This kernel takes 128 columns and up to 64 packed rows, full
or causal, over caches of which every entry is filled to its own length, contiguous or paged, and leaves everything else
to `flash_decode8`.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, WARPGROUP_WARPS
from blocktune.kernels.base.on_chip import OnChip, register_tile, shared_tile
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import TensorArgument
from blocktune.kernels.hardware.limits import MULTIPROCESSORS, ComputeLimits
from blocktune.kernels.hopper.decode.kernel import MAX_BATCH, packed_rows, words_problem
from blocktune.kernels.hopper.decode.strides import example_strides, sizes
from blocktune.kernels.hopper.decode8.ring.device_kernel import flash_decode8_ring_kernel
from blocktune.kernels.hopper.decode8.ring.launch import options_of, ring_launch
from blocktune.kernels.portable.decode.defaults import visible_keys
from blocktune.kernels.portable.decode.launch import DecodeLaunch
from blocktune.kernels.portable.decode.shares import fastest_splits
from blocktune.kernels.portable.decode.tiles import merge_splits_kernel
from blocktune.kernels.portable.decode8.kernel import ELEMENTS, FlashDecode8
from blocktune.kernels.portable.decode8.tiles import SCALE_STRIDES
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal

WIDTH = 128
"""Columns of keys and of values: others were not measured."""
MAX_ROWS = 64
"""Packed rows, which read all keys once: the output of more leaves no registers for a second block."""
RESIDENT = 2
"""Blocks of a multiprocessor."""
FLAG_BYTES = 128
"""Of a warp, from which all warps read whether references move."""
BLOCK_N, DEEP_STAGES = 64, (4, 5)
FEW_ROWS = 16
"""Up to which the ring gains nothing: on an H200 4 % slower to 4 % faster than the better of the other two kernels."""


class FlashDecode8Ring(FlashDecode8):
    """Split-KV decoding with many packed rows over 8-bit keys and values."""

    name = "flash_decode8_ring"
    features: ClassVar[frozenset[str]] = frozenset({"cached", "paged", "kv=e4m3", "kv=int8", "token_scales"})
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (16, 32, 64),
        "block_n": (64,),
        "num_warps": (4,),
        "num_stages": (2, 3, 4, 5),
        "splits": (1, 2, 4, 8, 16, 32, 64, 128),
        "overlap": (0, 1),
    }

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if limits.cc != (9, 0):
            return f"{self.name} multiplies with Hopper's warpgroups (compute capability 9.0), but got {limits.name}"
        if (shape.head_dim, shape.head_dim_v) != (WIDTH, WIDTH):
            return (
                f"`head_dim == head_dim_v == {WIDTH}` must hold for {self.name}, but got head_dim={shape.head_dim} and "
                f"head_dim_v={shape.head_dim_v}"
            )
        rows = packed_rows(shape)
        if rows > MAX_ROWS:
            return f"`group_size * seqlen_q <= {MAX_ROWS}` must hold for {self.name}, but got {rows} rows"
        if shape.batch > MAX_BATCH:
            return f"`batch <= {MAX_BATCH}` must hold for {self.name}, but got batch={shape.batch}"
        return super().shape_problem(shape, limits)

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        """Return the broken rules, besides those of `flash_decode8`: a tile holds all packed rows."""
        problems, rows = super().rule_violations(config, shape, limits), packed_rows(shape)
        if problems or rows <= config.block_m:
            return problems
        return (
            f"`group_size * seqlen_q <= block_m` must hold for {self.name}, but got {rows} rows and "
            f"block_m={config.block_m}. Take a larger block_m.",
        )

    def layout_problem(self, q: Any, k: Any, v: Any) -> str | None:
        return words_problem(self.name, k, v) or super().layout_problem(q, k, v)

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of the ring, queries, probabilities, the warps' flags and the last keys of causal rows."""
        return self.own_tiles(config, shape, limits).shared_bytes

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return an upper bound: warps exchange the largest scores of their rows, in Triton 3.6 all of them."""
        exchanged_bytes = config.num_warps * config.block_m * FLOAT32_BYTES
        return self.shared_bytes(config, shape, limits) + exchanged_bytes

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        """Return the lowest tile of rows, the shares of two blocks a multiprocessor, and four places of the ring, or
        five where four leave room for a third block, which not all multiprocessors would get."""
        block_m = next(block for block in self.parameters["block_m"] if packed_rows(shape) <= block)
        blocks, rows = shape.batch * shape.num_heads_kv, shape.batch * shape.num_heads * shape.seqlen_q
        splits = fastest_splits(
            self.parameters["splits"], blocks, RESIDENT * MULTIPROCESSORS, visible_keys(shape), BLOCK_N, rows
        )
        shares = (("splits", splits), ("overlap", int(splits > 1)))
        deep = (KernelConfig(self.name, block_m, BLOCK_N, WARPGROUP_WARPS, stages, shares) for stages in DEEP_STAGES)
        return next(config for config in deep if self._resident(config, shape, limits) == RESIDENT)

    def _resident(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the blocks for which a multiprocessor has the shared memory."""
        block_bytes = self.most_shared_bytes(config, shape, limits) + limits.shared_reserved_bytes
        return limits.shared_per_sm_bytes // block_bytes

    def steps_back(self, shape: AttentionShape) -> bool:
        """Return whether there are few rows, over which the other kernels are as fast."""
        return packed_rows(shape) <= FEW_ROWS

    def own_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
        """Return the tiles: bytes of keys and values in shared memory, and one of either, converted, in registers."""
        del limits
        m, n, stages = config.block_m, config.block_n, config.num_stages
        scales = (shared_tile("scales of K and V", n, 2, FLOAT32_BYTES, stages),)
        last = (shared_tile("last keys of rows", m, 1, FLOAT32_BYTES),)
        return OnChip(
            tiles=(
                shared_tile("Q", m, WIDTH, 2),
                shared_tile("K", n, WIDTH, shape.kv_bytes, stages),
                shared_tile("V", n, WIDTH, shape.kv_bytes, stages),
                *(scales if shape.features.token_scales else ()),
                *(() if shape.causal is Causal.NONE else last),
                register_tile("K or V, in float16", n, WIDTH, 2),
                shared_tile("P", m, n, 2, 2),
                shared_tile("flags of warps", config.num_warps, FLAG_BYTES, 1, 2),
                register_tile("S", m, n, FLOAT32_BYTES),
                register_tile("O", m, WIDTH, FLOAT32_BYTES),
            ),
            num_warps=config.num_warps,
        )

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_decode8_ring_kernel, merge_splits_kernel)

    def example_arguments(self, config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
        features, numbers, integers = shape.features, TensorArgument("float32"), TensorArgument("int32")
        keys, queries = TensorArgument(ELEMENTS[features.kv]), TensorArgument(shape.dtype)
        arguments: dict[str, Any] = {"Q": queries, "K": keys, "V": keys, "Out": queries, "Lse": None}
        arguments |= {
            "Work": numbers if config.parameters["splits"] > 1 else None,
            "Lengths": integers if features.cached else None,
            "Table": integers if features.page_size else None,
            "scale_log2": 1.0,
            "stride_table": 0,
        }
        arguments |= {"KScales": numbers, "VScales": numbers} | dict.fromkeys(SCALE_STRIDES, 0)
        return arguments | example_strides(shape) | sizes(shape) | {"OPTIONS": options_of(config, shape)}

    def bind(self, config: KernelConfig, shape: AttentionShape) -> DecodeLaunch:
        return ring_launch(config, shape)

    def bind_batch_invariant(self, config: KernelConfig, shape: AttentionShape) -> DecodeLaunch:
        return ring_launch(config, shape, batch_invariant=True)
