"""What the dense backward kernels have in common on the host: rules, row sums and arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

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
from blocktune.kernels.base.flash_kernel import GROUP_BYTES, contiguous_strides, heads_per_group, padded_width
from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec
from blocktune.kernels.base.precision import product_precision
from blocktune.kernels.base.specialize import TensorArgument, specialize
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.portable.backward.gradient_kernels import keys_kernel, statistics_kernel
from blocktune.kernels.portable.backward.shared_memory import least_pass_columns, most_pass_columns
from blocktune.kernels.portable.backward.sparse_gradients import delta_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import AttentionShape, Direction

DELTA_ROWS, DELTA_WARPS = 64, 4
"""Rows and warps of a program that takes row sums: it waits for memory, whatever they are."""


def row_sums(out: Any, dout: Any, lse: Any, grad_lse: Any = None) -> Any:
    """rowsum(out * dout), laid out like the log-sum-exp, less the gradient of that, if it has one; out and dout [batch,
    num_heads, rows, head_dim_v] with contiguous rows."""
    batch, num_heads, rows, head_dim_v = out.shape
    sums = lse.new_empty(lse.shape)
    delta_kernel[(-(-rows // DELTA_ROWS), batch * num_heads)](
        out, dout, sums, *out.stride()[:3], *dout.stride()[:3], num_heads, rows, head_dim_v, padded_width(head_dim_v),
        DELTA_ROWS, num_warps=DELTA_WARPS,
    )  # fmt: skip
    return sums if grad_lse is None else sums.sub_(grad_lse)


def row_sums_spec(shape: AttentionShape) -> CompileSpec:
    """The compilation of `row_sums`."""
    tensor = TensorArgument(shape.dtype)
    arguments: dict[str, Any] = {"Out": tensor, "Dout": tensor, "Delta": TensorArgument("float32")}
    arguments |= contiguous_strides(shape, "o") | gradient_strides(shape, "o", "do")
    arguments |= {"num_heads": shape.num_heads, "seqlen_q": shape.seqlen_q, "BLOCK_M": DELTA_ROWS}
    arguments |= {"HEAD_DIM_V": shape.head_dim_v, "WIDTH_V": padded_width(shape.head_dim_v)}
    return specialize(delta_kernel, arguments, {"num_warps": DELTA_WARPS})


def gradient_strides(shape: AttentionShape, letter: str, name: str) -> dict[str, int]:
    """The strides of the gradient `name` of a contiguous tensor."""
    return {key.replace(f"_{letter}", f"_{name}"): value for key, value in contiguous_strides(shape, letter).items()}


@dataclass(frozen=True, slots=True)
class BackwardArguments:
    """What both passes over a call's tensors take: `tensors` before the gradients, then features and strides. Of
    float32, maxima stand in the place of the log-sum-exp, and the gradient of the output is over the row sums."""

    tensors: tuple[Any, ...]
    features: tuple[Any, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(
        cls, shape: AttentionShape, config: KernelConfig, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any,
        scale: float, extras: Extras,
    ) -> Self:  # fmt: skip
        """Takes the row sums of out * dout, which both passes need, and of float32 the statistics.

        Raises:
            UsageError: the tensor of a feature is missing, or dropout_p is outside [0, 1).
        """
        check_extras(shape.features, extras)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()  # autograd may hand in one value for all
        mask, slopes = mask_bytes(extras.mask), extras.alibi_slopes
        features = (mask, slopes, extras.cu_seqlens_q, extras.cu_seqlens_k, *run_time_numbers(extras, scale))
        strides = (*broadcast_strides(mask, 4), *broadcast_strides(slopes, 2), *lse_strides(q))
        strides += tuple(stride for tensor in (q, k, v, dout) for stride in tensor.stride()[:3])
        given = cls((q, k, v, dout, lse, row_sums(out, dout, lse, extras.grad_lse)), features, strides)
        return given.with_statistics(shape, config) if shape.dtype == "float32" else given

    def with_statistics(self, shape: AttentionShape, config: KernelConfig) -> Self:
        """The arguments with exact maxima in the place of a rounded log-sum-exp."""
        q, k, v, dout, lse, delta = self.tensors
        highest, divided = lse.new_empty(lse.shape), dout.new_empty(dout.shape)
        statistics_kernel[statistics_grid(config, shape)](
            q, k, v, dout, highest, delta, divided, *self.features, *self.strides, *divided.stride()[:3],
            *query_sizes(shape).values(), *statistics_constants(config, shape).values(), num_warps=config.num_warps,
        )  # fmt: skip
        strides = (*self.strides[:-3], *divided.stride()[:3])
        return replace(self, tensors=(q, k, v, divided, highest, delta), strides=strides)


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
        names = tuple(self.parameters)
        candidates = [
            KernelConfig.of(self.name, dict(zip(names, own, strict=True))) for own in self.preferences[first:]
        ]
        return self.first_fitting(candidates, shape, limits)

    def tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        """Of the pass over keys, which sums up both gradients."""
        summed = padded_width(shape.head_dim) + padded_width(shape.head_dim_v)
        return least_pass_columns(config.block_n, config.block_m, summed, shape, limits)

    def most_tensor_memory_columns(self, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
        summed = padded_width(shape.head_dim) + padded_width(shape.head_dim_v)
        return most_pass_columns(config.block_n, config.block_m, summed, shape, limits)

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        arguments = common_arguments(shape) | dict.fromkeys(("Dk", "Dv"), TensorArgument(shape.dtype))
        arguments |= gradient_strides(shape, "k", "dk") | gradient_strides(shape, "v", "dv")
        arguments |= {"Sums": self.sums_argument(config, shape)}
        arguments |= key_sizes(shape) | key_constants(config, shape, self.sums_code(config))
        return specialize(keys_kernel, arguments, launch_options(config))

    def sums_argument(self, config: KernelConfig, shape: AttentionShape) -> Any:
        """What stands for the sums of dq when the pass over keys is compiled offline."""
        del config, shape

    def sums_code(self, config: KernelConfig) -> int:
        """How the pass over keys adds up dq: `SUMS` of `keys_kernel`."""
        del config
        return 0


def launch_options(config: KernelConfig) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def common_arguments(shape: AttentionShape) -> dict[str, Any]:
    """What both passes take before sizes and constants, to be compiled offline."""
    arguments: dict[str, Any] = dict.fromkeys(("Q", "K", "V", "Dout"), TensorArgument(shape.dtype))
    arguments |= dict.fromkeys(("Lse", "Delta"), TensorArgument("float32")) | example_arguments(shape)
    for letter in "qkv":
        arguments |= contiguous_strides(shape, letter)
    return arguments | gradient_strides(shape, "o", "g")


def key_grid(config: KernelConfig, shape: AttentionShape) -> tuple[int]:
    return (-(-shape.seqlen_k // config.block_n) * shape.batch * shape.num_heads_kv,)


def key_sizes(shape: AttentionShape) -> dict[str, int]:
    """The run-time integers of the pass over keys."""
    heads = shape.batch * shape.num_heads_kv
    walked_bytes = shape.seqlen_q * (shape.head_dim + shape.head_dim_v) * shape.element_bytes * shape.group_size
    return run_time_sizes(shape, heads, min(heads, max(1, GROUP_BYTES // walked_bytes)))


def query_sizes(shape: AttentionShape) -> dict[str, int]:
    """The run-time integers of a pass over queries."""
    return run_time_sizes(shape, shape.batch * shape.num_heads, heads_per_group(shape))


def statistics_grid(config: KernelConfig, shape: AttentionShape) -> tuple[int]:
    return (-(-shape.seqlen_q // config.block_m) * shape.batch * shape.num_heads,)


def statistics_constants(config: KernelConfig, shape: AttentionShape) -> dict[str, Any]:
    """The constexpr arguments of `statistics_kernel`: of the tiles of the pass over keys, whose products it repeats."""
    values = tile_constants(shape, config.block_m, config.block_n, 1)
    return {name: values[name] for name in statistics_kernel.arg_names if name in values}


def specs_before(config: KernelConfig, shape: AttentionShape) -> tuple[CompileSpec, ...]:
    """The compilations of what runs ahead of both passes."""
    if shape.dtype != "float32":
        return (row_sums_spec(shape),)
    own, numbers = TensorArgument(shape.dtype), TensorArgument("float32")
    arguments = {name: value for name, value in common_arguments(shape).items() if name != "Lse"}
    arguments |= {"Highest": numbers, "Divided": own} | gradient_strides(shape, "o", "d")
    arguments |= query_sizes(shape) | statistics_constants(config, shape)
    options = {"num_warps": config.num_warps}
    return row_sums_spec(shape), specialize(statistics_kernel, arguments, options)


def key_constants(config: KernelConfig, shape: AttentionShape, sums: int) -> dict[str, Any]:
    """The constexpr arguments of `keys_kernel`."""
    values = {"SUMS": sums} | tile_constants(shape, config.block_m, config.block_n, config.num_stages)
    return {name: values[name] for name in keys_kernel.arg_names if name in values}


def tile_constants(shape: AttentionShape, block_m: int, block_n: int, stages: int) -> dict[str, Any]:
    """The constexpr arguments that both passes share."""
    ragged = shape.seqlen_q % block_m != 0 or shape.seqlen_k % block_n != 0 or shape.features.varlen
    return feature_constants(shape) | {
        "HEAD_DIM": shape.head_dim,
        "HEAD_DIM_V": shape.head_dim_v,
        "WIDTH": padded_width(shape.head_dim),
        "WIDTH_V": padded_width(shape.head_dim_v),
        "RAGGED": ragged,
        "PRECISION": product_precision(shape.dtype),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "STAGES": stages,
    }


def no_extras(extras: Extras | None) -> Extras:
    """The extras of a launch without features."""
    return NO_EXTRAS if extras is None else extras
