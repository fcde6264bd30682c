"""What the device functions of decoding get, by name: rows, cached keys and constants."""

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """The packed rows of a tile [BLOCK_M]: the query of each, its slope in base 2, and the words of drafts 0..31 and
    32..63 of its tree; 0 for what there is not."""

    queries: Any
    slopes: Any
    low: Any
    high: Any


class CachedKeys(NamedTuple):
    """Keys and values of a head, or their scales: pointers to the first row of an entry, or in pages of the first page;
    the strides of an entry or page and of a row; and the entry's line of the table of pages."""

    k: Any
    v: Any
    k_entry: Any
    k_row: Any
    v_entry: Any
    v_row: Any
    table: Any


class Options(NamedTuple):
    """The constants of `flash_decode_kernel` and `flash_decode8_kernel`.

    WIDTH, WIDTH_V: columns of tiles, which are filled up with zeros. PAGE_SIZE: keys of a page, 0 without pages. Key j
    is seen by query i if i + d - left <= j (LEFT) and j <= i + d + right (RIGHT), where d is 0 (FROM_START) or length -
    seqlen_q. WORDS: of 32 drafts, that a row of a tree has, 0 without a tree. PRECISION: `input_precision` of products.
    BLOCK_M, BLOCK_N: rows and keys of a tile. OVERLAP: once all programs run, those of the merge may start next to
    them. PAIRED: of two splits the later program merges. OF_TOKENS: every row of a key head has scales of its own, else
    they are those of the batch entry.
    """

    HEAD_DIM: int
    HEAD_DIM_V: int
    WIDTH: int
    WIDTH_V: int
    PAGE_SIZE: int
    FROM_START: bool
    LEFT: bool
    RIGHT: bool
    WORDS: int
    SOFTCAP: bool
    PRECISION: str
    BLOCK_M: int
    BLOCK_N: int
    SPLITS: int
    STAGES: int
    OVERLAP: bool
    PAIRED: bool
    OF_TOKENS: bool
