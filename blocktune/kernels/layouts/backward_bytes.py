"""Shared memory of a pass of a backward, as Triton 3.6 allocates it (notes/models/shared_memory.md)."""

from dataclasses import dataclass, replace

from blocktune.kernels.hardware.limits import MatrixUnit
from blocktune.kernels.layouts.exchange import exchange_bytes
from blocktune.kernels.layouts.forward_bytes import BARRIER_BYTES, FLOAT32_BYTES, TILE_ALIGNMENT_BYTES, VECTOR_BYTES
from blocktune.kernels.layouts.register_layouts import RegisterLayout, TileSize, loaded, products_layout, scores_layout, turned_operand

WARPGROUP_ROWS = 64
ROW_VALUES_BYTES = 8
"""Of a query row, in float32: its log-sum-exp and delta."""


@dataclass(frozen=True, slots=True)
class PassTiles:
    """A pass whose programs own `owned` rows of two tensors and walk tiles of `walked` rows of two others.

    over_keys: whether it owns keys: then its scores are transposed, and each walked row has its log-sum-exp and delta.
    width, width_v: columns of a row of queries or keys, and of values or their gradients.
    mask_element_bytes: of a mask tensor, 0 without one; dropout: whether pairs are dropped.
    """

    owned: int
    walked: int
    over_keys: bool
    width: int
    width_v: int
    element_bytes: int
    num_warps: int
    num_stages: int
    unit: MatrixUnit
    cc: tuple[int, int]
    mask_element_bytes: int = 0
    mask_aligned: bool = True
    dropout: bool = False
    ragged: bool = False
    causal: bool = False
    adds: str = ""
    listed: bool = False

    @property
    def owned_bytes(self) -> int:
        return self.owned * (self.width + self.width_v) * self.element_bytes

    @property
    def first_bytes(self) -> int:
        """The walked rows of queries or keys."""
        return self.walked * self.width * self.element_bytes

    @property
    def second_bytes(self) -> int:
        return self.walked * self.width_v * self.element_bytes

    @property
    def scores_bytes(self) -> int:
        """A tile of probabilities, or of ds."""
        return self.owned * self.walked * self.element_bytes

    @property
    def by_columns(self) -> bool:
        """Whether warps of `mma` stand next to each other, so that they exchange what they multiply next."""
        return (self.walked if self.adds and self.sums_unit == "mma" else self.owned) < self.width

    @property
    def exchanges(self) -> bool:
        """Whether the probabilities of `mma` go through shared memory."""
        return self.by_columns or (self.dropout and self.mask_element_bytes == 1)

    @property
    def products_unit(self) -> MatrixUnit:
        """The instruction of the products of whole owned tiles."""
        return "mma" if self.unit in ("wgmma", "tcgen05") and self.owned < WARPGROUP_ROWS else self.unit

    @property
    def sums_unit(self) -> MatrixUnit:
        """The instruction of the product that the share of dq is."""
        return "mma" if self.unit in ("wgmma", "tcgen05") and self.walked < WARPGROUP_ROWS else self.unit

    @property
    def mask_buffer_bytes(self) -> int:
        """The tiles of a mask that loads fill ahead."""
        copied = (self.mask_aligned and not self.ragged) or self.mask_element_bytes == FLOAT32_BYTES
        return (self.num_stages - 1) * self.owned * self.walked * self.mask_element_bytes * copied

    @property
    def buffer_bytes(self) -> int:
        """The tiles and row values that loads fill ahead."""
        values = self.walked * ROW_VALUES_BYTES if self.over_keys else 0
        return (self.num_stages - 1) * (self.first_bytes + self.second_bytes + values) + self.mask_buffer_bytes


def pass_bytes(tiles: PassTiles) -> int:
    """Return the bytes of a block."""
    if tiles.unit == "none":
        return plain_pass_bytes(tiles)
    if tiles.element_bytes == FLOAT32_BYTES:
        return split_pass_bytes(tiles)
    loop = _loop_bytes(tiles)
    if tiles.listed and (tiles.causal or (tiles.ragged and not tiles.over_keys)):
        loop = max(loop, _loop_bytes(replace(tiles, num_stages=1)))
    return tiles.owned_bytes + _second_keys_bytes(tiles) + loop


def plain_pass_bytes(tiles: PassTiles) -> int:
    """Return the bytes with plain multiply-adds: operands pass through shared memory as float32, one after the other;
    scores of float32 stay there while the next operand comes."""
    ratio = FLOAT32_BYTES // tiles.element_bytes
    first, second, scores = (ratio * size for size in (tiles.first_bytes, tiles.second_bytes, tiles.scores_bytes))
    kept = tiles.owned * tiles.walked * tiles.dropout
    if ratio == 1:
        beside = max(second + scores if tiles.over_keys else max(second, scores), mask_bytes(tiles), kept)
        return tiles.owned_bytes + max(first + beside, sums_bytes(tiles))
    return ratio * tiles.owned_bytes + max(first, second, scores, mask_bytes(tiles), kept, sums_bytes(tiles))


def split_pass_bytes(tiles: PassTiles) -> int:
    """Return the bytes of float32 operands, each the TF32 numbers of a tile and what these leave."""
    if tiles.products_unit != "mma":
        return _split_group_bytes(tiles)
    mask, kept = mask_bytes(tiles), tiles.owned * tiles.walked * tiles.dropout
    exchanged = 2 * tiles.scores_bytes if tiles.exchanges or tiles.adds else 0
    first, second = (turned_bytes(tiles, columns) for columns in (tiles.width, tiles.width_v))
    values = (tiles.num_stages - 1) * tiles.walked * ROW_VALUES_BYTES
    if tiles.over_keys:
        beside = max(first, tiles.second_bytes + second, tiles.first_bytes, exchanged, mask, kept)
        keys = 2 * tiles.owned * tiles.width * tiles.element_bytes if tiles.adds else 0
        copied = sums_bytes(tiles) if tiles.adds == "copies" and tiles.num_stages > 1 else 0
        held = 2 * tiles.owned_bytes + keys + values + tiles.mask_buffer_bytes + copied
        return held + max(beside, 0 if copied else sums_bytes(tiles))
    buffers = (tiles.num_stages - 1) * tiles.second_bytes + tiles.mask_buffer_bytes
    turned = max(first, second if tiles.num_stages == 1 else 0)
    return 2 * tiles.owned_bytes + buffers + max(tiles.first_bytes, turned, exchanged, mask, kept)


def _split_group_bytes(tiles: PassTiles) -> int:
    """Return the same where `wgmma` or `tcgen05` multiplies, of which the latter keeps owned rows in tensor memory."""
    mask, kept, sums = mask_bytes(tiles), tiles.owned * tiles.walked * tiles.dropout, sums_bytes(tiles)
    on_chip = tiles.products_unit == "tcgen05"
    exchanged = (1 if tiles.sums_unit == "tcgen05" else 2) * tiles.scores_bytes if tiles.adds else 0
    keys = 2 * tiles.owned * tiles.width * tiles.element_bytes if tiles.adds else 0
    copied = sums if tiles.adds == "copies" and tiles.num_stages > 1 else 0
    walking = 2 * max(tiles.first_bytes, tiles.second_bytes) + BARRIER_BYTES * on_chip
    held = keys + tiles.buffer_bytes + copied + (0 if on_chip else 2 * tiles.owned_bytes)
    loop = held + max(walking, exchanged, mask, kept, 0 if copied else sums)
    return max(loop, *(_owned_exchange_bytes(tiles, columns) for columns in (tiles.width, tiles.width_v)))


def _owned_exchange_bytes(tiles: PassTiles, columns: int) -> int:
    """Return the bytes through which owned rows come to, or leave, the threads of their products."""
    size = TileSize(tiles.owned, columns)
    made = products_layout(tiles.products_unit, size, tiles.num_warps, by_columns=tiles.by_columns)
    stored = loaded(size, VECTOR_BYTES // tiles.element_bytes, tiles.num_warps)
    return exchange_bytes(made, stored, 8 * tiles.element_bytes, tiles.cc)


def _loop_bytes(tiles: PassTiles) -> int:
    return {"mma": _mma_loop_bytes, "wgmma": _group_loop_bytes, "tcgen05": _tensor_memory_loop_bytes}[tiles.products_unit](tiles)


def _second_keys_bytes(tiles: PassTiles) -> int:
    """Return the bytes of K in a second layout, where the share of dq is a product of another instruction."""
    if not tiles.adds or (tiles.sums_unit == "mma") is (tiles.products_unit == "mma"):
        return 0
    if tiles.sums_unit == "mma":
        return tiles.owned * tiles.width * tiles.element_bytes
    values = (tiles.num_stages - 1) * tiles.walked * ROW_VALUES_BYTES
    return tiles.owned * tiles.width * tiles.element_bytes + -values % TILE_ALIGNMENT_BYTES


def _mma_loop_bytes(tiles: PassTiles) -> int:
    """Return the bytes with `mma`: walked rows on their way to registers, or the buffers that loads fill, next to P or
    ds where warps exchange them."""
    mask, sums, kept = mask_bytes(tiles), sums_bytes(tiles), tiles.owned * tiles.walked * tiles.dropout
    features = tiles.by_columns and (tiles.mask_element_bytes == 1 or tiles.mask_buffer_bytes or tiles.dropout)
    twice = tiles.adds and (tiles.sums_unit == "tcgen05" or (tiles.sums_unit == "mma" and features))
    exchanged = tiles.scores_bytes * (2 if twice else 1) if tiles.exchanges or tiles.adds else 0
    if tiles.num_stages > 1:
        copied = sums if tiles.adds == "copies" else 0
        return tiles.buffer_bytes + copied + max(exchanged, mask, kept, 0 if copied else sums)
    first, second = (turned_bytes(tiles, columns) for columns in (tiles.width, tiles.width_v))
    if not tiles.over_keys:
        return tiles.first_bytes + max(first, second, exchanged, mask, kept)
    both = tiles.second_bytes + max(second, tiles.scores_bytes if tiles.exchanges else 0, kept)
    return max(tiles.first_bytes + max(first, mask, both, exchanged), sums)


def _group_loop_bytes(tiles: PassTiles) -> int:
    """Return the bytes with `wgmma`, which reads buffers."""
    both, mask, sums = tiles.first_bytes + tiles.second_bytes, mask_bytes(tiles), sums_bytes(tiles)
    kept = tiles.owned * tiles.walked * tiles.dropout
    exchanged = tiles.scores_bytes if tiles.adds else 0
    if tiles.num_stages == 1:
        late = max(kept if tiles.over_keys else 0, mask if kept else 0)
        beside = exchanged if tiles.sums_unit == "mma" else 0
        return max(both + late, tiles.first_bytes + max(mask, kept, beside), exchanged, sums)
    copied = sums if tiles.adds == "copies" else 0
    return tiles.buffer_bytes + both + copied + max(exchanged, mask, kept, 0 if copied else sums)


def _tensor_memory_loop_bytes(tiles: PassTiles) -> int:
    """Return the bytes with `tcgen05`: while one tile is multiplied, the next ones come."""
    both, mask, sums = tiles.first_bytes + tiles.second_bytes, mask_bytes(tiles), sums_bytes(tiles)
    kept = tiles.owned * tiles.walked * tiles.dropout
    exchanged = tiles.scores_bytes if tiles.adds else 0
    if tiles.num_stages == 1:
        early = tiles.over_keys and (tiles.mask_element_bytes > 1 or tiles.adds)
        beside = max(BARRIER_BYTES, 0 if early else read_mask_bytes(tiles), kept if tiles.over_keys else 0)
        first = tiles.first_bytes + max(mask, kept, exchanged + BARRIER_BYTES)
        return max(both + beside, first, sums)
    copied = sums if tiles.adds == "copies" else 0
    beside = max(mask, kept, 0 if copied else sums)
    if tiles.adds and tiles.sums_unit == "mma":
        return tiles.buffer_bytes + copied + max(exchanged + 2 * BARRIER_BYTES, beside)
    again = both if tiles.over_keys else tiles.first_bytes
    barriers = 64 if tiles.over_keys else 48
    return tiles.buffer_bytes + both + again + barriers + 2 * copied + max(exchanged, beside)


def turned_bytes(tiles: PassTiles, columns: int) -> int:
    """Return the bytes through which walked rows become the second operand of a product."""
    size = TileSize(tiles.walked, columns)
    came = loaded(size, VECTOR_BYTES // tiles.element_bytes, tiles.num_warps)
    wanted = turned_operand(size, tiles.num_warps, tiles.element_bytes, by_columns=tiles.by_columns)
    return exchange_bytes(came, wanted, 8 * tiles.element_bytes, tiles.cc)


def mask_layouts(tiles: PassTiles) -> tuple[RegisterLayout, RegisterLayout]:
    """Return the layouts of a mask's tile as it is loaded, along the keys, and of scores."""
    size = TileSize(tiles.owned, tiles.walked)
    scores = scores_layout(tiles.products_unit, size, tiles.num_warps, by_columns=tiles.by_columns)
    vector = VECTOR_BYTES // tiles.mask_element_bytes if tiles.mask_aligned else 1
    read = loaded(size, vector, tiles.num_warps)
    if tiles.over_keys:
        read = loaded(TileSize(tiles.walked, tiles.owned), vector, tiles.num_warps).turned(tiles.owned)
    return read, scores


def mask_bytes(tiles: PassTiles) -> int:
    """Return the bytes through which a mask's tile, or what is made of it, and scores meet in one layout."""
    if not tiles.mask_element_bytes or tiles.mask_buffer_bytes:
        return 0
    read, scores = mask_layouts(tiles)
    taken, bits = read_mask_bytes(tiles), 8 * FLOAT32_BYTES
    if tiles.mask_element_bytes == 1 and tiles.products_unit == "tcgen05" and not tiles.mask_aligned:
        return max(taken, exchange_bytes(scores, read, bits, tiles.cc))
    if tiles.mask_element_bytes > 1 and tiles.over_keys and tiles.products_unit != "tcgen05":
        return max(taken, exchange_bytes(read, scores, bits, tiles.cc))
    return taken


def read_mask_bytes(tiles: PassTiles) -> int:
    """Return the bytes through which the elements of a mask's tile come to the threads of their scores."""
    if not tiles.mask_element_bytes or tiles.mask_buffer_bytes:
        return 0
    return exchange_bytes(*mask_layouts(tiles), 8 * tiles.mask_element_bytes, tiles.cc)


def sums_bytes(tiles: PassTiles) -> int:
    """Return the bytes of the share of dq on its way out."""
    if not tiles.adds:
        return 0
    size = TileSize(tiles.walked, tiles.width)
    if tiles.adds == "copies":
        return size.elements * FLOAT32_BYTES
    made = products_layout(tiles.sums_unit, size, tiles.num_warps, by_columns=tiles.by_columns)
    return exchange_bytes(made, loaded(size, VECTOR_BYTES // FLOAT32_BYTES, tiles.num_warps), 32, tiles.cc)
