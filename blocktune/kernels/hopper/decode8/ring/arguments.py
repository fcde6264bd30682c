"""The constants of the ring, by name."""

from typing import NamedTuple


class Options(NamedTuple):
    """The constants of `flash_decode8_ring_kernel`."""

    WIDTH: int
    """Columns of keys and values."""
    PAGE_SIZE: int
    """Keys of a page; 0 without pages."""
    CAUSAL: bool
    FROM_START: bool
    """Query i sees the keys up to i + d, where d is 0 (FROM_START) or length - seqlen_q."""
    ROWS: int
    """Packed rows of a tile."""
    KEYS: int
    """Keys of a tile."""
    SPLITS: int
    """Shares of the keys."""
    STAGES: int
    """Tiles of the ring."""
    OVERLAP: bool
    """Programs of the merge may start once all programs run."""
    OF_TOKENS: bool
    """Every row of a key head has scales of its own."""
