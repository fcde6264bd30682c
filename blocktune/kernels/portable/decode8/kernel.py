"""Attention of a few queries over many keys of 8 bits: `flash_decode` over caches of e4m3 or int8.

Decoding waits for keys and values, so that half of their bytes are half of its time. Scales are of the whole cache, of
a head, or of a token and head.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from blocktune.kernels.base.flash_kernel import SWIZZLE_BYTES, more_pages_bytes, operand_widths, product_unit
from blocktune.kernels.base.on_chip import OnChip, shared_tile, softmax_tiles
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import TensorArgument
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.layouts.forward_tiles import TILE_ALIGNMENT_BYTES
from blocktune.kernels.portable.decode.kernel import FlashDecode
from blocktune.kernels.portable.decode.launch import DecodeLaunch
from blocktune.kernels.portable.decode.tiles import merge_splits_kernel
from blocktune.kernels.portable.decode8.launch import E4M3_CC, decode8_launch
from blocktune.kernels.portable.decode8.shared_memory import cached_bytes, exchanged_bytes, leaving_bytes
from blocktune.kernels.portable.decode8.tiles import SCALE_STRIDES, flash_decode8_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import CacheType
from blocktune.kernels.values.shape import FP8, AttentionShape

MOST_STRIDE = 1 << 23
"""Of rows, so that offsets within a tile of 256 are 32 bits wide."""

ELEMENTS = {CacheType.E4M3: FP8, CacheType.INT8: "int8"}


class FlashDecode8(FlashDecode):
    """Split-KV decoding over 8-bit keys and values."""

    name = "flash_decode8"
    dtypes = frozenset(("float16", "bfloat16"))
    features: ClassVar[frozenset[str]] = FlashDecode.features | {"kv=e4m3", "kv=int8", "token_scales"}
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {**FlashDecode.parameters, "overlap": (0, 1)}

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        """Return the broken rules of `flash_decode`, and that on Hopper half of the columns of the values must be
        swizzled as the keys are (`swizzled_alike`) in products of whole tiles."""
        problems = super().rule_violations(config, shape, limits)
        half_bytes = operand_widths(shape)[1] // 2 * shape.element_bytes
        if problems or product_unit(config, limits) != "wgmma" or half_bytes >= SWIZZLE_BYTES:
            return problems
        return (
            f"`block_m` {config.block_m} of {self.name} needs a head_dim_v above 64 on compute capability "
            f"{limits.name}, but got head_dim_v={shape.head_dim_v}. Take block_m 16 or 32.",
        )

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if not shape.features.is_short:
            return f"{self.name} reads caches of 8 bits, but got keys and values of {shape.dtype}"
        if shape.features.kv is CacheType.E4M3 and limits.cc < E4M3_CC:
            return (
                f"{self.name} converts e4m3 in hardware (compute capability 8.9), but got {limits.name}. Keep an int8 "
                "cache there"
            )
        if limits.mma == "none":
            return f"{self.name} multiplies with tensor cores (compute capability 8.0), but got {limits.name}"
        if shape.head_dim_v % 2:
            return f"`head_dim_v % 2 == 0` must hold for {self.name}, but got head_dim_v={shape.head_dim_v}"
        return super().shape_problem(shape, limits)

    def layout_problem(self, q: Any, k: Any, v: Any) -> str | None:
        pairs = {"keys": k, "values": v} if k.shape[-1] % 2 == 0 else {"values": v}
        for name, tensor in pairs.items():
            if tensor.data_ptr() % 2 or any(stride % 2 for stride in tensor.stride()[:3]):
                return f"the rows of the {name} must begin at even addresses for {self.name}"
            if tensor.stride()[2] >= MOST_STRIDE:
                return f"the rows of the {name} must lie less than {MOST_STRIDE} elements apart for {self.name}"
        return super().layout_problem(q, k, v)

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return cached_bytes(config, shape, limits)

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes with what aligns tiles."""
        return self.shared_bytes(config, shape, limits) + TILE_ALIGNMENT_BYTES + more_pages_bytes(config, shape, limits)

    def own_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip | None:
        """Return the tiles of the packed rows of a group, with keys and values of 8 bits as `shared_bytes` counts
        them."""
        m, n, (width, width_v) = config.block_m, config.block_n, operand_widths(shape)
        depth = config.num_stages - 1
        keys = [shared_tile("K", n, width, 1, depth), shared_tile("V", n, width_v, 1, depth)]
        softmax = softmax_tiles(m, n, width_v, shape.element_bytes)
        if config.num_stages == 1:
            keys = [shared_tile("K or V, in turns", n, max(width, width_v), 1)]
        elif exchanged_bytes(config, shape, limits):
            softmax = tuple(shared_tile("P", m, n, 2) if tile.name == "P" else tile for tile in softmax)
        tiles = (shared_tile("Q", m, width, shape.element_bytes), *keys, *softmax)
        return OnChip(tiles=tiles, leaving_bytes=leaving_bytes(config, shape, limits), num_warps=config.num_warps)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_decode8_kernel, merge_splits_kernel)

    def example_arguments(self, config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
        keys, numbers = TensorArgument(ELEMENTS[shape.features.kv]), TensorArgument("float32")
        arguments = super().example_arguments(config, shape) | {"K": keys, "V": keys}
        return arguments | {"KScales": numbers, "VScales": numbers} | dict.fromkeys(SCALE_STRIDES, 0)

    def bind(self, config: KernelConfig, shape: AttentionShape) -> DecodeLaunch:
        return decode8_launch(config, shape)

    def bind_batch_invariant(self, config: KernelConfig, shape: AttentionShape) -> DecodeLaunch:
        return decode8_launch(config, shape, batch_invariant=True)
