"""The fixed shapes of a contribution: a dozen of each direction, the same on every GPU of a type."""

from dataclasses import replace
from itertools import chain, product

from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.candidates.shape_defaults import complete_shape

SHAPES_VERSION = 1
"""A change of the shapes is a new version: files of one version have the same rows."""

HEADS, KV_HEADS = 16, 4
SEQLENS = (2048, 512, 8192)
HEAD_DIMS = (128, 64)
CACHE_BATCHES, CACHE_SEQLENS = (16, 1), (8192, 2048, 32768)


def fixed_shapes(limits: ComputeLimits) -> tuple[AttentionShape, ...]:
    """Return all shapes, the directions in turns, so that a run that ends early has some of each."""
    dtype = sixteen_bit_type(limits)
    forwards = [
        complete_shape(seq, dim, heads=HEADS, dtype=dtype, causal=causal)
        for seq, dim, causal in product(SEQLENS, HEAD_DIMS, (True, False))
    ]
    backwards = [replace(shape, direction=Direction.BACKWARD) for shape in forwards]
    decodings = [
        complete_shape(1, dim, batch=batch, heads=HEADS, kv_heads=KV_HEADS, seq_k=keys, dtype=dtype)
        for keys, dim, batch in product(CACHE_SEQLENS, HEAD_DIMS, CACHE_BATCHES)
    ]
    return tuple(chain.from_iterable(zip(forwards, backwards, decodings, strict=True)))


def sixteen_bit_type(limits: ComputeLimits) -> str:
    """Return the 16-bit type that models use on a GPU: tensor cores before 8.0 have no bfloat16."""
    return "bfloat16" if limits.cc >= (8, 0) else "float16"
