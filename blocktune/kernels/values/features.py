"""What a caller may ask of attention besides its sizes: each feature changes the code, so each is part of the shape."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Self

from blocktune.kernels.values.errors import UsageError, require_type

UNLIMITED = -1
"""A side of a sliding window that has no bound."""

MAX_SIZE = 2**31 - 1
"""Of lengths and other sizes: what a kernel's 32-bit integers hold."""

Window = tuple[int, int]
"""(left, right) of a sliding window around the diagonal, in keys; `UNLIMITED` on a side without bound."""


class Causal(StrEnum):
    """Which keys a query may see.

    With `UPPER_LEFT` query i sees keys 0..i, as in PyTorch's scaled_dot_product_attention. With `LOWER_RIGHT` query i
    sees keys 0..i + seqlen_k - seqlen_q, as in FlashAttention. The two agree when seqlen_q equals seqlen_k.
    """

    NONE = "none"
    UPPER_LEFT = "upper_left"
    LOWER_RIGHT = "lower_right"


class MaskKind(StrEnum):
    """Which mask tensor comes with a call."""

    NONE = "none"
    BOOLEAN = "boolean"
    """True where the query sees the key; broadcastable to [batch, num_heads, seqlen_q, seqlen_k]."""
    ADDITIVE = "additive"
    """Added to the scaled scores; broadcastable likewise."""
    BLOCK_SPARSE = "block_sparse"
    """A `BlockMask`: whole blocks of (query, key) pairs take part or do not."""
    TREE = "tree"
    """One bit a (query, key) pair over the last keys: the drafts of speculative decoding."""


class CacheType(StrEnum):
    """What the keys and values of a cache are, if they are not of the queries' type."""

    AS_QUERIES = "as_queries"
    E4M3 = "e4m3"
    """torch.float8_e4m3fn."""
    INT8 = "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """The features of a call; by default there are none.

    window: (left, right) of a sliding window around the diagonal, in keys; `UNLIMITED` on a side without bound, as
    sides become that no sequence is as long as.
    softcap: scores go through softcap * tanh(score / softcap). alibi: -slope * |distance to the diagonal| is added.
    dropout: probabilities are dropped at random. varlen: sequences are packed and `cu_seqlens` say where they begin;
    batch counts them, and seqlen_q and seqlen_k are the longest. cached: `cache_seqlens` say how many of the seqlen_k
    keys of a batch entry are there. page_size: keys a page of a paged cache, 0 for a contiguous one. kv: the
    8-bit type of a cache's keys and values, which stand for their numbers times a scale: one of all, of a head or, with
    token_scales, of a token and head. deterministic: of a backward, gradients equal to the bit in every run.

    Raises:
        UsageError: a value is out of range.
    """

    window: Window | None = None
    mask: MaskKind = MaskKind.NONE
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    varlen: bool = False
    cached: bool = False
    page_size: int = 0
    kv: CacheType = CacheType.AS_QUERIES
    token_scales: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", MaskKind(self.mask))
        object.__setattr__(self, "kv", CacheType(self.kv))
        for name in _FLAGS:
            require_type(name, getattr(self, name), bool, "It says that calls have one, not its value.")
        if self.window is not None:
            window = tuple(self.window) if isinstance(self.window, Iterable) else ()
            if len(window) != 2 or any(type(side) is not int or side < UNLIMITED for side in window):
                raise UsageError(
                    f"`window` must be (left, right) in keys, each >= 0, or {UNLIMITED} for no bound, but got "
                    f"{self.window!r}."
                )
            left, right = map(bounded_side, window)
            object.__setattr__(self, "window", None if left == right == UNLIMITED else (left, right))
        if type(self.page_size) is not int or self.page_size < 0 or self.page_size & (self.page_size - 1):
            raise UsageError(f"`page_size` must be 0 or a power of two, but got page_size={self.page_size!r:.80}.")
        if self.page_size and not self.cached:
            raise UsageError(
                f"A paged cache needs cache_seqlens, but got page_size={self.page_size} without `cached`. Add it."
            )
        if self.is_short and not self.cached:
            raise UsageError(f"8-bit keys need a cache, but got kv={self.kv} without `cached`. Add it.")
        if self.token_scales and not self.is_short:
            raise UsageError("Scales per token need an 8-bit cache, but got token_scales without `kv`. Add it.")

    def __bool__(self) -> bool:
        """Return whether the call has any feature."""
        return self is not NO_FEATURES and self != NO_FEATURES  # mostly it is the very object

    @property
    def is_short(self) -> bool:
        """Whether the cache has keys and values of 8 bits."""
        return self.kv is not CacheType.AS_QUERIES

    @property
    def names(self) -> frozenset[str]:
        """What a kernel must know to serve them: the flags by name, `window`, `paged`, the mask's kind, and the cache's
        type as `kv=...`."""
        if self is NO_FEATURES:
            return frozenset()
        flags = {name for name in _FLAGS if getattr(self, name)}
        flags |= {"window"} if self.window is not None else set()
        flags |= {"paged"} if self.page_size else set()
        flags |= {str(self.mask)} if self.mask is not MaskKind.NONE else set()
        flags |= {f"kv={self.kv}"} if self.is_short else set()
        return frozenset(flags)

    @property
    def label(self) -> str:
        """Canonical words, such as `window=127:0 boolean softcap`; empty without features. `parse` reads them."""
        if self is NO_FEATURES:
            return ""
        words = [] if self.window is None else [f"window={self.window[0]}:{self.window[1]}"]
        words += [] if self.mask is MaskKind.NONE else [str(self.mask)]
        words += [name for name in _FLAGS if getattr(self, name)]
        words += [f"page={self.page_size}"] if self.page_size else []
        words += [f"kv={self.kv}"] if self.is_short else []
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the features with this label.

        Raises:
            UsageError: a word is no feature.
        """
        values: dict[str, object] = {}
        for number, word in enumerate(text.split()):
            name, _, value = word.partition("=")
            try:
                if name == "window":
                    left, right = value.split(":")
                    values["window"] = int(left), int(right)
                elif name == "page":
                    values["page_size"] = _size(value)
                elif name == "kv":
                    values["kv"] = CacheType(value)
                elif word in _FLAGS:
                    values[word] = True
                else:
                    values["mask"] = MaskKind(word)
            except ValueError:
                raise UsageError(
                    f"No such feature: {word!r:.80}. The features are window=LEFT:RIGHT, page=SIZE, "
                    f"{', '.join((*_FLAGS, *list(MaskKind)[1:]))}, "
                    f"{', '.join(f'kv={kind}' for kind in list(CacheType)[1:])}."
                ) from None
            if len(values) == number:
                raise UsageError(
                    f"Each feature is said once, and there is one mask, but got {text!r:.80}. Leave {word:.40} out."
                )
        return cls(**values)  # type: ignore[arg-type]


def bounded_side(side: int) -> int:
    """Return a side of a window, `UNLIMITED` where no sequence is as long."""
    return UNLIMITED if side >= MAX_SIZE else side


def canonical(
    causal: Causal, window: Window | None, seqlen_q: int, seqlen_k: int, *, varies: bool
) -> tuple[Causal, Window | None]:
    """Return the causal mask and window of the same pairs that every spelling of them has in common.

    Args:
        causal: the mask; it bounds the right side.
        window: around the diagonal, which is that of the lower right unless the mask is of the upper left.
        seqlen_q: queries of the longest sequence.
        seqlen_k: keys of the longest sequence.
        varies: the lengths of other sequences differ, as in packed sequences and caches.
    """
    left, right = (UNLIMITED, UNLIMITED) if window is None else window
    if causal is Causal.NONE and right == 0:
        causal = Causal.LOWER_RIGHT
    if causal is not Causal.NONE or right >= seqlen_q - 1:  # the first query sees the last key
        right = UNLIMITED
    if left >= (seqlen_q if causal is Causal.UPPER_LEFT else seqlen_k) - 1:  # the last query sees the first key
        left = UNLIMITED
    if causal is Causal.LOWER_RIGHT and seqlen_q == 1:
        causal = Causal.NONE  # a single query stands at the last key
    elif causal is Causal.LOWER_RIGHT and seqlen_q == seqlen_k and not varies:
        causal = Causal.UPPER_LEFT  # the same, and the one that is tuned
    return causal, None if left == right == UNLIMITED else (left, right)


def _size(text: str) -> int:
    """Return a number of keys; one that no kernel can be given raises ValueError."""
    size = int(text)
    if size > MAX_SIZE:
        raise ValueError(f"{text} takes more than 32 bits")
    return size


_FLAGS: tuple[str, ...] = tuple(field.name for field in fields(Features) if field.type in (bool, "bool"))
NO_FEATURES = Features()
