"""Block-sparse FlashAttention backward: three functions, of which two walk the mask's lists.

The device functions stand in sparse_gradients.py. `delta_kernel` takes rowsum(dout * out); `dq_kernel` owns query
rows and walks their active key blocks; `dkv_kernel` owns keys and walks the active query blocks of their column, for
every query head that reads them. No atomic additions: equal inputs give equal bits. Flops and traffic follow the mask's
density (Dao et al., arXiv 2205.14135, proposition 4).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from blocktune.kernels.base.flash_kernel import (
    LOG2_E,
    RUN_TIME_SIZES,
    all_strides,
    heads_per_group,
    padded_width,
)
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec, Launch, SoftmaxCost
from blocktune.kernels.base.loops import BackwardLoops, Visits
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.base.specialize import TensorArgument, in_units, named_in_units, specialize
from blocktune.kernels.base.steps import BackwardLauncher, Step, Workspace, take_addresses
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.layouts.pass_bytes import most_pass_bytes, pass_bytes
from blocktune.kernels.layouts.pass_tiles import PassTiles
from blocktune.kernels.portable.backward.base import (
    gradient_strides,
    launch_options,
    row_sums,
    row_sums_spec,
    subtract_rows,
    tile_constants,
)
from blocktune.kernels.portable.backward.shared_memory import (
    key_pass,
    least_pass_columns,
    most_pass_columns,
    query_pass,
)
from blocktune.kernels.portable.backward.sparse_gradients import delta_kernel, dkv_kernel, dq_kernel
from blocktune.kernels.portable.forward.arguments import Options
from blocktune.kernels.portable.forward.sparse import fitting_mask, mask_problem
from blocktune.kernels.portable.forward.sparse_tiles import LIST_SIZES, tile_shift
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction

if TYPE_CHECKING:
    from blocktune.kernels.values.block_mask import BlockLists, BlockMask


@dataclass(frozen=True, slots=True)
class SparseBackwardLaunch(BackwardLauncher):
    """What `bind` returns: launch(q, k, v, out, lse, dout, dq, dk, dv, scale, extras) with a `BlockMask` there."""

    shape: AttentionShape
    config: KernelConfig

    def prepared(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
        extras: Extras = NO_EXTRAS, *, pins: bool,
    ) -> Launch:  # fmt: skip
        """Return a launch for masks with the blocks of this one.

        Raises:
            UsageError: the block mask is missing, belongs to another shape, or has blocks that the tiles do not divide.
        """
        import torch

        del scale
        shape, block_n, options = self.shape, self.config.parameters["kv_block_n"], launch_options(self.config)
        mask, device = fitting_mask(extras, shape, q), q.device
        row_tiles = self._shifts(("block_m", mask.block_q), ("block_n", mask.block_k))
        column_tiles = self._shifts(("kv_block_n", mask.block_k), ("kv_block_m", mask.block_q))
        inner = tuple(stride for tensor in (q, k, v, dout) for stride in tensor.stride()[:3])
        sizes, space = tuple(run_time_sizes(shape).values()), Workspace((lse.numel(), torch.float32))
        sums = row_sums(out, dout, pins=pins)
        grid = (tiles(shape.seqlen_q, self.config.block_m) * shape.batch * shape.num_heads,)
        strides, unit = in_units((*inner, *dq.stride()[:3]))
        rest = *row_tiles, *strides, *sizes, dq_constants(self.config, shape), unit
        of_queries = Step(dq_kernel, grid, rest, options, pins=pins)
        grid = (tiles(shape.seqlen_k, block_n) * shape.batch * shape.num_heads_kv,)
        strides, unit = in_units((*inner, *dk.stride()[:3], *dv.stride()[:3]))
        rest = *column_tiles, *strides, *sizes, dkv_constants(self.config, shape), unit
        of_keys = Step(dkv_kernel, grid, rest, options, pins=pins)

        def launch(
            q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
            extras: Extras,
        ) -> None:  # fmt: skip
            mask, scales = fitting_mask(extras, shape, q), (scale, scale * LOG2_E)
            memory = space.new(device)
            (delta,) = space.parts(memory, as_addresses=take_addresses(sums, of_queries, of_keys))
            sums(out, dout, delta)
            if extras.grad_lse is not None:
                subtract_rows(space, memory, extras.grad_lse)
            inputs = q, k, v, dout, lse, delta
            of_queries(*inputs, dq, *_listing(mask, mask.rows, scales))
            of_keys(*inputs, dk, dv, *_listing(mask, mask.columns, scales))

        return launch

    def _shifts(self, *blocks: tuple[str, int]) -> tuple[int, ...]:
        """Return log2 of the tiles of each block of the mask, by the parameter that holds the tile's size."""
        return tuple(tile_shift(name, block, self.config.parameters[name]) for name, block in blocks)


FLOAT32_FIRST = 4
"""The preference with which float32 begins where warps multiply alone: larger tiles spill."""


class FlashBackwardSparse(AttentionKernel):
    """The backward under a block mask. Its tiles must divide the mask's blocks, which a launch checks.

    block_m queries and block_n keys are a tile of the function for dq, kv_block_m and kv_block_n of the one for dk and
    dv.
    """

    name = "flash_bwd_sparse"
    direction = Direction.BACKWARD
    loops = BackwardLoops(keys=("kv_block_m", "kv_block_n"), queries=("block_m", "block_n"), visits=Visits.BLOCK_MASK)
    features = frozenset({str(MaskKind.BLOCK_SPARSE), "deterministic"})
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "block_m": (16, 32, 64, 128),
        "block_n": (16, 32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
        "kv_block_m": (16, 32, 64, 128),
        "kv_block_n": (16, 32, 64, 128),
    }
    # No block is larger than 64, so that they serve every mask whose blocks are 64 or more. The first one holds heads
    # of up to 64 elements in registers, the second one of up to 128.
    preferences: ClassVar[tuple[tuple[int, int, int, int, int, int], ...]] = (
        (64, 64, 4, 2, 64, 64),
        (64, 64, 8, 2, 64, 64),
        (64, 32, 8, 2, 32, 64),
        (64, 32, 8, 1, 32, 64),
        (32, 16, 4, 1, 16, 32),
        (16, 16, 4, 1, 16, 16),
    )

    def shape_problem(self, shape: AttentionShape, limits: ComputeLimits) -> str | None:
        return mask_problem(self, shape) or super().shape_problem(shape, limits)

    def shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of the function that needs more: the tiles that a program owns, those that it walks, and ds
        where warps exchange it."""
        return max(pass_bytes(_query_tiles(config, shape, limits)), self.launch_bytes(config, shape, limits))

    def most_shared_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        passes = (_query_tiles(config, shape, limits), _key_tiles(config, shape, limits))
        return max(most_pass_bytes(tiles) for tiles in passes)

    def tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _columns(least_pass_columns, config, shape, limits)

    def most_tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        return _columns(most_pass_columns, config, shape, limits)

    def launch_bytes(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the bytes of the function for dk and dv."""
        return pass_bytes(_key_tiles(config, shape, limits))

    def softmax_cost(self, config: KernelConfig) -> SoftmaxCost:
        """Return the cost: three products in the function for dq, four in the one for dk and dv; the probabilities
        twice."""
        return SoftmaxCost(instructions_per_score=11.0, rescales=False, products=7)

    def as_forward(self, config: KernelConfig, shape: AttentionShape) -> tuple[KernelConfig, AttentionShape]:
        """Return the forward of the function that takes longest, which owns kv_block_n keys and walks kv_block_m
        queries at a time."""
        own = config.parameters
        owner = replace(config, block_m=own["kv_block_m"], block_n=own["kv_block_n"])
        return super().as_forward(owner, shape)

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        names, width = tuple(self.parameters), max(shape.head_dim, shape.head_dim_v)
        first = (width > 64) + (width > 128)
        if shape.dtype == "float32" and limits.mma in ("mma", "none"):
            first = FLOAT32_FIRST
        fitting = self.preferences[first:]
        candidates = [KernelConfig.of(self.name, dict(zip(names, values, strict=True))) for values in fitting]
        return self.first_fitting(candidates, shape, limits)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        arguments = _common_arguments(shape) | dict.fromkeys(("Dk", "Dv"), TensorArgument(shape.dtype))
        gradients = gradient_strides(shape, "k", "dk") | gradient_strides(shape, "v", "dv")
        arguments |= named_in_units(_input_strides(shape) | gradients)
        return specialize(dkv_kernel, arguments | {"OPTIONS": dkv_constants(config, shape)}, launch_options(config))

    def further_specs(self, config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
        arguments = _common_arguments(shape) | {"Dq": TensorArgument(shape.dtype)}
        arguments |= named_in_units(_input_strides(shape) | gradient_strides(shape, "q", "dq"))
        dq = specialize(dq_kernel, arguments | {"OPTIONS": dq_constants(config, shape)}, launch_options(config))
        return dq, row_sums_spec(shape)

    def bind(self, config: KernelConfig, shape: AttentionShape) -> SparseBackwardLaunch:
        return SparseBackwardLaunch(shape, config)

    @cached_property
    def source_hash(self) -> str:
        return hash_of_sources(delta_kernel, dq_kernel, dkv_kernel)


def _listing(mask: "BlockMask", lists: "BlockLists", scales: tuple[float, float]) -> tuple[Any, ...]:
    """Return the lists as the kernels take them: pointers, the scales that stand between, strides and blocks of a
    row."""
    return lists.indices, lists.before, *scales, *mask.strides(lists), lists.indices.shape[-1] - 1


def _query_tiles(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> PassTiles:
    """Return the tiles of the function for dq."""
    constants, causal = dq_constants(config, shape), shape.causal is not Causal.NONE
    tiles = query_pass(constants, config.num_warps, shape, limits)
    return replace(tiles, one_more_loop=causal or constants.RAGGED)


def _key_tiles(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> PassTiles:
    """Return the tiles of the function for dk and dv."""
    tiles = key_pass(dkv_constants(config, shape), config.num_warps, shape, limits)
    return replace(tiles, one_more_loop=shape.causal is not Causal.NONE)


def _columns(of_pass: Callable[..., int], config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the tensor memory of the function that takes more of it: for dq, and for dk and dv together."""
    own, widths = config.parameters, (padded_width(shape.head_dim), padded_width(shape.head_dim_v))
    dq = of_pass(own["block_m"], own["block_n"], widths[0], shape, limits)
    return max(dq, of_pass(own["kv_block_n"], own["kv_block_m"], sum(widths), shape, limits))


def tiles(length: int, block: int) -> int:
    """Return how many tiles of `block` rows cover a length."""
    return -(-length // block)


def run_time_sizes(shape: AttentionShape) -> dict[str, int]:
    """Return the integers that are not compiled in."""
    batch_heads = shape.batch * shape.num_heads
    heads = (shape.num_heads, shape.group_size, batch_heads, heads_per_group(shape))
    return dict(zip(RUN_TIME_SIZES, (*heads, shape.seqlen_q, shape.seqlen_k, shape.causal_offset), strict=True))


def dq_constants(config: KernelConfig, shape: AttentionShape) -> Options:
    """Return the constants of `dq_kernel`."""
    block_m, block_n = config.parameters["block_m"], config.parameters["block_n"]
    ragged = shape.seqlen_k % block_n != 0
    return tile_constants(shape, block_m, block_n, config.num_stages)._replace(RAGGED=ragged, UPPER_LEFT=False)


def dkv_constants(config: KernelConfig, shape: AttentionShape) -> Options:
    """Return the constants of `dkv_kernel`."""
    block_m, block_n = config.parameters["kv_block_m"], config.parameters["kv_block_n"]
    ragged = shape.seqlen_q % block_m != 0
    return tile_constants(shape, block_m, block_n, config.num_stages)._replace(RAGGED=ragged, UPPER_LEFT=False)


def _common_arguments(shape: AttentionShape) -> dict[str, Any]:
    """Return what the functions for dq and for dk and dv both take, to be compiled offline."""
    numbers, lists = TensorArgument("float32"), TensorArgument("int32")
    arguments: dict[str, Any] = dict.fromkeys(("Q", "K", "V", "Dout"), TensorArgument(shape.dtype))
    arguments |= {"Lse": numbers, "Delta": numbers, "Indices": lists, "Before": lists}
    arguments |= {"scale": 1.0, "scale_log2": 1.0} | dict.fromkeys(LIST_SIZES, 1) | run_time_sizes(shape)
    return arguments


def _input_strides(shape: AttentionShape) -> dict[str, int]:
    """Return the strides of what both functions read, to be compiled offline."""
    return all_strides(shape, "qkv") | gradient_strides(shape, "o", "do")
