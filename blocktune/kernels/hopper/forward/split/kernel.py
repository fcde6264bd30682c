"""The Hopper forward of kernels/hopper/forward/kernel.py with the keys cut into parts, each a tile of its own.

A few hundred queries of a few heads make fewer tiles than a large GPU has multiprocessors, however many keys they see:
a chunk of a prompt after a long context. Under a diagonal a few longest tiles keep all others waiting. Every tile is
taken once for each part of its keys, and a second launch merges the parts' outputs, which are of the type of the
output, by their log-sum-exps. Parts begin and end at blocks of keys.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from blocktune.kernels.base.feature_arguments import CACHE_FEATURES
from blocktune.kernels.base.kernel import CompileSpec, Launch
from blocktune.kernels.base.loops import ForwardLoops
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import TensorArgument
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.hopper.common.persistent_blocks import multiprocessors
from blocktune.kernels.hopper.forward.arguments import Options
from blocktune.kernels.hopper.forward.device_kernel import flash_fwd_hopper_kernel
from blocktune.kernels.hopper.forward.kernel import FlashForwardHopper, options_of
from blocktune.kernels.hopper.forward.launch import NO_CACHE
from blocktune.kernels.hopper.forward.layout import WARPS, blocks_of, sizes_of
from blocktune.kernels.hopper.forward.split.expected_time import SPLITS, best_splits, gain_of, tiles_of
from blocktune.kernels.hopper.forward.split.launch import OUT, SplitForwardLaunch, merge_spec
from blocktune.kernels.hopper.forward.split.merge import merge_parts_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal

MIN_KEYS = 1024
"""With fewer the merge costs what the parts save."""
MIN_QUERIES, MIN_NARROW_QUERIES = 33, 65
"""Fewer are decoding's, which packs the heads of a group; of heads up to `NARROW` columns, whose tiles of 64 packed
rows do not spill there: 19 us for 23 with 64 queries of 8 heads over 8192 keys."""
NARROW = 128
MIN_GAIN = 1.05
"""Times as fast as one part that the parts must be by `expected_us`."""


class FlashForwardHopperSplit(FlashForwardHopper):
    """The forward kernel of Hopper for few tiles with many keys: `FlashForwardHopper` over `splits` parts of the
    keys."""

    name = "flash_fwd_hopper_split"
    features: ClassVar[frozenset[str]] = CACHE_FEATURES | {"softcap"}
    loops = ForwardLoops(splits="splits")
    ladder_steps: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        **FlashForwardHopper.parameters,
        "splits": SPLITS,
    }
    follows_shape: ClassVar[tuple[str, ...]] = ("splits",)

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        if (told := super().shape_problem(shape, limits)) is not None:
            return told
        least = MIN_NARROW_QUERIES if max(shape.head_dim, shape.head_dim_v) <= NARROW else MIN_QUERIES
        if shape.seqlen_q < least:
            return f"`seqlen_q >= {least}` must hold for {self.name}, but got seqlen_q={shape.seqlen_q}"
        if shape.seqlen_k < MIN_KEYS:
            return f"`seqlen_k >= {MIN_KEYS}` must hold for {self.name}, but got seqlen_k={shape.seqlen_k}"
        tile = super().default_config(shape, limits)
        if (gain := gain_of(shape, tile)) < MIN_GAIN:
            return (
                f"parts of the keys must save a factor of {MIN_GAIN} for {self.name}, but got {gain:.2f} for "
                f"{tiles_of(shape, tile)} tiles. {FlashForwardHopper.name} computes the shape"
            )
        return None

    def steps_back(self, shape: AttentionShape) -> bool:
        return False

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        if problems := super().rule_violations(config, shape, limits):
            return problems
        splits, blocks = config.parameters["splits"], -(-shape.seqlen_k // config.block_n)
        if splits > blocks:
            return (f"`splits` must be at most {blocks}, the blocks of keys, but got {splits}.",)
        return ()

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        """Return the tile of `FlashForwardHopper` with the number of parts that takes the fewest steps."""
        tile = super().default_config(shape, limits)
        return KernelConfig.of(self.name, {**tile.parameters, "splits": best_splits(shape, tile)})

    def as_forward(self, config: KernelConfig, shape: AttentionShape) -> tuple[KernelConfig, AttentionShape]:
        splits = config.parameters["splits"]
        keys = -(-shape.visible_pairs // (shape.seqlen_q * splits))
        return config, replace(shape, batch=shape.batch * splits, seqlen_k=keys, causal=Causal.NONE)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(flash_fwd_hopper_kernel, merge_parts_kernel)

    def example_arguments(self, config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
        constants = {"lse": TensorArgument("float32"), "OPTIONS": split_options(config, shape)}
        return super().example_arguments(config, shape) | constants

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        return (merge_spec(shape, config.parameters["splits"]),)

    def bind_with_sinks(self, config: KernelConfig, shape: AttentionShape) -> None:  # type: ignore[override]
        """Leave sinks, which would join every part, to a pass over the results."""

    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        splits = config.parameters["splits"]
        tiles = tiles_of(shape, config) * splits
        sizes = sizes_of(config, shape)
        sizes |= dict.fromkeys(("batch_heads", "head_group"), sizes["batch_heads"] * splits)
        lines = () if shape.features else (shape.seqlen_q, *NO_CACHE)
        fixed = (*lines, *sizes.values(), split_options(config, shape))
        return SplitForwardLaunch(
            shape=shape,
            parts=splits,
            grid=(min(multiprocessors(), tiles), 1, 1),
            fixed=fixed,
            options={"num_warps": WARPS},
            block=blocks_of(config, shape)[OUT],
            described=self.descriptions(config, shape)[:OUT],
        )


def split_options(config: KernelConfig, shape: AttentionShape) -> Options:
    """Return the constants of a config. Under a diagonal rows may see none of a part's keys."""
    options = options_of(config, shape)
    aligned = options.ALIGNED and not options.RIGHT
    return options._replace(KEY_PARTS=config.parameters["splits"], ALIGNED=aligned)
