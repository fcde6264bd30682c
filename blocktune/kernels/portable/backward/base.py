"""What the dense backward kernels have in common on the host: rules, row sums and arguments."""

from collections.abc import Mapping
from typing import Any, ClassVar

from blocktune.kernels.base.feature_arguments import (
    DENSE_FEATURES,
    broadcast_strides,
    check_extras,
    example_arguments,
    feature_constants,
    lse_strides,
    mask_bytes,
    run_time_numbers,
    run_time_sizes,
)
from blocktune.kernels.base.flash_kernel import (
    GROUP_BYTES,
    all_strides,
    contiguous_strides,
    heads_per_group,
    padded_width,
)
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec
from blocktune.kernels.base.precision import gradient_precision
from blocktune.kernels.base.specialize import TensorArgument, in_units, named_in_units, specialize
from blocktune.kernels.base.steps import Step, Workspace, take_addresses
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.portable.backward.gradient_kernels import keys_kernel, statistics_kernel
from blocktune.kernels.portable.backward.shared_memory import least_pass_columns, most_pass_columns
from blocktune.kernels.portable.backward.sparse_gradients import delta_kernel
from blocktune.kernels.portable.forward.aligned_masks import MaskRows, mask_specs
from blocktune.kernels.portable.forward.arguments import Options
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.shape import AttentionShape, Direction

DELTA_ROWS, DELTA_WARPS = 64, 4
"""Rows and warps of a program that takes row sums: it waits for memory, whatever they are."""


def row_sums(out: Any, dout: Any, *, pins: bool) -> Step:
    """Return step(out, dout, sums), which takes rowsum(out * dout), laid out like the log-sum-exp, of tensors like
    these [batch, num_heads, rows, head_dim_v] with contiguous rows. Of packed sequences there are as many rows as
    tokens."""
    batch, num_heads, rows, head_dim_v = out.shape
    strides, unit = in_units((*out.stride()[:3], *dout.stride()[:3]))
    rest = *strides, num_heads, rows, head_dim_v, padded_width(head_dim_v), DELTA_ROWS, unit
    grid = -(-rows // DELTA_ROWS), batch * num_heads
    return Step(delta_kernel, grid, rest, {"num_warps": DELTA_WARPS}, pins=pins)


def subtract_rows(space: Workspace, memory: Any, values: Any) -> None:
    """Subtract values like the log-sum-exp from row sums, which are the first part of a workspace in memory."""
    space.parts(memory, as_addresses=False)[0].view(values.shape).sub_(values)


def row_sums_spec(shape: AttentionShape) -> CompileSpec:
    """Return the compilation of `row_sums`."""
    tensor = TensorArgument(shape.dtype)
    arguments: dict[str, Any] = {"Out": tensor, "Dout": tensor, "Delta": TensorArgument("float32")}
    arguments |= named_in_units(contiguous_strides(shape, "o") | gradient_strides(shape, "o", "do"))
    arguments |= {"num_heads": shape.num_heads, "seqlen_q": shape.seqlen_q, "BLOCK_M": DELTA_ROWS}
    arguments |= {"HEAD_DIM_V": shape.head_dim_v, "WIDTH_V": padded_width(shape.head_dim_v)}
    return specialize(delta_kernel, arguments, {"num_warps": DELTA_WARPS})


def gradient_strides(shape: AttentionShape, letter: str, name: str) -> dict[str, int]:
    """Return the strides of the gradient `name` of a contiguous tensor."""
    return {key.replace(f"_{letter}", f"_{name}"): value for key, value in contiguous_strides(shape, letter).items()}


class BackwardInputs:
    """What both passes take of a call: of tensors like these, with the steps that run ahead of both. Those are row sums
    of out * dout, and of float32 the statistics, which put exact maxima in place of a rounded log-sum-exp.

    strides: of q, k, v and the gradient that the passes read.

    Raises:
        UsageError: the tensor of a feature is missing.
    """

    __slots__ = ("_ahead", "_device", "_mask_rows", "_of_features", "_space", "strides")

    def __init__(
        self, shape: AttentionShape, config: KernelConfig, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any,
        extras: Extras, *, pins: bool,
    ) -> None:  # fmt: skip
        import torch

        check_extras(shape.features, extras)
        slopes, exact = extras.alibi_slopes, shape.dtype == "float32"
        self._mask_rows = rows = MaskRows.of(extras.mask, pins=pins)
        self._of_features = *rows.strides, *broadcast_strides(slopes, 2), *lse_strides(q)
        self._ahead = [row_sums(out, dout, pins=pins)]
        self._device = q.device
        inner = tuple(stride for tensor in (q, k, v) for stride in tensor.stride()[:3])
        self.strides = *inner, *dout.stride()[:3]
        sums = (lse.numel(), torch.float32)
        exact_sums, divided_douts = sums if exact else (0, torch.float32), (exact * dout.numel(), dout.dtype)
        self._space = Workspace(sums, exact_sums, divided_douts, (rows.elements, rows.dtype))
        if exact:
            divided = contiguous_steps(dout)
            strides, unit = in_units((*self.strides, *divided))
            rest = *strides, *query_sizes(shape).values(), statistics_constants(config, shape), unit
            options = {"num_warps": config.num_warps}
            self._ahead.append(Step(statistics_kernel, statistics_grid(config, shape), rest, options, pins=pins))
            self.strides = *inner, *divided

    def new(self, *passes: Step) -> tuple[Any, list[Any]]:
        """Return memory that must live until all steps are enqueued, and its parts."""
        memory = self._space.new(self._device)
        steps = *self._mask_rows.steps, *self._ahead, *passes
        return memory, self._space.parts(memory, as_addresses=take_addresses(*steps))

    def arguments(
        self, memory: Any, parts: list[Any], q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, scale: float,
        extras: Extras,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
        """Enqueue what runs ahead, and return the tensors that both passes take before the gradients, and features with
        their strides after them.

        Raises:
            UsageError: dropout_p is outside [0, 1).
        """
        delta, highest, divided, copied = parts
        mask = self._mask_rows.read(mask_bytes(extras.mask), copied)
        tensors = mask, extras.alibi_slopes, extras.cu_seqlens_q, extras.cu_seqlens_k
        features = *tensors, *run_time_numbers(extras, scale), *self._of_features
        self._ahead[0](out, dout, delta)
        if extras.grad_lse is not None:
            subtract_rows(self._space, memory, extras.grad_lse)
        if highest is None:
            return (q, k, v, dout, lse, delta), features
        self._ahead[1](q, k, v, dout, highest, delta, divided, *features)
        return (q, k, v, divided, highest, delta), features


def contiguous_steps(tensor: Any) -> tuple[int, int, int]:
    """Return the strides of a contiguous tensor of this one's sizes, but the last."""
    _, heads, rows, dim = tensor.shape
    return heads * rows * dim, rows * dim, dim


class FlashBackward(AttentionKernel):
    """Base of the dense backward kernels; a subclass says which passes it makes and what they are tuned by.

    block_m queries and block_n keys are a tile of the pass over keys.
    """

    direction = Direction.BACKWARD
    features = DENSE_FEATURES
    preferences: ClassVar[tuple[tuple[int, ...], ...]]
    """Default configs in the order of the parameters: best first, those that need most resources included."""
    preferred_width: ClassVar[Mapping[int, int]]
    """By the most elements of a head: the first preference that holds such a head in registers."""

    def default_config(self, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
        width = max(shape.head_dim, shape.head_dim_v)
        first = next(start for widest, start in self.preferred_width.items() if width <= widest)
        if shape.dtype == "float32" and limits.mma in ("mma", "none"):
            # ptxas gives up on larger tiles: 21 kB a thread spilled at 32 registers, 3.8 times the predicted time
            first = len(self.preferences) - 1
        names = tuple(self.parameters)
        candidates = [
            KernelConfig.of(self.name, dict(zip(names, own, strict=True))) for own in self.preferences[first:]
        ]
        return self.first_fitting(candidates, shape, limits)

    def tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Return the columns of the pass over keys, which sums up both gradients."""
        summed = padded_width(shape.head_dim) + padded_width(shape.head_dim_v)
        return least_pass_columns(config.block_n, config.block_m, summed, shape, limits)

    def most_tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        summed = padded_width(shape.head_dim) + padded_width(shape.head_dim_v)
        return most_pass_columns(config.block_n, config.block_m, summed, shape, limits)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        arguments = common_arguments(shape) | dict.fromkeys(("Dk", "Dv"), TensorArgument(shape.dtype))
        gradients = gradient_strides(shape, "k", "dk") | gradient_strides(shape, "v", "dv")
        arguments |= named_in_units(input_strides(shape) | gradients)
        arguments |= {"Sums": self.sums_argument(config, shape)}
        arguments |= key_sizes(shape) | {"OPTIONS": key_constants(config, shape, self.sums_code(config))}
        return specialize(keys_kernel, arguments, launch_options(config))

    def sums_argument(self, config: KernelConfig, shape: AttentionShape) -> Any:
        """Return what stands for the sums of dq when the pass over keys is compiled offline."""
        del config, shape

    def sums_code(self, config: KernelConfig) -> int:
        """Return how the pass over keys adds up dq: `SUMS` of `Options`."""
        del config
        return 0


def launch_options(config: KernelConfig) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def common_arguments(shape: AttentionShape) -> dict[str, Any]:
    """Return what both passes take before strides, sizes and constants, to be compiled offline."""
    arguments: dict[str, Any] = dict.fromkeys(("Q", "K", "V", "Dout"), TensorArgument(shape.dtype))
    arguments |= dict.fromkeys(("Lse", "Delta"), TensorArgument("float32")) | example_arguments(shape)
    return arguments


def input_strides(shape: AttentionShape) -> dict[str, int]:
    """Return the strides of what both passes read, to be compiled offline."""
    return all_strides(shape, "qkv") | gradient_strides(shape, "o", "g")


def key_grid(config: KernelConfig, shape: AttentionShape) -> tuple[int]:
    return (-(-shape.seqlen_k // config.block_n) * shape.batch * shape.num_heads_kv,)


def key_sizes(shape: AttentionShape) -> dict[str, int]:
    """Return the run-time integers of the pass over keys."""
    heads = shape.batch * shape.num_heads_kv
    walked_bytes = shape.seqlen_q * (shape.head_dim + shape.head_dim_v) * shape.element_bytes * shape.group_size
    return run_time_sizes(shape, heads, min(heads, max(1, GROUP_BYTES // walked_bytes)))


def query_sizes(shape: AttentionShape) -> dict[str, int]:
    """Return the run-time integers of a pass over queries."""
    return run_time_sizes(shape, shape.batch * shape.num_heads, heads_per_group(shape))


def statistics_grid(config: KernelConfig, shape: AttentionShape) -> tuple[int]:
    return (-(-shape.seqlen_q // config.block_m) * shape.batch * shape.num_heads,)


def statistics_constants(config: KernelConfig, shape: AttentionShape) -> Options:
    """Return the constants of `statistics_kernel`: of the tiles of the pass over keys, whose products it repeats, and
    of all of which it checks the rows."""
    return tile_constants(shape, config.block_m, config.block_n, 1)._replace(RAGGED=True, DROPOUT=False)


def specs_before(config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
    """Return the compilations of what runs ahead of both passes."""
    rows = row_sums_spec(shape), *mask_specs(shape)
    if shape.dtype != "float32":
        return rows
    own, numbers = TensorArgument(shape.dtype), TensorArgument("float32")
    arguments = {name: value for name, value in common_arguments(shape).items() if name != "Lse"}
    arguments |= {"Highest": numbers, "Divided": own}
    arguments |= named_in_units(input_strides(shape) | gradient_strides(shape, "o", "d"))
    arguments |= query_sizes(shape) | {"OPTIONS": statistics_constants(config, shape)}
    options = {"num_warps": config.num_warps}
    return *rows, specialize(statistics_kernel, arguments, options)


def key_constants(config: KernelConfig, shape: AttentionShape, sums: int) -> Options:
    """Return the constants of `keys_kernel`."""
    return tile_constants(shape, config.block_m, config.block_n, config.num_stages)._replace(SUMS=sums)


def tile_constants(shape: AttentionShape, block_m: int, block_n: int, stages: int) -> Options:
    """Return the constants that both passes share."""
    ragged = shape.seqlen_q % block_m != 0 or shape.seqlen_k % block_n != 0 or shape.features.varlen
    return Options(
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_V=shape.head_dim_v,
        WIDTH=padded_width(shape.head_dim),
        WIDTH_V=padded_width(shape.head_dim_v),
        RAGGED=ragged,
        PRECISION=gradient_precision(shape.dtype),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        **feature_constants(shape),
    )
