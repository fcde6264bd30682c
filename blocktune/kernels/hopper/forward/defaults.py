"""The default config of the Hopper forward, by widths of heads, lengths, masks and features."""

from blocktune.kernels.hardware.limits import MULTIPROCESSORS
from blocktune.kernels.hopper.biases.arguments import is_biased, mask_code
from blocktune.kernels.hopper.forward.layout import (
    ROWS,
    bounds_of,
    mask_constants,
    tile_width,
)
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape

Values = tuple[int, ...]
"""The kernel's parameters in their order, without `num_warps`; those that are left out are zeros."""

TWO_WITH_QUERIES = (128, 64, 4, 0, 1, 0, 64)
"""Two consumers with queries in registers: they take the least time up to head_dim 96 where tiles have few keys, or
fill no more than a wave. Larger tiles take up to 1.9 times as long there."""

FEW_KEYS, FEW_KEYS_OF_96, MOST_OF_A_WAVE = 384, 256, 2048
"""Keys up to which this holds: for any number of tiles, of 64 and of 96 columns, and for those of a wave."""

THREE_OVER_WORK = (192, 64, 4, 0, 1, 0, 64)
"""Three consumers with queries in registers: best where scores or masks are work."""

THREE_OVER_KEYS = (192, 64, 4, 0, 0, 0)
"""Three consumers: best where keys and values take long to arrive."""

FEW_PACKED_KEYS = 1024
"""Of packed sequences without a diagonal, up to which tiles of 64 keys take less time at head_dim 128: a tenth at 730
keys."""

SOON_READ = 512
"""Keys up to which tiles of fewer rows are best all the same."""

MOST_MASKED_KEYS, MOST_ODD_KEYS, FEWEST_ODD_KEYS, MOST_MASKED_FLOPS = 512, 160, 32, 1 << 30
"""Keys, an odd number of them with heads up to 64 and with wider ones, and floating point operations up to which a
kernel that reads the mask itself takes 10 to 50 % less time than one that packs it for this one first, which takes 5
us; half as many operations with heads of more than 128."""

NARROW_KEYS = 384
"""In sight of a query on both sides, up to which tiles of two consumers with 64 keys are best."""

NARROW_WINDOW = 1024
"""Keys to the left up to which tiles of fewer rows hide less than they cost, at head_dim 64."""


def default_values(shape: AttentionShape) -> Values:
    """Return what was best on a Hopper GPU, or near it and without spills in a loop: at head_dim 64 and 128 with 512 to
    16384 keys, causal at 96 and 256. At others the largest tiles that compile without spills."""
    width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
    early_p = int(_loop_has_work(shape))  # which leaves no room for float32 probabilities and the next scores
    if width == 192 and width_v in (128, 192) and not early_p and not shape.features:
        return _with_queries_in_registers(width_v)
    if (width, width_v) == (192, 128) and not shape.features and shape.seqlen_k > MOST_OF_A_WAVE:
        return 128, 64, 3, 0, 0, 0, 64  # with keys left over
    if width == width_v == 192 and shape.features.names == {"varlen"}:
        return 128, 64, 3, 0, 1, 0, 64  # a fifth less time than with one slot less, and K and V given back apart
    if width == width_v == 192 and not shape.features:
        return 128, 64, 3, 0, 0, 0  # with keys left over
    if max(width, width_v) == 64:
        return _default_of_64(shape)
    if width == width_v == 256 and not is_biased(shape):
        return 128, 64, 4, 2, 1, 0, 128, 1  # K and V in one ring
    if width > 192 or width_v > 128:
        return 128, 64, 2, 1, early_p, early_p
    if width + width_v < 256:
        return _default_of_96(shape)
    if width == 192 or (shape.features.varlen and not _bends_or_packs(shape)):
        if max(width, width_v) == 128 and shape.features.names == {"varlen"} and shape.seqlen_k <= FEW_PACKED_KEYS:
            return 128, 64, 4, 0, 0, 0
        early_p |= width + width_v > 256
        return 128, 128, 2, 1, early_p, early_p
    return _default_of_128(shape)


def waits_for_mask(shape: AttentionShape) -> bool:
    """Return whether a call with a mask is so small that packing the mask takes longer than what it saves. The portable
    kernel reads rows of a mask slowly that 8 does not divide."""
    if shape.features.names not in ({MaskKind.BOOLEAN}, {MaskKind.ADDITIVE}):
        return False
    width = max(tile_width(shape.head_dim), tile_width(shape.head_dim_v))
    odd_keys = MOST_ODD_KEYS if width == 64 else FEWEST_ODD_KEYS
    most_keys, most_flops = odd_keys if shape.seqlen_k % 8 else MOST_MASKED_KEYS, MOST_MASKED_FLOPS >> (width > 128)
    return shape.seqlen_k <= most_keys and shape.flops <= most_flops


def _loop_has_work(shape: AttentionShape) -> bool:
    """Return whether steps do more than products and a softmax: masks, keys that are left over, dropout."""
    masks = mask_constants(128, shape)
    return masks["RAGGED"] or not masks["ALIGNED"] or mask_code(shape) > 0 or shape.features.dropout


def _with_queries_in_registers(width_v: int) -> Values:
    """Return the default of full and causal attention whose lengths fit the blocks, at head_dim 192. Blocks of 64 keys
    read less of shared memory with queries in registers, and leave room for three slots. With head_dim_v 192
    more than 64 of head_dim in queries take 5 % more time, without a spill."""
    return 128, 64, 3, 0, 0, 0, 192 if width_v == 128 else 64


def _default_of_64(shape: AttentionShape) -> Values:
    most = MOST_OF_A_WAVE if _tiles(2 * ROWS, shape) <= MULTIPROCESSORS else FEW_KEYS
    if not shape.features and shape.seqlen_k <= most:
        return TWO_WITH_QUERIES
    if shape.seqlen_q <= 2 * ROWS:
        return 128, 128, 4, 0, 0, 1  # larger tiles would be empty
    if shape.features.dropout:
        return 128, 128, 4, 0, 0, 1
    if shape.features.mask is MaskKind.ADDITIVE:
        return 192, 64, 4, 0, 1, 1, 64  # four consumers have no registers for values that are loaded ahead
    if is_biased(shape):
        return _default_of_biased_64(shape)
    if _is_narrow(shape):
        return 128, 64, 4, 0, 0, 0, 64
    if shape.features.window:
        return THREE_OVER_WORK if shape.features.window[0] <= NARROW_WINDOW else (256, 64, 3, 0, 1, 0)
    if shape.features.varlen and shape.seqlen_k <= 1024:
        return THREE_OVER_WORK  # four consumers compute more rows that are hidden
    causal, long = bounds_of(shape)[0] is not None, shape.seqlen_k > 4096 and not shape.features
    if causal:
        return (256, 64, 4, 0, 1, 0) if long else _causal_by_rows(shape)
    return (192, 128, 4, 0, 1, 0) if long else _full_by_rows(shape)


def _full_by_rows(shape: AttentionShape) -> Values:
    """Return the default of full attention of head_dim 64: the tile by which the busiest multiprocessor has the fewest
    rows, where larger ones take less time a row. 514 queries of 96 heads fill tiles of 256 rows by two thirds."""
    four, three, two = (_rows_in_turn(consumers * ROWS, shape) for consumers in (4, 3, 2))
    if shape.features or four <= min(1.04 * three, 1.08 * two):
        return 256, 64, 4, 0, 1, 0
    return THREE_OVER_WORK if 1.04 * three <= 1.08 * two else TWO_WITH_QUERIES


def _default_of_biased_64(shape: AttentionShape) -> Values:
    """Return the default of ALiBi and boolean masks at head_dim 64: of ALiBi alone and without a bound, what takes the
    least time where keys are left over, and with many keys what plain attention takes."""
    if shape.features.names != {"alibi"} or bounds_of(shape) != (None, None):
        return 256, 64, 4, 0, 1, 0
    return (192, 128, 4, 0, 1, 0) if shape.seqlen_k > 4096 else (256, 64, 4, 0, 1, int(shape.seqlen_k % 64 > 0))


def _causal_by_rows(shape: AttentionShape) -> Values:
    """Return the default of causal shapes of head_dim 64: the tile by which the busiest multiprocessor has the fewest
    rows, where four consumers take the least time a row."""
    four, three, two = (_rows_in_turn(consumers * ROWS, shape) for consumers in (4, 3, 2))
    if four <= min(1.04 * three, 1.08 * two):
        return 256, 64, 4, 0, 1, 0
    return (192, 64, 4, 0, 1, 0, 64) if 1.04 * three <= 1.08 * two else (128, 64, 4, 0, 0, 1, 64)


def _default_of_96(shape: AttentionShape) -> Values:
    """Return the default where head_dim is padded to 96: three consumers take 3 to 7 % less a row than two, but for
    causal shapes that fill the large tiles."""
    causal, full = bounds_of(shape)[0] is not None, shape.seqlen_q % 128 == shape.seqlen_k % 128 == 0
    if shape.features.mask is MaskKind.ADDITIVE:
        return TWO_WITH_QUERIES  # larger tiles have no registers for the mask and spill
    if shape.seqlen_k <= FEW_KEYS_OF_96 and not shape.features:
        return TWO_WITH_QUERIES
    if _is_narrow(shape):
        return 128, 64, 4, 0, 0, 0
    if shape.features.names == {"varlen"} and _three_fit(shape):
        return THREE_OVER_WORK  # 2 to 3 % less time than without queries in registers
    if reads_slowly(shape) or (_three_fit(shape) and not (causal and full)):
        return THREE_OVER_KEYS
    if causal and full and shape.seqlen_k <= MOST_OF_A_WAVE:
        return TWO_WITH_QUERIES
    return (128, 64, 4, 0, 0, 1, 64) if causal and not full else (128, 128, 3, 0, 0, 0)


def _default_of_128(shape: AttentionShape) -> Values:
    """Return the default where head_dim is padded to 128. Full attention and windows take three consumers 5 to 9 % less
    time a row, which pays where no multiprocessor has much more rows than with two."""
    (right, left), short = bounds_of(shape), shape.seqlen_k <= 1024
    three_fit = _three_fit(shape)
    if shape.features.dropout:
        return 128, 64, 4, 0, 0, 0, 128
    if _bends_or_packs(shape):
        return THREE_OVER_WORK if three_fit and not short else (128, 64, 4, 0, 0, 1, 128)
    under_a_diagonal = right is not None and left is None
    if is_biased(shape) and _three_read_the_mask(shape, three_fit):
        return 192, 64, 4, 0, 1, 0
    if is_biased(shape):
        return _one_ring(shape) if under_a_diagonal or shape.features.alibi else (128, 128, 2, 1, 1, 1)
    if columns := columns_in_registers(shape):
        return 128, 64, 4, 0, 0, 0, columns
    if reads_slowly(shape):
        return THREE_OVER_KEYS
    masked = int(not mask_constants(128, shape)["ALIGNED"])
    if under_a_diagonal and not short and _three_have_enough(shape):
        return 192, 64, 4, 1, 1, 0
    if under_a_diagonal:
        return (128, 64, 3, 0, 0, 0) if short else _one_ring(shape)
    if _is_narrow(shape) and not three_fit:
        return 128, 64, 4, 0, 1, 1, 128
    if three_fit:
        return (192, 64, 4, 0, 1, 0) if _loop_has_work(shape) else (192, 64, 3, 0, 0, 0)
    many = shape.seqlen_k <= 4096 and _tiles(2 * ROWS, shape) > 2 * MULTIPROCESSORS
    return (128, 128, 3, 0, 0, 0) if many or (short and not masked) else (128, 128, 2, 1, masked, masked)


def reads_slowly(shape: AttentionShape) -> bool:
    """Return whether rows of many keys or values end inside of 32 bytes. Such tiles arrive so slowly that three
    consumers take 5 to 25 % less time than two at head_dim 72, 88 and 104, however many tiles there are."""
    odd = shape.head_dim % 16 > 0 or shape.head_dim_v % 16 > 0
    return odd and not shape.features and shape.seqlen_k > SOON_READ


def _bends_or_packs(shape: AttentionShape) -> bool:
    """Return whether a causal shape of head_dim 128 has ALiBi, a soft cap or sequences of their own lengths alone: work
    for every score, or tiles that are masked often. Tiles of 64 keys take 5 to 11 % less time over it."""
    features, (right, left) = shape.features, bounds_of(shape)
    causal = right is not None and left is None and not mask_code(shape)
    return causal and bool(features.alibi or features.softcap or features.varlen)


def _is_narrow(shape: AttentionShape) -> bool:
    """Return whether queries see few keys on both sides, and nothing but that window: tiles of fewer rows and keys then
    hide 3 to 28 % less."""
    left, right = shape.features.window or (NARROW_WINDOW, 0)
    return shape.features.names == {"window"} and right > 0 and left + right <= NARROW_KEYS


def _three_fit(shape: AttentionShape) -> bool:
    """Return whether three consumers leave no multiprocessor with much more rows than two."""
    return _rows_in_turn(3 * ROWS, shape) <= 1.04 * _rows_in_turn(2 * ROWS, shape)


def _three_have_enough(shape: AttentionShape) -> bool:
    """Return whether three consumers are best under a diagonal: 0 to 7 % less time than one ring. With few of their
    larger tiles multiprocessors end apart, which takes up to 5 % more, and with rows left over they compute more.
    Grouped heads take 1 % more time."""
    whole = shape.seqlen_q % (2 * ROWS) == 0 and not _loop_has_work(shape)
    return whole and shape.group_size == 1 and _tiles(3 * ROWS, shape) >= 6 * MULTIPROCESSORS


def three_are_ahead(shape: AttentionShape) -> bool:
    """Return whether three consumers leave the busiest multiprocessor clearly fewer rows than two."""
    return _rows_in_turn(3 * ROWS, shape) < 0.95 * _rows_in_turn(2 * ROWS, shape)


def _one_ring(shape: AttentionShape) -> Values:
    """Return tiles of 128 keys in one ring of slots, where V is awaited after the next scores: under a diagonal and
    with ALiBi 1 to 5 % less time than two slots that hold K and V."""
    early_p = int(_loop_has_work(shape))
    return 128, 128, 4, 2, early_p, early_p


def _three_read_the_mask(shape: AttentionShape, three_fit: bool) -> bool:
    """Return whether three consumers are best at head_dim 128: they hide more of the loads. With an additive mask they
    have no registers for a window or an unaligned diagonal in the loop."""
    causal = bounds_of(shape)[0] is not None
    if shape.features.mask is MaskKind.ADDITIVE:
        return mask_constants(128, shape)["ALIGNED"] and (causal or three_fit)
    return shape.features.mask is MaskKind.BOOLEAN and not causal and three_fit


def columns_in_registers(shape: AttentionShape) -> int:
    """Return the columns of Q that registers hold where heads take 128: with few keys this takes 3 to 12 % less time.
    With more of them tiles of 128 keys do, and three consumers where these leave a multiprocessor fewer rows."""
    causal, keys = bounds_of(shape)[0] is not None, shape.seqlen_k
    if shape.features or {tile_width(shape.head_dim), tile_width(shape.head_dim_v)} != {128}:
        return 0
    if _loop_has_work(shape) if causal else three_are_ahead(shape):
        return 0
    if causal and keys > 1024 and reads_slowly(shape):
        return 0
    if keys <= (1536 if causal else 1024):
        return 128
    return 64 if causal and keys <= 2048 else 0


def _rows_in_turn(block_m: int, shape: AttentionShape) -> int:
    """Return the rows of all tiles that the busiest multiprocessor takes."""
    return -(-_tiles(block_m, shape) // MULTIPROCESSORS) * block_m


def _tiles(block_m: int, shape: AttentionShape) -> int:
    """Return how many tiles there are of `block_m` rows."""
    return -(-shape.seqlen_q // block_m) * shape.batch * shape.num_heads
