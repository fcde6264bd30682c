"""The default config of the 8-bit Hopper forward, by widths of heads, lengths and mask."""

from blocktune.kernels.hopper.forward.layout import ROWS, WARPS
from blocktune.kernels.values.shape import AttentionShape, Causal

Values = tuple[int, ...]
"""The kernel's parameters in their order."""
WIDTHS = (64, 128, 256)
"""Head dimensions that tiles have; those between are filled up with zeros by the copy engine."""


MOST_READERS = {
    (64, False): 4096, (128, False): 2048, (256, False): 1024,
    (64, True): 2048, (128, True): 1024, (256, True): 1024,
}  # fmt: skip
"""Queries a key, on average, up to which transposing on the chip pays, by columns of values and whether causal."""


def tile_width(head_dim: int) -> int:
    """Return the columns of a tile that holds heads of this dimension."""
    return next(width for width in WIDTHS if width >= head_dim)


def default_values(shape: AttentionShape) -> Values:
    """Return what was best on a Hopper GPU, or near it and without spills in a loop. head_dim_v 256 leaves no
    registers for larger blocks, head_dim 64 some for more consumers; with a causal mask smaller blocks of keys
    are less in vain."""
    width, width_v, turns = tile_width(shape.head_dim), tile_width(shape.head_dim_v), int(turns_pay(shape))
    causal = shape.causal is not Causal.NONE
    if width_v == 256:
        return 2 * ROWS, 64, WARPS, 4, 1, turns
    if width == width_v == 64 and shape.seqlen_q > 2 * ROWS:
        return (4 * ROWS, 64, WARPS, 6, int(not causal), turns) if causal or turns else (3 * ROWS, 128, WARPS, 4, 0, 0)
    if width == width_v == 128 and causal and turns:
        return 2 * ROWS, 64, WARPS, 6, 1, 1
    return 2 * ROWS, 128, WARPS, 3 if width == 256 else 4, int(width == 128), turns


def turns_pay(shape: AttentionShape) -> bool:
    """Return whether the attention itself should transpose the values. It does so for every tile of queries that reads
    them, which takes more time; the pass before it reads and writes them once."""
    readers = shape.seqlen_q * shape.group_size
    if shape.causal is not Causal.NONE:
        readers //= 2
    return readers <= MOST_READERS[tile_width(shape.head_dim_v), shape.causal is not Causal.NONE]
