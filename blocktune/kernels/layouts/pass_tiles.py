"""The tiles of a pass of a backward, and what they take on their way from one layout to another."""

from dataclasses import dataclass

from blocktune.kernels.hardware.limits import MatrixUnit
from blocktune.kernels.layouts.exchange import exchange_bytes
from blocktune.kernels.layouts.forward_tiles import FLOAT32_BYTES, LEAST_COPY_BYTES, VECTOR_BYTES
from blocktune.kernels.layouts.register_layouts import (
    WARP_LANES,
    RegisterLayout,
    TileSize,
    loaded,
    products_layout,
    scores_layout,
    turned_operand,
)

WARPGROUP_ROWS = 64
ROW_VALUES_BYTES = 8
"""Of a query row, in float32: its log-sum-exp and delta."""


@dataclass(frozen=True, slots=True)
class PassTiles:
    """A pass whose programs own `owned` rows of two tensors and walk tiles of `walked` rows of two others.

    over_keys: whether it owns keys: then its scores are transposed, and each walked row has its log-sum-exp and delta.
    width, width_v: columns of a row of queries or keys, and of values or their gradients.
    mask_element_bytes: of a mask tensor, whose rows are aligned; 0 without one.
    mask_copied: whether loads may fill buffers with its tiles.
    dropout, softcap: whether pairs are dropped, and whether scores are bent.
    adds, copies: whether it makes and adds its share of dq, and whether the copy engine adds it.
    one_more_loop: whether some tiles are walked in a loop of one stage.
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
    mask_copied: bool = False
    dropout: bool = False
    softcap: bool = False
    adds: bool = False
    copies: bool = False
    one_more_loop: bool = False

    @property
    def owned_bytes(self) -> int:
        return self.owned * (self.width + self.width_v) * self.element_bytes

    @property
    def keys_bytes(self) -> int:
        """The owned keys as the second operand of the share of dq; 0 if none is made."""
        return self.owned * self.width * self.element_bytes if self.adds else 0

    @property
    def first_bytes(self) -> int:
        """The walked rows of queries or keys."""
        return self.walked * self.width * self.element_bytes

    @property
    def second_bytes(self) -> int:
        """The walked rows of values or of the output's gradient."""
        return self.walked * self.width_v * self.element_bytes

    @property
    def scores_bytes(self) -> int:
        """A tile of probabilities, or of ds."""
        return self.owned * self.walked * self.element_bytes

    @property
    def dropout_bytes(self) -> int:
        """The pairs that dropout keeps, on their way between threads: one byte a score. Threads that have whole rows of
        scores, as with `tcgen05` in a pass over queries, make them where they are."""
        there = self.products_unit == "tcgen05" and not self.over_keys
        return self.owned * self.walked * (self.dropout and not there)

    @property
    def values_bytes(self) -> int:
        """The buffers of row values that loads fill ahead."""
        return (self.num_stages - 1) * self.walked * ROW_VALUES_BYTES * self.over_keys

    @property
    def mask_buffer_bytes(self) -> int:
        """The buffers of a mask's tiles."""
        return (self.num_stages - 1) * self.owned * self.walked * self.mask_element_bytes * self.mask_copied

    @property
    def buffer_bytes(self) -> int:
        """All buffers that loads fill ahead."""
        tiles = (self.num_stages - 1) * (self.first_bytes + self.second_bytes)
        return tiles + self.values_bytes + self.mask_buffer_bytes

    @property
    def in_turns(self) -> bool:
        """Whether walked rows come when needed: of one stage, or where a thread would copy too little ahead."""
        few = max(self.first_bytes, self.second_bytes) < LEAST_COPY_BYTES * WARP_LANES * self.num_warps
        return self.num_stages == 1 or few

    @property
    def products_unit(self) -> MatrixUnit:
        """The instruction of the products of owned tiles."""
        return self._unit_of(self.owned)

    @property
    def sums_unit(self) -> MatrixUnit:
        """The instruction of the product that the share of dq is."""
        return self._unit_of(self.walked)

    def _unit_of(self, rows: int) -> MatrixUnit:
        return "mma" if self.unit in ("wgmma", "tcgen05") and rows < WARPGROUP_ROWS else self.unit

    @property
    def by_columns(self) -> bool:
        """Whether warps of `mma` stand next to each other, so that they exchange what they multiply next."""
        return (self.walked if self.adds and self.sums_unit == "mma" else self.owned) < self.width

    @property
    def exchanges(self) -> bool:
        """Whether the probabilities of `mma` go through shared memory."""
        return self.by_columns or (self.dropout and self.mask_element_bytes == 1)


def turned_bytes(tiles: PassTiles, columns: int) -> int:
    """Return the bytes through which walked rows become the second operand of a product."""
    size = TileSize(tiles.walked, columns)
    came = loaded(size, VECTOR_BYTES // tiles.element_bytes, tiles.num_warps)
    wanted = turned_operand(size, tiles.num_warps, tiles.element_bytes, by_columns=tiles.by_columns)
    return exchange_bytes(came, wanted, 8 * tiles.element_bytes, tiles.cc)


def owned_exchange_bytes(tiles: PassTiles, columns: int) -> int:
    """Return the bytes through which owned rows come to, or leave, the threads of their products."""
    size = TileSize(tiles.owned, columns)
    made = products_layout(tiles.products_unit, size, tiles.num_warps, by_columns=tiles.by_columns)
    stored = loaded(size, VECTOR_BYTES // tiles.element_bytes, tiles.num_warps)
    return exchange_bytes(made, stored, 8 * tiles.element_bytes, tiles.cc)


def mask_bytes(tiles: PassTiles) -> int:
    """Return the bytes through which a mask's tile, or what is made of it, and scores meet in one layout."""
    taken = mask_read_bytes(tiles)
    if not taken:
        return 0
    (read, scores), bits = _mask_layouts(tiles), 8 * FLOAT32_BYTES
    if tiles.mask_element_bytes > 1 and tiles.over_keys and tiles.products_unit != "tcgen05":
        return max(taken, exchange_bytes(read, scores, bits, tiles.cc))
    return taken


def mask_read_bytes(tiles: PassTiles) -> int:
    """Return the bytes through which the elements of a mask's tile come to the threads of their scores; 0 where a
    buffer holds them."""
    if not tiles.mask_element_bytes or tiles.mask_buffer_bytes:
        return 0
    return exchange_bytes(*_mask_layouts(tiles), 8 * tiles.mask_element_bytes, tiles.cc)


def _mask_layouts(tiles: PassTiles) -> tuple[RegisterLayout, RegisterLayout]:
    """Return the layouts of a mask's tile as it is loaded, along the keys, and of scores."""
    size, vector = TileSize(tiles.owned, tiles.walked), VECTOR_BYTES // tiles.mask_element_bytes
    scores = scores_layout(tiles.products_unit, size, tiles.num_warps, by_columns=tiles.by_columns)
    if tiles.over_keys:
        return loaded(size.turned, vector, tiles.num_warps).turned(tiles.owned), scores
    return loaded(size, vector, tiles.num_warps), scores


def sums_bytes(tiles: PassTiles) -> int:
    """Return the bytes of the share of dq on its way out."""
    size = TileSize(tiles.walked, tiles.width)
    if not tiles.adds or tiles.copies:
        return size.elements * FLOAT32_BYTES * tiles.copies
    made = products_layout(tiles.sums_unit, size, tiles.num_warps, by_columns=tiles.by_columns)
    stored = loaded(size, VECTOR_BYTES // FLOAT32_BYTES, tiles.num_warps)
    return exchange_bytes(made, stored, 8 * FLOAT32_BYTES, tiles.cc)
