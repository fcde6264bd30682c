"""The backward as two passes: one program a block of keys for dk and dv, one a block of queries for dq.

Nothing is added up between programs: equal inputs give equal bits. The price is that scores and dout v^T are computed
twice, seven products instead of five (FlashAttention-2, arXiv 2307.08691, section 3.1, in Triton's classic form).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from blocktune.kernels.base.feature_arguments import DENSE_FEATURES
from blocktune.kernels.base.flash_kernel import padded_width
from blocktune.kernels.base.kernel import CompileSpec, Launch, SecondLaunch, SoftmaxCost
from blocktune.kernels.base.loops import BackwardLoops
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import TensorArgument, in_units, named_in_units, specialize
from blocktune.kernels.base.steps import BackwardLauncher, Step
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.layouts.pass_bytes import most_pass_bytes, pass_bytes
from blocktune.kernels.layouts.pass_tiles import PassTiles
from blocktune.kernels.portable.backward.base import (
    BackwardInputs,
    FlashBackward,
    common_arguments,
    gradient_strides,
    input_strides,
    key_constants,
    key_grid,
    key_sizes,
    launch_options,
    query_sizes,
    specs_before,
    tile_constants,
)
from blocktune.kernels.portable.backward.gradient_kernels import keys_kernel, queries_kernel, statistics_kernel
from blocktune.kernels.portable.backward.shared_memory import (
    key_pass,
    least_pass_columns,
    most_pass_columns,
    query_pass,
    statistics_bytes,
)
from blocktune.kernels.portable.backward.sparse_gradients import delta_kernel
from blocktune.kernels.portable.forward.arguments import Options
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import AttentionShape, Direction


@dataclass(frozen=True, slots=True)
class SplitBackwardLaunch(BackwardLauncher):
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
        del scale
        shape, config = self.shape, self.config
        inputs = BackwardInputs(shape, config, q, k, v, out, lse, dout, extras, pins=pins)
        strides, unit = in_units((*inputs.strides, *dk.stride()[:3], *dv.stride()[:3]))
        rest = *strides, *key_sizes(shape).values(), key_constants(config, shape, 0), unit
        keys = Step(keys_kernel, key_grid(config, shape), rest, launch_options(config), pins=pins)
        strides, unit = in_units((*inputs.strides, *dq.stride()[:3]))
        rest = *strides, *query_sizes(shape).values(), _query_constants(config, shape), unit
        queries = Step(queries_kernel, _query_grid(config, shape), rest, _query_options(config), pins=pins)

        def launch(
            q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
            extras: Extras = NO_EXTRAS,
        ) -> None:  # fmt: skip
            memory, parts = inputs.new(keys, queries)
            tensors, features = inputs.arguments(memory, parts, q, k, v, out, lse, dout, scale, extras)
            keys(*tensors, dk, dv, None, *features)
            queries(*tensors, dq, *features)
            del memory

        return launch


class FlashBackwardSplit(FlashBackward):
    """The dense backward in two passes. The parameters dq_* are those of the pass over queries."""

    name = "flash_bwd_split"
    ladder_steps = ("two_passes", "tuned")
    loops = BackwardLoops(queries=("dq_block_m", "dq_block_n"))
    features = DENSE_FEATURES | {"deterministic"}
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (32, 64),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2),
        "dq_block_m": (32, 64, 128),
        "dq_block_n": (32, 64),
        "dq_num_warps": (4, 8),
        "dq_num_stages": (1, 2),
    }
    preferences = (
        (64, 64, 4, 2, 64, 64, 4, 2),
        (32, 64, 8, 1, 64, 32, 8, 1),
        (32, 32, 4, 1, 32, 32, 4, 1),
    )
    preferred_width: ClassVar[Mapping[int, int]] = {128: 0, 256: 1}

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of the launch that takes most."""
        passes = (self.key_tiles(config, shape, limits), _query_tiles(config, shape, limits))
        return max(statistics_bytes(config, shape, limits), *(pass_bytes(tiles) for tiles in passes))

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        passes = (self.key_tiles(config, shape, limits), _query_tiles(config, shape, limits))
        return max(statistics_bytes(config, shape, limits), *(most_pass_bytes(tiles) for tiles in passes))

    def key_tiles(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> PassTiles:
        """Return the tiles of the pass over keys."""
        return key_pass(key_constants(config, shape, 0), config.num_warps, shape, limits)

    def tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        own, width = config.parameters, padded_width(shape.head_dim)
        queries = least_pass_columns(own["dq_block_m"], own["dq_block_n"], width, shape, limits)
        return max(super().tensor_memory_columns(config, shape, limits), queries)

    def most_tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        own, width = config.parameters, padded_width(shape.head_dim)
        queries = most_pass_columns(own["dq_block_m"], own["dq_block_n"], width, shape, limits)
        return max(super().most_tensor_memory_columns(config, shape, limits), queries)

    def launch_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of the pass over keys."""
        return pass_bytes(self.key_tiles(config, shape, limits))

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        """Return the cost of the pass over keys: scores, dout v^T, and the two products that dk and dv are."""
        return SoftmaxCost(rescales=False, products=4)

    def second_launch(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> SecondLaunch:
        """Return the pass over queries: scores and dout v^T again, and the product that dq is."""
        own = config.parameters
        names = ("block_m", "block_n", "num_warps", "num_stages")
        blocks = KernelConfig.of(self.name, {name: own[f"dq_{name}"] for name in names})
        return SecondLaunch(
            config=blocks,
            shape=replace(shape, direction=Direction.FORWARD),
            softmax=SoftmaxCost(rescales=False, products=3),
            shared_bytes=pass_bytes(_query_tiles(config, shape, limits)),
        )

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        arguments = common_arguments(shape) | {"Dq": TensorArgument(shape.dtype)}
        arguments |= named_in_units(input_strides(shape) | gradient_strides(shape, "q", "dq"))
        arguments |= query_sizes(shape) | {"OPTIONS": _query_constants(config, shape)}
        return specialize(queries_kernel, arguments, _query_options(config)), *specs_before(config, shape)

    def bind(self, config: KernelConfig, shape: AttentionShape) -> SplitBackwardLaunch:
        return SplitBackwardLaunch(shape, config)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(delta_kernel, statistics_kernel, keys_kernel, queries_kernel)


def _query_grid(config: KernelConfig, shape: AttentionShape) -> tuple[int]:
    return (-(-shape.seqlen_q // config.parameters["dq_block_m"]) * shape.batch * shape.num_heads,)


def _query_tiles(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> PassTiles:
    """Return the tiles of the pass over queries."""
    return query_pass(_query_constants(config, shape), config.parameters["dq_num_warps"], shape, limits)


def _query_options(config: KernelConfig) -> dict[str, int]:
    own = config.parameters
    return {"num_warps": own["dq_num_warps"], "num_stages": own["dq_num_stages"]}


def _query_constants(config: KernelConfig, shape: AttentionShape) -> Options:
    """Return the constants of `queries_kernel`."""
    own = config.parameters
    return tile_constants(shape, own["dq_block_m"], own["dq_block_n"], own["dq_num_stages"])
