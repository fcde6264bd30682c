"""Which count of bytes belongs to which kernel.

    traffic_of(config, shape)                       # nothing is found in a cache
    traffic_of(config, shape, perfect_l2=True)      # in every launch, what blocks share comes from memory once

What a GPU moves lies between the two, and nearer to the second where what is shared fits L2.
"""

from collections.abc import Callable, Mapping

from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.traffic.backward import fused_backward_traffic, split_backward_traffic
from blocktune.tuner.traffic.decode import decode_traffic, single_launch_traffic
from blocktune.tuner.traffic.forward import general_traffic, transposed_traffic, turned_traffic, v1_kernel_traffic
from blocktune.tuner.traffic.model import Traffic, v2_traffic
from blocktune.tuner.traffic.sparse import random_blocks, sparse_backward_traffic, sparse_forward_traffic

Count = Callable[[KernelConfig, AttentionShape, bool], Traffic]
"""From a config, a shape and `perfect_l2`."""


def traffic_of(config: KernelConfig, shape: AttentionShape, *, perfect_l2: bool = False) -> Traffic:
    """The bytes that one call of a config moves. A block mask is taken to be one of a quarter of the blocks, a mask
    tensor to serve all heads, and lengths of packed sequences and caches to be the longest.

    Raises:
        UsageError: nobody has counted this kernel.
    """
    try:
        count = COUNTS[config.kernel]
    except KeyError:
        raise UsageError(
            f"An IO model needs the kernel's loops, but has those of {', '.join(COUNTS)} and not of {config.kernel}. "
            "Add a line to tuner/traffic/by_kernel.py."
        ) from None
    return count(config, shape, perfect_l2)


def is_plain_v2(config: KernelConfig, shape: AttentionShape) -> bool:
    """Whether the kernel is FlashAttention-2 in one launch, and nothing else; a forward without features that nobody
    has counted is taken for one."""
    plain = shape.direction is Direction.FORWARD and not shape.features
    return COUNTS.get(config.kernel, _v2 if plain else None) is _v2


def _v1(config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    del perfect_l2  # the output is written anew in every pass
    return v1_kernel_traffic(shape, config.block_m, config.block_n)


def _v2(config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    return v2_traffic(shape, config.block_m, config.block_n, perfect_l2=perfect_l2)


def _transposed(config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    return transposed_traffic(shape, config.block_m, config.block_n, perfect_l2=perfect_l2)


def _turned(config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    return turned_traffic(shape, config.block_m, config.block_n, perfect_l2=perfect_l2)


def _general(config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    return general_traffic(shape, config.block_m, config.block_n, perfect_l2=perfect_l2)


def _decode(config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    return decode_traffic(shape, config, perfect_l2=perfect_l2)


def _single_launch_decode(config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    return single_launch_traffic(shape, config, perfect_l2=perfect_l2)


def _sparse_forward(config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    return sparse_forward_traffic(shape, config.block_m, config.block_n, random_blocks(shape), perfect_l2=perfect_l2)


def _sparse_backward(config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    own = config.parameters
    keys, queries = (own["kv_block_m"], own["kv_block_n"]), (config.block_m, config.block_n)
    return sparse_backward_traffic(
        shape, keys=keys, queries=queries, blocks=random_blocks(shape), perfect_l2=perfect_l2
    )


def _hopper_backward(config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    return fused_backward_traffic(shape, config.block_m, config.block_n, perfect_l2=perfect_l2, own_lse=True)


def _fused_backward(config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    return fused_backward_traffic(shape, config.block_m, config.block_n, perfect_l2=perfect_l2)


def _split_backward(config: KernelConfig, shape: AttentionShape, perfect_l2: bool) -> Traffic:
    own = config.parameters
    keys, queries = (config.block_m, config.block_n), (own["dq_block_m"], own["dq_block_n"])
    return split_backward_traffic(shape, keys=keys, queries=queries, perfect_l2=perfect_l2)


COUNTS: Mapping[str, Count] = {
    "flash_fwd": _v2,
    "flash_fwd_tma": _v2,
    "flash_fwd_hopper": _v2,
    "flash_fwd_hopper_short": _v2,
    "flash_fwd_fp8": _turned,
    "flash_fwd_padded": _v2,
    "flash_fwd_transposed": _transposed,
    "flash_fwd_general": _general,
    "flash_fwd_sparse": _sparse_forward,
    "flash_v1": _v1,
    "flash_v2": _v2,
    "flash_decode": _decode,
    "flash_decode_hopper": _single_launch_decode,
    "flash_bwd_hopper": _hopper_backward,
    "flash_bwd_fused": _fused_backward,
    "flash_bwd_split": _split_backward,
    "flash_bwd_sparse": _sparse_backward,
}
"""By kernel name."""
