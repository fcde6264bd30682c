"""The backward as one pass: a program owns keys, and what it finds of dq is added to float32 sums in device memory.

Five products, each computed once (FlashAttention, arXiv 2205.14135, algorithm 4). Programs meet in the sums in any
order, so that the last bits of dq differ from run to run. The parameter `reduce` says how they add: 0 by atomic
additions of the threads, 1 by the copy engine (TMA reduce, compute capability 9.0 and later).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, WARPGROUP_ROWS, padded_width, tf32_tiles
from blocktune.kernels.base.kernel import CompileSpec, Launch, SoftmaxCost
from blocktune.kernels.base.on_chip import ChipTile, shared_tile
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import DescriptorArgument, TensorArgument, in_units
from blocktune.kernels.base.steps import BackwardLauncher, Step
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.layouts.pass_bytes import keys_again, most_pass_bytes, pass_bytes
from blocktune.kernels.layouts.pass_tiles import PassTiles
from blocktune.kernels.portable.backward.base import (
    BackwardInputs,
    FlashBackward,
    key_constants,
    key_grid,
    key_sizes,
    launch_options,
    specs_before,
)
from blocktune.kernels.portable.backward.gradient_kernels import keys_kernel, statistics_kernel
from blocktune.kernels.portable.backward.shared_memory import key_pass, statistics_bytes
from blocktune.kernels.portable.backward.sparse_gradients import delta_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import AttentionShape

BY_ATOMICS, BY_COPY_ENGINE = 0, 1
"""Values of the parameter `reduce`."""

SUMS = 8
"""The place of the sums among the arguments of `keys_kernel`."""
SUMS_DIVISOR = 4
"""Of head_dim where the copy engine adds: it moves 16 bytes or none."""


@dataclass(frozen=True, slots=True)
class FusedBackwardLaunch(BackwardLauncher):
    """What `bind` returns: launch(q, k, v, out, lse, dout, dq, dk, dv, scale[, extras])."""

    shape: AttentionShape
    config: KernelConfig

    def prepared(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
        extras: Extras = NO_EXTRAS, *, pins: bool,
    ) -> Launch:  # fmt: skip
        """Return the launch of tensors like these.

        Raises:
            UsageError: the tensor of a feature is missing.
        """
        import torch

        del scale, dq
        shape, config = self.shape, self.config
        inputs = BackwardInputs(shape, config, q, k, v, out, lse, dout, extras, pins=pins)
        constants = key_constants(config, shape, _sums_code(config))
        strides, unit = in_units((*inputs.strides, *dk.stride()[:3], *dv.stride()[:3]))
        rest = *strides, *key_sizes(shape).values(), constants, unit
        described = ((SUMS, partial(_described_sums, _sums_block(config, shape))),) if copies(config) else ()
        keys = Step(keys_kernel, key_grid(config, shape), rest, launch_options(config), described, pins=pins)

        def launch(
            q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
            extras: Extras = NO_EXTRAS,
        ) -> None:  # fmt: skip
            sums = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
            memory, parts = inputs.new(keys)
            tensors, features = inputs.arguments(memory, parts, q, k, v, out, lse, dout, scale, extras)
            keys(*tensors, dk, dv, sums, *features)
            del memory
            torch.mul(sums, scale, out=dq)

        return launch


def _described_sums(block: list[int], sums: Any) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(sums.flatten(0, 1), block)


class FlashBackwardFused(FlashBackward):
    """The dense backward in one pass, whose gradients of queries are not equal to the bit from run to run."""

    name = "flash_bwd_fused"
    ladder_steps = ("one_pass", "tuned")
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (32, 64, 128),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2),
        "reduce": (BY_ATOMICS, BY_COPY_ENGINE),
    }
    preferences = (
        (64, 64, 4, 2, BY_COPY_ENGINE),
        (64, 64, 4, 2, BY_ATOMICS),
        (64, 128, 8, 2, BY_ATOMICS),
        (32, 64, 8, 1, BY_ATOMICS),
        (32, 32, 4, 1, BY_ATOMICS),
    )
    preferred_width: ClassVar[Mapping[int, int]] = {64: 0, 128: 2, 256: 3}

    def rule_violations(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[str, ...]:
        """Return the broken rules, besides the range of every parameter: what the copy engine can add."""
        problems = super().rule_violations(config, shape, limits)
        if problems or config.parameters["reduce"] == BY_ATOMICS:
            return problems
        if limits.cc < (9, 0):
            return (f"`reduce` 1 of {self.name} needs compute capability 9.0 or later, but got {limits.name}.",)
        if shape.head_dim % SUMS_DIVISOR:
            return (f"`reduce` 1 of {self.name} needs head_dim % {SUMS_DIVISOR} == 0, but got {shape.head_dim}.",)
        return ()

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of the launch that takes most."""
        return max(self.launch_bytes(config, shape, limits), statistics_bytes(config, shape, limits))

    def launch_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of the pass over keys."""
        return pass_bytes(_key_tiles(config, shape, limits))

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        keys = most_pass_bytes(_key_tiles(config, shape, limits))
        return max(keys, statistics_bytes(config, shape, limits))

    def most_tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the columns with the product that dq is, where a tile of queries is high enough for tensor memory."""
        keys = super().most_tensor_memory_columns(config, shape, limits)
        shared = keys > 0 and config.block_m >= WARPGROUP_ROWS
        return keys + (3 * padded_width(shape.head_dim) + config.block_n if shared else 0)

    def further_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> tuple[ChipTile, ...]:
        """Return what it takes to add a tile's share of dQ; without the copy engine dQ takes the place of other
        tiles."""
        width, m, n = padded_width(shape.head_dim), config.block_m, config.block_n
        keys, ahead = _key_tiles(config, shape, limits), config.num_stages > 1
        listed = keys.products_unit == "mma" and n < width  # by every pass over keys
        tiles = {
            shared_tile("K, for dQ", n, width, shape.element_bytes, tf32_tiles(shape)): keys_again(keys),
            shared_tile("dS", n, m, shape.element_bytes): ahead and shape.element_bytes == 2 and not listed,
            shared_tile("dQ on its way out", m, width, FLOAT32_BYTES): ahead and copies(config),
        }
        return tuple(tile for tile, there in tiles.items() if there)

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        return SoftmaxCost(rescales=False, products=5, adds_walked=True)

    def sums_code(self, config: KernelConfig) -> int:
        return _sums_code(config)

    def sums_argument(self, config: KernelConfig, shape: AttentionShape) -> Any:
        if config.parameters["reduce"] == BY_ATOMICS:
            return TensorArgument("float32")
        return DescriptorArgument("float32", tuple(_sums_block(config, shape)))

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        return specs_before(config, shape)

    def bind(self, config: KernelConfig, shape: AttentionShape) -> FusedBackwardLaunch:
        return FusedBackwardLaunch(shape, config)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(delta_kernel, statistics_kernel, keys_kernel)


def copies(config: KernelConfig) -> bool:
    """Return whether the copy engine adds up dq."""
    return config.parameters["reduce"] == BY_COPY_ENGINE


def _key_tiles(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> PassTiles:
    tiles = key_pass(key_constants(config, shape, _sums_code(config)), config.num_warps, shape, limits)
    return replace(tiles, adds=True, copies=copies(config))


def _sums_code(config: KernelConfig) -> int:
    """Return `SUMS` of `Options`."""
    return 1 + config.parameters["reduce"]


def _sums_block(config: KernelConfig, shape: AttentionShape) -> list[int]:
    return [1, config.block_m, padded_width(shape.head_dim)]
