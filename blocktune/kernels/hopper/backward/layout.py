"""What the Hopper backward makes of a shape, on the host: the width of its products, its form, and its workspace."""

from dataclasses import dataclass
from typing import Any, Self

from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, LOG2_E
from blocktune.kernels.hopper.biases.arguments import alibi_code, mask_code
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import UNLIMITED, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal

BLOCK_M = 64
"""Queries of a step."""
BLOCK_N = 128
"""Keys of a block, 64 for each of its two computing warpgroups."""
WIDE_BLOCK_N = 64
"""Keys of a block whose heads are wider than 128: both warpgroups work on all of them, unless `has_halves`."""
MIN_HALVED_TILES = 67
"""Tiles of 128 keys from which on they are taken: up to half as many as multiprocessors leave some of them idle, which
tiles of 64 keys do not. Under a diagonal tiles have half the steps on average, and twice as many are needed."""
WIDTHS = (64, 80, 96, 128, 192, 256)
"""Columns of the products; a head that is narrower is filled up with zeros."""
TAILED_WIDTHS = (80, 96)
"""Those that are no power of two, of tiles of 128 columns: 64 columns and a tail of 16 or 32."""
WIDE = 192
"""The fewest columns of queries and keys where a head is wider than 128."""
PANEL = 64
"""Columns of a panel, of which wider heads than 128 are made."""
MIN_HEAD_DIM = 24
"""Below, the portable kernels are as fast."""
NARROW_HEADS = 32
"""Of which half of the narrowest product or more is zeros."""
HEAD_DIM_DIVISOR = 8
"""16 bytes, what the copy engine moves."""
LENGTH_DIVISOR = 128
"""Of both lengths in the plain form."""
SHARED_BYTES = 226 << 10
"""Of a block, without its barriers."""
BARRIER_BYTES = 1 << 10
"""More than they take."""
REGISTERS = (240, 24)
"""Registers of a thread of the two warpgroups, and of the warps that copy and add: together they share 65,536."""
FORM_ARGUMENTS = ("rows", "right", "left", "cap_in", "cu_q", "cu_k", "turns")
"""The arguments of the kernels that the plain form has no use for."""
LIST_ARGUMENTS = ("lists", "list_batch", "list_head", "list_tile")
"""What a block mask needs."""
SHORT_WALK = 512
"""Queries of a walk at most, of head_dim 128, with which it pays to end a tile while the next one begins. On an
H200 0.5 to 1.1 % with 512 queries, 0.2 % with 1024 and nothing with 2048."""
GROUPED_TILES = 8
"""Tiles of a head that begin with the same queries, of groups of head_dim 128 whose walks begin apart."""
SMALLEST_SCALE = 1e-30
"""Scales nearer to zero are taken for this one: the log-sum-exp is divided by the scale."""


def width_of(shape: AttentionShape) -> int:
    """Return the columns of the products with queries and keys of this shape, whose heads `WIDTHS` hold."""
    least = WIDE if is_wide(shape) else shape.head_dim_v
    return next(width for width in WIDTHS if max(shape.head_dim, least) <= width)


def tail_of(shape: AttentionShape) -> int:
    """Return the columns of the products beyond 64 where heads have 65 to 96, else 0."""
    width = width_of(shape)
    return width - PANEL if width in TAILED_WIDTHS else 0


def tile_width(shape: AttentionShape) -> int:
    """Return the columns of tiles of queries and keys in shared memory."""
    return 2 * PANEL if tail_of(shape) else width_of(shape)


def width_v(shape: AttentionShape) -> int:
    """Return the columns of the products with values and outputs."""
    if not is_wide(shape):
        return width_of(shape)
    return max(2 * PANEL, -(-shape.head_dim_v // PANEL) * PANEL)


def is_wide(shape: AttentionShape) -> bool:
    return max(shape.head_dim, shape.head_dim_v) > 128


def is_listed(shape: AttentionShape) -> bool:
    """Return whether lists of a block mask name the blocks of queries that see a tile of keys."""
    return shape.features.mask is MaskKind.BLOCK_SPARSE


def is_bounded(shape: AttentionShape) -> bool:
    """Return whether a query sees keys up to some place only, as under a diagonal."""
    _, right = shape.features.window or (UNLIMITED, UNLIMITED)
    return shape.causal is not Causal.NONE or right != UNLIMITED


def goes_back(shape: AttentionShape) -> bool:
    """Return whether dq is added up in a fixed order in which the tiles of the first keys add first (turns.py)."""
    return shape.features.deterministic and (is_listed(shape) or not is_bounded(shape))


def goes_both_ways(shape: AttentionShape) -> bool:
    """Return whether they add first in the last heads of a launch alone: under a diagonal, where their tiles are the
    longest (turns.py)."""
    left, _right = shape.features.window or (UNLIMITED, UNLIMITED)
    return shape.features.deterministic and not goes_back(shape) and left == UNLIMITED


def is_deferred(shape: AttentionShape) -> bool:
    """Return whether dq of a block is computed after the next one, which takes registers that a width of 128 lacks."""
    return width_of(shape) == 64


def has_halves(shape: AttentionShape) -> bool:
    """Return whether each warpgroup owns half of 128 keys, though heads are wider than 128 (wide/halves.py): keys of up
    to 192 columns and values of up to 128, whose registers leave no room for a fixed order, a soft cap or biases."""
    features = shape.features
    if not is_wide(shape) or (width_of(shape), width_v(shape)) != (WIDE, 2 * PANEL):
        return False
    if features.deterministic or features.softcap or features.alibi or features.mask is not MaskKind.NONE:
        return False
    tiles = -(-shape.seqlen_k // BLOCK_N) * shape.num_heads_kv * shape.batch
    return tiles >= MIN_HALVED_TILES * (2 if is_bounded(shape) else 1)


def keys_of_block(shape: AttentionShape) -> int:
    return WIDE_BLOCK_N if is_wide(shape) and not has_halves(shape) else BLOCK_N


def panels(shape: AttentionShape) -> tuple[int, int]:
    """Return the panels of a wide head: those of queries and keys, and those of values and outputs."""
    return width_of(shape) // PANEL, width_v(shape) // PANEL


def descriptor_width(shape: AttentionShape) -> int:
    """Return the columns that one copy moves."""
    return PANEL if is_wide(shape) else tile_width(shape)


def dq_part(shape: AttentionShape) -> int:
    """Return the columns of the accumulator that holds a warpgroup's part of dq of 64 queries: queries where it is
    transposed; with a tail, of the larger part."""
    return BLOCK_M // 2 if is_deferred(shape) else 64


def sums_part(shape: AttentionShape) -> int:
    """Return the columns of a part of the sums of dq, which are in the order of registers inside it."""
    return tail_of(shape) or dq_part(shape)


def added_rows(shape: AttentionShape) -> int:
    """Return the rows of 64 sums of dq that one copy adds to."""
    return 32 if has_halves(shape) else sums_part(shape)


def dq_bytes(shape: AttentionShape) -> int:
    """Return the bytes of dq of a step on its way to the sums: all of it, or two panels of a wide head."""
    return 2 * 64 * dq_part(shape) * FLOAT32_BYTES


def runs_ahead(shape: AttentionShape, config: KernelConfig) -> bool:
    """Return whether scores of the next step are issued while dk of this one runs: tiles of 128 columns with the
    switches of the default config."""
    return tile_width(shape) == 128 and ahead_switches(shape).items() <= config.parameters.items()


def ahead_switches(shape: AttentionShape) -> dict[str, int]:
    """Return the switches of a config whose scores run ahead."""
    return {"fold_lse": int(not shape.features.softcap), "fold_delta": 1, "named_barriers": 3, "persistent": 1}


def is_added_apart(shape: AttentionShape, persistent: bool) -> bool:
    """Return whether warps of their own add dq however far scores run ahead."""
    if is_wide(shape):
        return False
    alone = is_deferred(shape) and persistent and is_plain(shape) and shape.causal is Causal.NONE
    return shape.features.deterministic or is_listed(shape) or alone


def adds_registers(shape: AttentionShape, persistent: bool) -> bool:
    """Return whether dq is added to its sums from registers, which is faster at a width of 64 under a diagonal and was
    not compared in other forms than the plain one."""
    return is_deferred(shape) and not is_added_apart(shape, persistent)


def dq_slots(shape: AttentionShape, config: KernelConfig) -> int:
    """Return of how many steps there is dq in shared memory: where warps of their own add it two, if they fit."""
    if not (runs_ahead(shape, config) or is_added_apart(shape, bool(config.parameters["persistent"]))):
        return 1
    return 2 if bytes_beside_dq(shape, config.num_stages) + 2 * dq_bytes(shape) <= SHARED_BYTES else 1


def bytes_beside_dq(shape: AttentionShape, num_stages: int) -> int:
    """Return the bytes of K and V; the stages of Q, dO and two float32 statistics; two buffers of dS. Of a wide head
    one of dS, one of float32 P, and a stage less of dO and its statistic, unless a warpgroup owns half of its keys."""
    row_bytes = tile_width(shape) * shape.element_bytes
    if has_halves(shape):
        per_query = (width_of(shape) + width_v(shape)) * shape.element_bytes + 2 * FLOAT32_BYTES
        return (BLOCK_N + num_stages * BLOCK_M) * per_query + 2 * BLOCK_N * BLOCK_M * shape.element_bytes
    if is_wide(shape):
        of_keys = (WIDE_BLOCK_N + num_stages * BLOCK_M) * row_bytes
        of_values = (WIDE_BLOCK_N + (num_stages - 1) * BLOCK_M) * width_v(shape) * shape.element_bytes
        statistics = (2 * num_stages - 1) * BLOCK_M * FLOAT32_BYTES
        return of_keys + of_values + statistics + WIDE_BLOCK_N * BLOCK_M * (FLOAT32_BYTES + shape.element_bytes)
    stage_bytes = 2 * BLOCK_M * row_bytes + 2 * BLOCK_M * FLOAT32_BYTES
    return 2 * BLOCK_N * row_bytes + num_stages * stage_bytes + 2 * BLOCK_N * BLOCK_M * shape.element_bytes


def key_rows(shape: AttentionShape, parts: int) -> int:
    """Return the rows of the float32 gradients that parts of a group of query heads leave: whole tiles of keys."""
    tiles = -(-shape.seqlen_k // BLOCK_N)
    return shape.batch * shape.num_heads_kv * parts * tiles * BLOCK_N


def is_plain(shape: AttentionShape) -> bool:
    """Return whether all tiles are whole, and nothing is masked but the diagonal of equal lengths."""
    square = shape.causal is Causal.NONE or shape.seqlen_q == shape.seqlen_k
    whole = shape.seqlen_q % LENGTH_DIVISOR == 0 and shape.seqlen_k % LENGTH_DIVISOR == 0
    exact = shape.head_dim == shape.head_dim_v == width_of(shape) in (64, 128)
    return square and whole and exact and not shape.features


def is_short(shape: AttentionShape) -> bool:
    """Return whether tiles are short for lack of queries, without features, which take the registers of both tiles."""
    return tile_width(shape) == 128 and shape.seqlen_q * shape.group_size <= SHORT_WALK and not shape.features


def form_of(shape: AttentionShape) -> dict[str, Any]:
    """Return the constants of the kernels that follow from a shape alone."""
    features, (left, _right) = shape.features, shape.features.window or (UNLIMITED, UNLIMITED)
    general, varlen, listed, bounded = not is_plain(shape), features.varlen, is_listed(shape), is_bounded(shape)
    has_diagonal = bounded or left != UNLIMITED or features.alibi
    apart = not (bounded or left != UNLIMITED or features.deterministic or listed)
    together = GROUPED_TILES if tile_width(shape) == 128 and shape.group_size > 1 else 1
    return {
        "CAUSAL": shape.causal is not Causal.NONE,
        "GENERAL": general,
        "RIGHT": general and bounded,
        "LEFT": left != UNLIMITED,
        "LOWER_RIGHT": varlen and has_diagonal and shape.causal is not Causal.UPPER_LEFT,
        "RAGGED_K": varlen or listed or shape.seqlen_k % keys_of_block(shape) != 0,
        "RAGGED_Q": varlen or shape.seqlen_q % BLOCK_M != 0,
        "PACKED": varlen,
        "LISTED": listed,
        "SHORT": (left != UNLIMITED or listed or is_short(shape)) and not features.deterministic,
        "TOGETHER": together if apart else 0,
        "ORDERED": features.deterministic,
        "BACK": goes_back(shape),
        "BOTH_WAYS": goes_both_ways(shape),
        "SOFTCAP": features.softcap,
        "ALIBI": alibi_code(shape),
        "MASK": mask_code(shape),
        "MASK_AHEAD": features.mask is MaskKind.ADDITIVE and apart and not features.dropout,
        "DROPOUT": features.dropout,
        "DEFER": is_deferred(shape),
    }


def bounds_of(shape: AttentionShape) -> tuple[int, int]:
    """Return (upper, lower): query i sees keys i + lower .. i + upper. Of packed sequences: where their lengths are
    equal."""
    diagonal = 0 if shape.features.varlen else shape.diagonal
    left, right = shape.features.window or (UNLIMITED, UNLIMITED)
    upper = 0 if shape.causal is not Causal.NONE else max(right, 0)
    return diagonal + upper, diagonal - max(left, 0)


def mask_bounds(shape: AttentionShape) -> tuple[int | None, int | None]:
    """Return `bounds_of` the pairs that are read of a mask, None without such a bound; no bounds where each sequence
    has its own."""
    left, _right = shape.features.window or (UNLIMITED, UNLIMITED)
    if shape.features.varlen:
        return None, None
    upper, lower = bounds_of(shape)
    return upper if is_bounded(shape) else None, None if left == UNLIMITED else lower


@dataclass(frozen=True, slots=True)
class Rows:
    """The workspace of a shape: `of_head` padded rows for every query head (packed) or every head and batch entry.

    count: of all heads. longest: padded rows of the longest sequence.
    """

    of_head: int
    count: int
    longest: int

    @classmethod
    def of(cls, shape: AttentionShape, tokens: int) -> Self:
        """Take the sizes of a call. tokens: rows of the query tensor, seqlen_q unless sequences are packed."""
        longest = -(-shape.seqlen_q // BLOCK_M) * BLOCK_M
        if shape.features.varlen:
            of_head = -(-tokens // BLOCK_M) * BLOCK_M + shape.batch * BLOCK_M
            return cls(of_head, of_head * shape.num_heads, longest)
        return cls(longest, longest * shape.num_heads * shape.batch, longest)


def scale_arguments(shape: AttentionShape, scale: float, extras: Extras) -> tuple[float, float, float | None]:
    """Return (scale, scale_log2, cap_in) of the kernel."""
    own = scale if abs(scale) > SMALLEST_SCALE else SMALLEST_SCALE
    if not shape.features.softcap:
        return float(scale), own * LOG2_E, None
    return float(scale), extras.softcap * LOG2_E, own / extras.softcap


def form_arguments(
    shape: AttentionShape, rows: Rows, cap_in: float | None, extras: Extras, turns: Any
) -> dict[str, Any]:
    """Return the arguments of the kernel that depend on its form, all None in the plain one."""
    if is_plain(shape):
        return dict.fromkeys(FORM_ARGUMENTS)
    right, left = bounds_of(shape)
    return {
        "rows": rows.of_head,
        "right": right,
        "left": left,
        "cap_in": cap_in,
        "cu_q": extras.cu_seqlens_q,
        "cu_k": extras.cu_seqlens_k,
        "turns": turns,
    }
