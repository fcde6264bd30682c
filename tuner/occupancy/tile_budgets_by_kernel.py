"""The on-chip budget of a config, whichever kernel it is of: v1, Hopper's own kernels, decoding, and a backward's pass
over keys. tuner/occupancy/tile_budget.py has the forward of FlashAttention-2, which several kernels share.

    budget_of(config, shape, limits_for((9, 0)))
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from blocktune.kernels.base.flash_kernel import (
    FLOAT32_BYTES,
    IN_ORDER,
    WARPGROUP_ROWS,
    WARPGROUP_WARPS,
    operand_widths,
    padded_width,
)
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.historical.padded import padded_shape
from blocktune.kernels.hopper.backward.layout import PANEL, is_wide, width_of
from blocktune.kernels.hopper.decode.kernel import rows_of_tile
from blocktune.kernels.hopper.forward.kernel import shares_memory, tile_width
from blocktune.kernels.hopper.forward.short_kernel import PANEL as OUTPUT_PANEL
from blocktune.kernels.hopper.forward.short_kernel import output_panels
from blocktune.kernels.hopper.fp8.kernel import tile_width as fp8_tile_width
from blocktune.kernels.hopper.fp8.steps import sums_are_shared
from blocktune.kernels.portable.backward.fused import copies
from blocktune.kernels.portable.backward.shared_memory import adding_bytes
from blocktune.kernels.portable.forward.pointers import FlashForward
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.occupancy.tile_budget import OnChip, Place, Tile, on_chip, plain_on_chip

Budget = Callable[[KernelConfig, AttentionShape, ComputeLimits], OnChip | None]


def budget_of(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip | None:
    """What a block of the config keeps on the chip; None for kernels whose tiles nobody has listed."""
    budget = BUDGETS.get(config.kernel)
    return None if budget is None else budget(config, shape, limits)


def _as_plain(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
    """The tiles of the plain kernel; one without a parameter `schedule` computes in order."""
    schedule = config.parameters.get("schedule", IN_ORDER)
    return on_chip(replace(config, kernel=FlashForward.name, extra=(("schedule", schedule),)), shape, limits)


def _padded(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
    return _as_plain(config, padded_shape(shape), limits)


def _v1(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
    """One tile of each operand, as float32 for plain multiply-adds, with P where Q was. The output and the statistics
    of a tile of queries are in registers while it meets a tile of keys, and in device memory between two of these."""
    m, n, plain = config.block_m, config.block_n, limits.mma == "none"
    element = FLOAT32_BYTES if plain else shape.element_bytes
    width, width_v = padded_width(shape.head_dim), padded_width(shape.head_dim_v)
    queries = _shared("P, after Q", m, n, element) if plain and n > width else _shared("Q", m, width, element)
    operands = queries, _shared("K", n, width, element), _shared("V", n, width_v, element)
    tiles = (*operands, *_softmax(m, n, width_v, shape.element_bytes))
    return OnChip(tiles=tiles, loading_bytes=0, num_warps=config.num_warps)


def _hopper_forward(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
    """Warps that copy hold no tile; the output leaves through shared memory of its own, or where there is no room,
    through that of Q."""
    del limits
    return _hopper_tiles(config, shape, 0 if shares_memory(config, shape) else tile_width(shape.head_dim_v))


def _hopper_short_forward(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
    """As the other one; the output leaves through as many panels as there is room for."""
    del limits
    return _hopper_tiles(config, shape, OUTPUT_PANEL * output_panels(config, shape))


def _hopper_tiles(config: KernelConfig, shape: AttentionShape, leaving: int) -> OnChip:
    """leaving: columns of the output that have memory of their own on its way out."""
    m, n, short = config.block_m, config.block_n, shape.element_bytes
    width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
    computing = WARPGROUP_WARPS * (m // WARPGROUP_ROWS)
    way_out = (_shared("O on its way out", m, leaving, short),) if leaving else ()
    return OnChip(
        tiles=(
            _shared("Q", m, width, short),
            _shared("K", n, width, short, config.num_stages),
            _shared("V", n, width_v, short, config.num_stages),
            *way_out,
            *_softmax(m, n, width_v, short),
        ),
        loading_bytes=0,
        num_warps=computing,
    )


def _hopper_fp8(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
    """As the 16-bit one; the output leaves with 16 bits, through shared memory of its own or where the float32 sums of
    more than two warpgroups are."""
    del limits
    m, n, short = config.block_m, config.block_n, shape.element_bytes
    sums = sums_are_shared(m // WARPGROUP_ROWS)
    width, width_v = fp8_tile_width(shape.head_dim), fp8_tile_width(shape.head_dim_v)
    tiles = (
        _shared("Q", m, width, short),
        _shared("K", n, width, short, config.num_stages),
        _shared("V", width_v, n, short, config.num_stages),
        _shared("O on its way out", m, width_v, FLOAT32_BYTES if sums else shape.out_bytes),
        *_softmax(m, n, width_v, short),
    )
    return OnChip(tiles=tiles, loading_bytes=0, num_warps=WARPGROUP_WARPS * (m // WARPGROUP_ROWS))


def _hopper_backward(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
    """Two warpgroups own the keys and exchange dS; dQ leaves through shared memory in two halves. Of wider heads than
    128 they share the products, exchange P too, and have one slot of dO less; dQ leaves panel by panel."""
    del limits
    m, n, short, stages = config.block_m, config.block_n, shape.element_bytes, config.num_stages
    d, wide = width_of(shape), is_wide(shape)
    exchanged = [_shared("P", n, m, FLOAT32_BYTES)] if wide else []
    return OnChip(
        tiles=(
            *(_shared(name, n, d, short) for name in "KV"),
            *(_shared(name, m, d, short, slots) for name, slots in (("Q", stages), ("dO", stages - wide))),
            *(_shared(name, m, 1, FLOAT32_BYTES, slots) for name, slots in (("LSE", stages), ("delta", stages - wide))),
            *exchanged,
            _shared("dS", n, m, short, 1 if wide else 2),
            _shared("dQ on its way out", m, 2 * PANEL if wide else d, FLOAT32_BYTES),
            *_gradients(m, n, d, d, short),
        ),
        loading_bytes=0,
        num_warps=2 * WARPGROUP_WARPS,
    )


def _decode(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
    """Packed rows of a group; `FlashDecode.shared_bytes` says which products read which memory. A share's output leaves
    in float32 when the loop has ended."""
    m, n, short = config.block_m, config.block_n, shape.element_bytes
    width, width_v = operand_widths(shape)
    if limits.mma == "none":
        return plain_on_chip(config, shape, (width, width_v))
    whole = limits.mma != "mma" and m == WARPGROUP_ROWS and config.num_warps >= WARPGROUP_WARPS
    depth = config.num_stages - (0 if whole and short == 2 else 1)
    keys = [_shared("K or V, in turns", n, max(width, width_v), short)]
    if depth and config.num_stages > 1:
        keys = [_shared("K", n, width, short, depth), _shared("V", n, width_v, short, depth)]
    exchanged = short == 2 and not whole and m < width_v
    queries = _shared("Q", m, width, short) if short == 2 else _held("Q", m, width, short)
    softmax = _softmax(m, n, width_v, short)
    if exchanged:
        softmax = [_shared("P", m, n, short) if tile.name == "P" else tile for tile in softmax]
    leaving = m * width_v * FLOAT32_BYTES if short == 2 and whole and config.parameters["splits"] > 1 else 0
    return OnChip(tiles=(queries, *keys, *softmax), loading_bytes=leaving, num_warps=config.num_warps)


def _hopper_decode(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip:
    """Every warp has keys, queries and an output of its own; their outputs meet in shared memory at the end."""
    del limits
    n, short, rows = config.block_n, shape.element_bytes, config.num_warps * rows_of_tile(shape)
    softmax = (
        _held("S", n, rows_of_tile(shape), FLOAT32_BYTES),
        _held("P", n, rows_of_tile(shape), short, reuses=True),
        _held("O", rows, shape.head_dim_v, FLOAT32_BYTES),
        *(_held(name, rows, 1, FLOAT32_BYTES) for name in "ml"),
    )
    loaded = _held("Q", rows, shape.head_dim, short), _held("K", n, shape.head_dim, short)
    meeting = (_shared(f"{name} of all warps", rows, 1, FLOAT32_BYTES) for name in "ml")
    return OnChip(
        tiles=(
            *loaded,
            _held("V", n, shape.head_dim_v, short),
            *softmax,
            _shared("O of all warps", rows, shape.head_dim_v, FLOAT32_BYTES),
            *meeting,
        ),
        loading_bytes=0,
        num_warps=config.num_warps,
    )


def _dense_backward(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip | None:
    """The pass over keys with 16-bit products of tensor cores, which reads tiles where `pass_bytes` says."""
    if limits.mma == "none" or shape.element_bytes != 2:
        return None
    m, n, stages = config.block_m, config.block_n, config.num_stages
    widths = padded_width(shape.head_dim), padded_width(shape.head_dim_v)
    by_warpgroup = limits.mma in ("wgmma", "tcgen05") and n >= WARPGROUP_ROWS
    depth = stages if by_warpgroup else stages - 1
    walked = [_shared(name, m, width, 2, depth) for name, width in zip(("Q", "dO"), widths, strict=True) if depth]
    if not depth:
        walked = [_shared("Q or dO, in turns", m, sum(widths) // 2, 2)]
    if stages > 1:
        walked += [_shared(name, m, 1, FLOAT32_BYTES, stages - 1) for name in ("LSE", "delta")]
    if not by_warpgroup and n < widths[0]:
        walked.append(_shared("dS", n, m, 2))
    owned = [_shared(name, n, width, 2) for name, width in zip("KV", widths, strict=True)]
    place = Place.TENSOR_MEMORY if limits.mma == "tcgen05" else Place.REGISTERS
    tiles = (*owned, *walked, *_gradients(m, n, *widths, 2, place))
    return OnChip(tiles=tiles, loading_bytes=0, num_warps=config.num_warps)


def _fused_backward(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip | None:
    """The same, and what it takes to add a tile's share of dQ."""
    found = _dense_backward(config, shape, limits)
    if found is None:
        return None
    more = adding_bytes(config, shape, limits, by_copy_engine=copies(config))
    width, m, n = padded_width(shape.head_dim), config.block_m, config.block_n
    listed = {
        "K": _shared("K, for dQ", n, width, 2),
        "dS": _shared("dS", n, m, 2),
        "dQ": _shared("dQ on its way out", m, width, FLOAT32_BYTES),
    }
    return replace(found, tiles=(*found.tiles, *(listed[name] for name in more)))


def _sparse_backward(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip | None:
    """As the dense one's pass over keys, which has blocks of its own."""
    own = config.parameters
    return _dense_backward(replace(config, block_m=own["kv_block_m"], block_n=own["kv_block_n"]), shape, limits)


def _softmax(m: int, n: int, width_v: int, element_bytes: int) -> list[Tile]:
    """Scores, probabilities in their place, accumulator and the statistics of every row, in registers."""
    return [
        _held("S", m, n, FLOAT32_BYTES),
        _held("P", m, n, element_bytes, reuses=True),
        _held("O", m, width_v, FLOAT32_BYTES),
        _held("m", m, 1, FLOAT32_BYTES),
        _held("l", m, 1, FLOAT32_BYTES),
    ]


def _gradients(
    m: int, n: int, width: int, width_v: int, element_bytes: int, accumulators: Place = Place.REGISTERS
) -> Iterable[Tile]:
    """Transposed scores and their gradients, from which P and dS are made in place, and what is summed along the walk;
    dQ of a tile is made when scores are gone."""
    return (
        _held("S", n, m, FLOAT32_BYTES),
        _held("P", n, m, element_bytes, reuses=True),
        _held("dP", n, m, FLOAT32_BYTES),
        replace(_held("dK", n, width, FLOAT32_BYTES), place=accumulators),
        replace(_held("dV", n, width_v, FLOAT32_BYTES), place=accumulators),
    )


def _shared(name: str, rows: int, columns: int, element_bytes: int, count: int = 1) -> Tile:
    return Tile(
        name=name, rows=rows, columns=columns, element_bytes=element_bytes, place=Place.SHARED_MEMORY, count=count
    )


def _held(name: str, rows: int, columns: int, element_bytes: int, *, reuses: bool = False) -> Tile:
    return Tile(
        name=name, rows=rows, columns=columns, element_bytes=element_bytes, place=Place.REGISTERS, reuses=reuses
    )


BUDGETS: Mapping[str, Budget] = {
    "flash_fwd": on_chip,
    "flash_fwd_tma": on_chip,
    "flash_fwd_general": _as_plain,
    "flash_fwd_sparse": _as_plain,
    "flash_fwd_transposed": _as_plain,
    "flash_fwd_fp8": _hopper_fp8,
    "flash_fwd_padded": _padded,
    "flash_fwd_hopper": _hopper_forward,
    "flash_fwd_hopper_short": _hopper_short_forward,
    "flash_bwd_hopper": _hopper_backward,
    "flash_bwd_fused": _fused_backward,
    "flash_bwd_split": _dense_backward,
    "flash_bwd_sparse": _sparse_backward,
    "flash_decode": _decode,
    "flash_decode_hopper": _hopper_decode,
    "flash_v1": _v1,
    "flash_v2": _as_plain,
}
"""By kernel name."""
