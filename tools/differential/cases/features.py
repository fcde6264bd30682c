"""Masks, windows, packed sequences and caches of cases, as Hypothesis draws them."""

from collections.abc import Callable
from math import isqrt
from typing import Any

from hypothesis import strategies as st

from tools.differential.cases.case import CompileClass
from tools.differential.cases.classes import UNIT
from tools.differential.cases.drawing import rarely, weigh
from tools.differential.cases.enums import QKV, Alignment, Entry, Values
from tools.differential.cases.limits import EXTRA_LENGTHS, MAX_PAIRS, sides_near

CAPS = (0.05, 1.0, 15.0, 50.0, 1e3, 1e5, 1e6)

SPLITS = {0: 3, 1: 1, 2: 0.5, 3: 0.5, 16: 0.5, 128: 0.5}

_UNUSED = weigh({"": 2, "minus": 1, "beyond": 1, "largest": 0.5})


@st.composite
def masks(draw: Callable[[Any], Any], kind: CompileClass) -> dict[str, Any]:
    """Which dimensions a mask has, which pairs it hides, and how."""
    sizes = kind.mask_sizes
    if not kind.mask_row_odd:
        sizes = draw(st.sampled_from(("bh", "b1", "1h", "11"))) + sizes[2:]
    hidden = draw(weigh({"some": 6, "rows": 3, "left": 2, "right": 2, "all": 1, "none": 1}))
    found = {"mask_sizes": sizes, "hidden": hidden}
    if kind.entry is Entry.MERGE:
        found["unwritten"] = draw(st.booleans())
    elif kind.mask != "boolean":
        ways = {"infinity": 3, "least": 2, "mixed": 1, "least_of_type": 1}
        found |= {"hides": draw(weigh(ways)), "stray": draw(weigh({"": 20, "nan": 1}))}
    return found


@st.composite
def features(draw: Callable[[Any], Any], kind: CompileClass, sizes: dict[str, Any]) -> dict[str, Any]:
    """What functions have beside PyTorch's arguments."""
    found: dict[str, Any] = {
        "apart": draw(rarely()) if kind.alibi or kind.sinks or kind.entry is Entry.KVCACHE else False
    }
    if kind.softcap:
        found["softcap"] = draw(st.sampled_from(CAPS))
    if kind.is_packed:
        found |= draw(_sequences(kind, sizes))
    if kind.entry is Entry.KVCACHE:
        found |= draw(_caches(kind, sizes))
    if kind.window:
        length = max((keys for _, keys in found.get("sequences", ())), default=sizes["seqlen_k"])
        found["window"] = draw(_windows(kind, length))
    return found


@st.composite
def _windows(draw: Callable[[Any], Any], kind: CompileClass, length: int) -> tuple[int, int]:
    limits = st.sampled_from(sides_near(length))
    side = st.one_of(st.sampled_from((0, 1, 63, 64, 65)), st.integers(0, 400), limits, limits)
    left, right = draw(side), draw(side)
    unbounded = draw(st.sampled_from(("", "right") if kind.causal else ("", "", "left", "right", "causal")))
    if unbounded == "causal":
        return -1, 0
    return (-1 if unbounded == "left" else left, -1 if unbounded == "right" else right)


@st.composite
def _sequences(draw: Callable[[Any], Any], kind: CompileClass, sizes: dict[str, Any]) -> dict[str, Any]:
    """The lengths of packed sequences, and what is said of them."""
    count = draw(st.integers(1, 4))
    most = isqrt(MAX_PAIRS // (kind.heads_kv * kind.group)) // count  # the truth has all pairs of the packed tokens
    lengths = [st.integers(0, min(sizes[name], most)) for name in ("seqlen_q", "seqlen_k")]
    sequences = [(draw(lengths[0]), draw(lengths[1])) for _ in range(count)]
    if kind.entry in QKV:
        sequences = [(keys, keys) for _, keys in sequences]
    slack = weigh(EXTRA_LENGTHS)
    found = {"batch": 1, "sequences": _filled_up(sequences, kind), "slack": (draw(slack), draw(slack))}
    if kind.entry is Entry.TORCH_VARLEN:
        found["num_splits"] = draw(st.sampled_from((0, 1, 3)))
    return found | {"unused": draw(_UNUSED) if kind.page_size else ""}


def _filled_up(sequences: list[tuple[int, int]], kind: CompileClass) -> tuple[tuple[int, int], ...]:
    """The sequences, the last of them longer until there are as many tokens as the class has lengths."""
    totals = [sum(lengths) for lengths in zip(*sequences, strict=True)]
    if kind.lengths == "any":
        missing = [0, 0]
    elif kind.lengths == "odd":
        missing = [(total + 1) % 2 for total in totals]
    else:
        missing = [-total % UNIT for total in totals]
    queries, keys = sequences[-1]
    return *sequences[:-1], (queries + missing[0], keys + missing[1])


@st.composite
def _caches(draw: Callable[[Any], Any], kind: CompileClass, sizes: dict[str, Any]) -> dict[str, Any]:
    """How much of the cache is full, and how much is appended."""
    page, is_extreme = kind.page_size, sizes["values"] not in (Values.NORMAL, Values.TINY, Values.ZEROS)
    capacity = max(sizes["seqlen_k"], 1)
    capacity = -(-capacity // page) * page if page else capacity
    batch, queries = max(sizes["batch"], 1), max(sizes["seqlen_q"], 1)
    most = MAX_PAIRS // (batch * kind.heads_kv * kind.group * capacity)  # queries, since pages have raised the capacity
    queries = max(1, min(queries, most))
    appended = draw(st.sampled_from((0, min(queries, capacity))))
    if kind.alignment is not Alignment.NATURAL or kind.scales == "tokens":
        appended = 0  # what is appended to is dense, and scales of tokens come with their tokens
    full = st.one_of(st.just(capacity - appended), st.integers(0, capacity - appended))
    one_length = not kind.padded and draw(rarely())
    cached = (draw(full),) * batch if one_length else tuple(draw(full) for _ in range(batch))
    found: dict[str, Any] = {"batch": batch, "seqlen_q": queries, "seqlen_k": capacity}
    found |= {"appended": appended, "cached": cached, "one_length": one_length}
    found |= {"num_splits": draw(weigh(SPLITS)), "sliced": draw(weigh({False: 3, True: 1}))}
    if page:
        found["unused"] = draw(_UNUSED)
        found["shared"] = kind.scales not in ("batch", "tokens") and draw(weigh({False: 2, True: 1}))
    may_turn = appended and kind.head_dim > 1 and not kind.cache_type  # what is turned is no number of 8 bits
    if may_turn and not is_extreme and draw(st.booleans()):  # it may overflow
        half = kind.head_dim // 2
        found |= {"rotary": 2 * draw(st.sampled_from((half, -(-half // 2)))), "interleaved": draw(st.booleans())}
    return found
