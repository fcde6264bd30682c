"""What a block of a warp-specialised forward keeps on the chip. Warps that copy hold no tile."""

from blocktune.kernels.base.flash_kernel import WARPGROUP_ROWS, WARPGROUP_WARPS
from blocktune.kernels.base.on_chip import ChipTile, OnChip, shared_tile, softmax_tiles
from blocktune.kernels.values.config import KernelConfig


def consumer_tiles(
    config: KernelConfig,
    widths: tuple[int, int],
    element_bytes: int,
    leaving: ChipTile | None,
    *,
    transposed_values: bool = False,
    one_ring: bool = False,
) -> OnChip:
    """Return Q, the slots of K and V, what the consumers hold in registers, and the output on its way out.

    Args:
        config: block_m counts the rows of all consumers.
        widths: columns of tiles of Q and K, and of V.
        element_bytes: of these.
        leaving: the memory of the output on its way out; None where it leaves through that of Q.
        transposed_values: a tile of V has a column for each key.
        one_ring: a slot holds a tile of K or of V, which are alike, instead of both.
    """
    m, n, (width, width_v), stages = config.block_m, config.block_n, widths, config.num_stages
    rows, columns = (width_v, n) if transposed_values else (n, width_v)
    slots = [shared_tile("K", n, width, element_bytes, stages), shared_tile("V", rows, columns, element_bytes, stages)]
    if one_ring:
        slots = [shared_tile("K or V, in turns", n, width, element_bytes, stages)]
    return OnChip(
        tiles=(
            shared_tile("Q", m, width, element_bytes),
            *slots,
            *([] if leaving is None else [leaving]),
            *softmax_tiles(m, n, width_v, element_bytes),
        ),
        num_warps=WARPGROUP_WARPS * (m // WARPGROUP_ROWS),
    )


def leaving_tile(block_m: int, columns: int, element_bytes: int) -> ChipTile:
    """Return memory of its own for the output of all consumers on its way out."""
    return shared_tile("O on its way out", block_m, columns, element_bytes)
