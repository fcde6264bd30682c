"""Small shapes by which every edge and feature of a kernel is checked on a GPU: under a memory checker, and next to the
reference in a contribution."""

from dataclasses import replace

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal

SMALL = AttentionShape(
    batch=2,
    num_heads=4,
    num_heads_kv=2,
    seqlen_q=160,
    seqlen_k=300,
    head_dim=64,
    head_dim_v=64,
    causal=Causal.LOWER_RIGHT,
)
"""No multiple of a tile, so that every edge is walked; query heads share key heads."""
MANY_KEYS = 2100
"""Of kernels that cut the keys into parts."""
HEAD_DIMS = ((64, 64), (80, 48), (64, 32), (128, 128), (256, 256))
"""Whole tiles, padded ones, values narrower than queries, and those that kernels cut in panels."""
LABELS = {"window": "window=40:9", "paged": "cached page=64"}
"""Features whose label is not their name."""
BASES = ("", "softcap", "block_sparse", "cached kv=int8")
"""Of these a kernel takes the first with every case: some kernels refuse plain shapes."""


def small_shapes(kernel: AttentionKernel, limits: ComputeLimits, dtype: str) -> list[AttentionShape]:
    """Return the shapes: all head dimensions, then each feature once with the first ones that the kernel takes; none
    where it cannot run."""
    words = sorted(LABELS.get(name, name) for name in kernel.features)
    starts = ((dims, word) for dims in HEAD_DIMS for word in BASES if _shape(kernel, limits, dtype, dims, word))
    first, base = next(starts, (None, ""))
    if first is None:
        return []
    wanted = [(dims, base) for dims in HEAD_DIMS]
    wanted += [(first, _together(base, word)) for word in words if word not in base.split()]
    shapes = (_shape(kernel, limits, dtype, dims, word) for dims, word in wanted)
    return [shape for shape in shapes if shape is not None]


def _together(base: str, word: str) -> str:
    """Return the features of both, each once: those of the second where both say a value."""
    return " ".join({one.partition("=")[0]: one for one in f"{base} {word}".split()}.values())


def _shape(
    kernel: AttentionKernel, limits: ComputeLimits, dtype: str, dims: tuple[int, int], features: str
) -> AttentionShape | None:
    """Return the small shape with these head dimensions and features, of many queries, of one, or of many keys, or None
    if the kernel has no config for it."""
    own = dtype if dtype in kernel.dtypes else FP8
    sized = replace(SMALL, head_dim=dims[0], head_dim_v=dims[1], dtype=own, direction=kernel.direction)
    whole = replace(sized, features=Features.parse(features))
    full = replace(whole, causal=Causal.NONE)
    for shape in (whole, full, replace(full, seqlen_q=1), replace(whole, seqlen_k=MANY_KEYS)):
        config = kernel.default_config(shape, limits) if kernel.unsupported(shape, limits) is None else None
        if config is not None and not kernel.violations(config, shape, limits):
            return shape
    return None
