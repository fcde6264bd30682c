"""The default of split-KV decoding: tiles and buffers by the rows that are packed, splits by the multiprocessors."""

from collections.abc import Iterator
from dataclasses import replace

from blocktune.kernels.base.flash_kernel import WARPGROUP_ROWS, WARPGROUP_WARPS, padded_width
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.limits import MULTIPROCESSORS, ComputeLimits
from blocktune.kernels.portable.decode.launch import EARLY, LATE, PAIRED, PROGRAMS
from blocktune.kernels.portable.decode.shares import fastest_splits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import AttentionShape, Causal

OVERLAPPING_CC = (9, 0)
"""The first compute capability whose kernels can be launched while the one before still runs."""

DEEP_KEYS, DEEP_STAGES = (128, 64), 3
"""The tile of keys, the larger one where it fits, and the buffers of `_deep`. With heads of 200 and 216 columns 64 keys
took 10 to 15 % less time on an H200 than several programs with two buffers."""

PAIRED_STAGES, PAIRED_KEYS = 3, 2560
"""Buffers of a program that shares its multiprocessor with another one over the same keys, and the fewest keys that
each of them reads."""

LOW_ROWS = 16
"""The lowest tile of rows."""

SHORT_TILE, SHORT_TOKEN_TILE = (64, 4), (128, 3)
"""Those of 8-bit keys. Where tokens have scales, a tile has as many keys as threads, each of which loads one scale."""
SHORT_PROGRAMS = 2 * MULTIPROCESSORS
"""What the splits of 8-bit keys make at most: more have less to read each, and merge more. (On an H200 twice as many
were 4 to 10 % slower at batch 8.)"""


def default_decode_config(kernel: AttentionKernel, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig:
    """Return the default: over contiguous keys, deep buffers and programs that all multiprocessors hold at one time, as
    nearly all winners on an H200. Low tiles over pages, which lie apart, get several programs with few buffers."""
    deep = _deep(kernel, shape, limits)
    if deep is not None and kernel.surely_fits(deep, shape, limits):
        return deep
    return kernel.first_fitting(_side_by_side(kernel, shape, limits), shape, limits)


def visible_keys(shape: AttentionShape) -> int:
    """Return about how many keys a tile of rows reads: what causal mask and window leave of a full cache."""
    left = (shape.features.window or (UNLIMITED, UNLIMITED))[0]
    keys = min(shape.seqlen_k, shape.seqlen_q) if shape.causal is Causal.UPPER_LEFT else shape.seqlen_k
    return keys if left == UNLIMITED else min(keys, left + shape.seqlen_q)


def _deep(kernel: AttentionKernel, shape: AttentionShape, limits: ComputeLimits) -> KernelConfig | None:
    """Return the default of low tiles over contiguous keys, whose splits make as many programs as are resident at one
    time. None where nothing of the kind was measured, or there are too few keys for that."""
    block_m = _block_m(kernel, shape)
    most_rows = LOW_ROWS if shape.features.is_short else WARPGROUP_ROWS // 2
    if shape.features.page_size or not _has_warpgroups(shape, limits) or block_m > most_rows:
        return None
    one = _shares(kernel, shape, 1, limits)
    tiles = (KernelConfig(kernel.name, block_m, *keys, one) for keys in _deep_tiles(shape))
    tile = next((tile for tile in tiles if kernel.surely_fits(tile, shape, limits)), None)
    if tile is None:
        return None
    taken = kernel.most_shared_bytes(tile, shape, limits) + limits.shared_reserved_bytes
    most = SHORT_PROGRAMS if shape.features.is_short else PROGRAMS
    wanted = min(limits.shared_per_sm_bytes // taken * MULTIPROCESSORS, most)
    splits = _fastest_splits(kernel, shape, tile, wanted)
    if not _fills(_programs(shape, block_m) * splits, wanted):
        return None
    return replace(tile, extra=_shares(kernel, shape, splits, limits))


def _deep_tiles(shape: AttentionShape) -> list[tuple[int, int, int]]:
    """Return the tiles of keys of `_deep` with their warps and buffers, the best first."""
    if not shape.features.is_short:
        return [(block_n, WARPGROUP_WARPS, DEEP_STAGES) for block_n in DEEP_KEYS]
    block_n, stages = SHORT_TOKEN_TILE if shape.features.token_scales else SHORT_TILE
    return [(block_n, WARPGROUP_WARPS, stages)]


def _side_by_side(kernel: AttentionKernel, shape: AttentionShape, limits: ComputeLimits) -> Iterator[KernelConfig]:
    """Yield the defaults of everything else, the best first: whole tiles get four buffers and about one program a
    multiprocessor, or two with three buffers (`_goes_in_pairs`), lower ones and those over pages several programs with
    two. (128 rows of 64 columns over pages of 64 keys: 129 us for 364 with one program a multiprocessor on an H200.)"""
    block_m = _block_m(kernel, shape)
    whole = block_m == WARPGROUP_ROWS and _has_warpgroups(shape, limits)
    warps = 8 if whole and padded_width(shape.head_dim_v) > 128 else WARPGROUP_WARPS  # else the output spills
    tile = KernelConfig(kernel.name, block_m, 32 if limits.mma == "none" else 64, warps, 1)
    paired = whole and _goes_in_pairs(kernel, shape, tile, limits)
    deep = whole and not shape.features.page_size
    wanted = (1 + paired) * MULTIPROCESSORS if deep else PROGRAMS
    splits = _fastest_splits(kernel, shape, tile, wanted)
    tile = replace(tile, extra=_shares(kernel, shape, splits, limits))
    alone = deep and _programs(shape, block_m) * splits <= wanted
    deepest = ((4, 1), (3, 1)) if alone and not paired else ((PAIRED_STAGES, 2),) if deep else ()
    narrow = replace(tile, block_n=32)
    loads = [(replace(tile, num_stages=stages), resident) for stages, resident in (*deepest, (2, 2), (1, 2))]
    # several programs of an SM keep more loads in flight than one with deeper buffers
    for config, resident in (*loads, (narrow, 2)):
        if resident * kernel.most_shared_bytes(config, shape, limits) <= limits.shared_per_block_optin_bytes:
            yield config
    rows = sorted((rows for rows in kernel.parameters["block_m"] if rows <= block_m), reverse=True)
    yield from (replace(narrow, block_m=block) for block in rows)


def _goes_in_pairs(kernel: AttentionKernel, shape: AttentionShape, tile: KernelConfig, limits: ComputeLimits) -> bool:
    """Return whether a multiprocessor holds two programs with `PAIRED_STAGES` buffers over contiguous keys, many of
    them each: one computes while the other waits.

    With 128 rows and 128 columns, 4096 keys a program, an H200 and an H100 were 8 and 20 % faster than with one program
    and four buffers; with 512 keys slower. With 64 rows of 512 key heads, 8192 keys, an H200 was 4 % faster than with
    four buffers, and 9 % faster than with two.
    """
    splits = _fastest_splits(kernel, shape, tile, 2 * MULTIPROCESSORS)
    if shape.features.page_size:
        return False
    deep = replace(tile, num_stages=PAIRED_STAGES, extra=_shares(kernel, shape, splits, limits))
    resident = limits.shared_per_block_optin_bytes // kernel.most_shared_bytes(deep, shape, limits)
    return resident >= 2 and visible_keys(shape) >= splits * PAIRED_KEYS


def _block_m(kernel: AttentionKernel, shape: AttentionShape) -> int:
    """Return the lowest tile that holds all packed rows of a group, else that of a warpgroup."""
    rows = shape.group_size * shape.seqlen_q
    return next((block for block in kernel.parameters["block_m"] if rows <= block), WARPGROUP_ROWS)


def _has_warpgroups(shape: AttentionShape, limits: ComputeLimits) -> bool:
    """Return whether 16-bit products are those of warpgroups or later ones, as on the device that was measured."""
    return limits.mma not in ("none", "mma") and shape.element_bytes == 2


def _shares(
    kernel: AttentionKernel, shape: AttentionShape, splits: int, limits: ComputeLimits
) -> tuple[tuple[str, int], ...]:
    """Return the parameters of a number of splits. Where the hardware can, the later one of two over contiguous keys
    merges, and else a launch that starts early. (Over pages a pair was 2 % slower on an H200.)"""
    overlap = LATE
    if limits.cc >= OVERLAPPING_CC and splits > 1:
        pairs = splits == 2 and not shape.features.page_size and PAIRED in kernel.parameters["overlap"]
        overlap = PAIRED if pairs else EARLY
    return (("splits", splits), ("overlap", overlap))


def _fastest_splits(kernel: AttentionKernel, shape: AttentionShape, tile: KernelConfig, resident: int) -> int:
    programs, rows = _programs(shape, tile.block_m), shape.batch * shape.num_heads * shape.seqlen_q
    return fastest_splits(kernel.parameters["splits"], programs, resident, visible_keys(shape), tile.block_n, rows)


def _programs(shape: AttentionShape, block_m: int) -> int:
    """Return the programs of one split."""
    return shape.batch * shape.num_heads_kv * -(-shape.group_size * shape.seqlen_q // block_m)


def _fills(programs: int, wanted: int) -> bool:
    """Return whether programs are half of the wanted ones at least."""
    return 2 * programs >= wanted
