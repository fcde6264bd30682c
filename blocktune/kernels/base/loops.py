"""What a kernel declares of its loops over tiles; tuner/traffic/by_kernel.py counts from it the bytes that it moves.

    loops = ForwardLoops()                                          # FlashAttention-2
    loops = ForwardLoops(transposes="k")                            # over keys that a launch before it transposes
    loops = BackwardLoops(queries=("dq_block_m", "dq_block_n"))     # a pass over keys and a pass over queries

A loop is outside if each block of the grid takes one of its tiles, and inside if a block walks along its tiles.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

from blocktune.kernels.values.config import KernelConfig

TileSizes = tuple[str, str]
"""The parameters with the queries and the keys of a tile."""


class Visits(StrEnum):
    """Which tiles of the score matrix a kernel computes."""

    CAUSAL = "causal"
    """Those that the causal mask leaves."""
    FEATURES = "features"
    """Those that causal mask and window leave; of a mask tensor it reads their part."""
    BLOCK_MASK = "block mask"
    """Those that causal mask and block mask leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardLoops:
    """Queries outside, keys inside, in tiles of block_m and block_n: the output stays on the chip until it is done.

    transposes: the tensor that a launch of its own transposes before, if any.
    unless: the parameter with which the attention does so itself, tile by tile.
    lays_out_masks: a launch of its own writes a mask tensor before, where there is one, as the registers of the next
    want it.
    splits: the parameter that says in how many parts the keys are cut, which a launch of its own merges; empty where
    they never are.
    """

    visits: Visits = Visits.CAUSAL
    transposes: Literal["", "k", "v"] = ""
    unless: str = ""
    lays_out_masks: bool = False
    splits: str = ""

    @property
    def moving_passes(self) -> tuple[str, ...]:
        """The launches around the longest one that only move bytes, by the names that tuner/traffic gives them; the one
        that lays out a mask is there where a mask is."""
        passes = {"transpose": bool(self.transposes), "mask": self.lays_out_masks, "merge": bool(self.splits)}
        return tuple(name for name, is_there in passes.items() if is_there)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTripLoops:
    """Keys outside, queries inside, one block for each head: with every tile the output and the statistics of its rows
    come from memory and go back (FlashAttention v1)."""

    moving_passes: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoops:
    """Packed query heads outside, a share of the keys inside; the parameter `splits` says how many shares there are.

    merges_itself: the last blocks of the launch merge the shares, which else takes a second launch.
    """

    moving_passes: ClassVar[tuple[str, ...]] = ()
    merges_itself: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardLoops:
    """Keys outside, queries inside, after a launch that sums dout * out of every row.

    keys: the tile of the pass with keys outside. queries: the tile of a second pass with queries outside, which makes
    dq; None: the pass over keys adds its parts of dq to float32 sums in memory, from which a last launch makes dq.
    rewrites_lse: the launch before also writes the log-sum-exp in a form of its own.
    parts: the parameter that says in how many parts the query heads that share keys are walked along; above 1 each
    leaves float32 gradients of keys and values, which a launch more adds up. Empty: a group is never divided.
    lays_out_masks: as of `ForwardLoops`.
    """

    keys: TileSizes = ("block_m", "block_n")
    queries: TileSizes | None = None
    visits: Visits = Visits.FEATURES
    rewrites_lse: bool = False
    parts: str = ""
    lays_out_masks: bool = False

    @property
    def moving_passes(self) -> tuple[str, ...]:
        """The launches around the longest one that only move bytes, by the names that tuner/traffic gives them."""
        passes = {"delta": True, "mask": self.lays_out_masks, "dq": self.queries is None, "join": bool(self.parts)}
        return tuple(name for name, is_there in passes.items() if is_there)


Loops = ForwardLoops | RoundTripLoops | DecodeLoops | BackwardLoops


def tile_of(names: TileSizes, config: KernelConfig) -> tuple[int, int]:
    """Return the queries and keys of a tile of this config."""
    queries, keys = (config.parameters[name] for name in names)
    return queries, keys
