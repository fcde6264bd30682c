"""The cases of a compile class, as Hypothesis draws them."""

from collections.abc import Callable, Iterator
from math import isqrt
from typing import Any

from hypothesis import strategies as st

from tests.differential.cases.case import Alignment, Case, CompileClass, Entry, Layout, Mode, Values
from tests.differential.cases.classes import UNIT
from tests.differential.cases.drawing import CASES_APART, drawn, rarely, weighted

MAX_PAIRS = 1 << 21
"""(query, key) pairs of all heads of a case: the truth holds about ten float64 of each."""

MAX_ELEMENTS = 1 << 22
"""Of query, or of key, or of value."""

FAR_SIDES = (2**31 - 41, 2**31 - 1, 2**31, 2**63 - 1)
"""Sides of windows that stand for no bound."""

WRONGS = (
    "head_dim", "length", "key_type", "mask_type", "mask_shape", "mask_and_causal", "heads", "dropout", "rank",
    "device", "batch", "integers",
)  # fmt: skip
"""What can be wrong with a call, beside nothing."""

ORDERS = ("bhs", "bsh", "sbh", "hbs", "shb", "hsb")

_VALUES = weighted({
    Values.NORMAL: 12, Values.LARGE: 1, Values.TINY: 1, Values.CONSTANT: 1, Values.ZEROS: 1, Values.SPIKES: 1.5,
    Values.INF: 1, Values.NAN: 1,
})  # fmt: skip


def drawn_cases(kind: CompileClass, number: int, most: int, first: int = 0) -> Iterator[tuple[int, Case]]:
    """Cases number `first` to `most` of a class, with their numbers."""
    strategy = cases(kind)
    for index in range(first, most):
        yield index, drawn(strategy, number * CASES_APART + index)


@st.composite
def cases(draw: Callable[[Any], Any], kind: CompileClass) -> Case:
    """Cases of one class."""
    values: dict[str, Any] = {"kind": kind, "seed": draw(st.integers(0, 2**31 - 1))}
    batches = st.sampled_from((1, 3) if kind.lengths == "odd" else (1, 2, 3))
    batch = 0 if draw(rarely()) and draw(rarely()) else draw(batches)
    seqlen_q, seqlen_k = draw(_lengths(kind))
    values |= _bounded(batch, seqlen_q, seqlen_k, kind)
    for name, dim in (("query", kind.head_dim), ("key", kind.head_dim), ("value", kind.head_dim_v)):
        values[name] = draw(_layouts(kind, dim))
    values["grad"] = draw(_grad_layouts(kind))
    values["values"] = draw(_VALUES)
    if kind.cache_type and values["values"] in (Values.INF, Values.NAN):  # of which 8 bits know nothing
        values["values"] = Values.NORMAL
    values["scale"] = draw(weighted({None: 4, 0.1: 1, 1.0: 1, 0.037: 1, 0.0: 0.15, -0.2: 0.15, 2.5: 0.3}))
    values["mode"] = draw(_modes(kind))
    if kind.gradients:
        values["needs"] = draw(st.sampled_from(("qkv", "qkv", "qkv", "q", "k", "v", "qk", "qv", "kv")))
        values["deterministic"] = kind.entry in (Entry.FLASH, Entry.VARLEN) and draw(rarely())
    if kind.mask != "none":
        values |= draw(_masks(kind))
    if kind.entry is not Entry.SDPA:
        values |= draw(_features(kind, values))
    if kind.refusals:
        values["wrong"] = draw(st.sampled_from(WRONGS))
    return Case(**values)


def _around(low: int, high: int) -> st.SearchStrategy[int]:
    """Lengths in this range, those next to a multiple of a usual block often."""
    blocks = [block * count + step for block in (16, 64, 128) for count in (1, 2, 3, 5) for step in (-1, 0, 1)]
    edges = sorted({edge for edge in blocks if low <= edge <= high} | {low, high})
    return st.one_of(st.sampled_from(edges), st.integers(low, high))


@st.composite
def _lengths(draw: Callable[[Any], Any], kind: CompileClass) -> tuple[int, int]:
    """Queries and keys."""
    if kind.regime == "few":
        found = draw(_around(1, 16)), draw(_around(1 << kind.octave, 2 << kind.octave))
    elif kind.regime == "short":
        found = draw(_around(1, 130)), draw(_around(1, 130))
    elif kind.regime == "medium":
        found = draw(_around(100, 700)), draw(_around(100, 700))
    else:
        keys = draw(st.integers(1 << kind.octave, 2 << kind.octave))
        found = draw(st.one_of(_around(1, 256), st.integers(256, 1100))), keys
    if kind.square:
        found = found[1], found[1]
    if draw(rarely()):
        found = (0, found[1]) if draw(st.booleans()) else (found[0], 0)
    if kind.lengths == "odd":
        found = (found[0] | bool(found[0]), found[1] | bool(found[1]))
    elif kind.lengths == "sixteen":
        found = (-(-found[0] // UNIT) * UNIT, -(-found[1] // UNIT) * UNIT)
    return found


def _bounded(batch: int, seqlen_q: int, seqlen_k: int, kind: CompileClass) -> dict[str, int]:
    """The sizes, made smaller until a case takes no more memory than is meant for it."""
    step = UNIT if kind.lengths == "sixteen" else 2 if kind.lengths == "odd" else 1
    width = max(kind.head_dim, kind.head_dim_v)
    while True:
        heads = batch * kind.heads_kv * kind.group
        if heads * seqlen_q * seqlen_k <= MAX_PAIRS and heads * max(seqlen_q, seqlen_k) * width <= MAX_ELEMENTS:
            break
        if batch > 1:
            batch = 1
        elif seqlen_q > 256 and not kind.square:
            seqlen_q -= -(-(seqlen_q - 256) // (2 * step)) * step
        else:
            seqlen_k -= -(-seqlen_k // (4 * step)) * step
            seqlen_q = seqlen_k if kind.square else min(seqlen_q, seqlen_k)
    return {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}


@st.composite
def _layouts(draw: Callable[[Any], Any], kind: CompileClass, dim: int) -> Layout:
    alignment = kind.alignment
    if alignment is Alignment.MIXED:
        alignment = draw(st.sampled_from((Alignment.NATURAL, Alignment.PADDED, Alignment.ODD)))
    if draw(weighted({False: 40, True: 1})):
        return Layout(order=draw(st.sampled_from(ORDERS)), last_strided=True)
    padding = offset = 0
    if alignment is Alignment.PADDED:
        padding, offset = -dim % UNIT + draw(st.sampled_from((0, UNIT))), draw(st.sampled_from((0, UNIT)))
    elif alignment is Alignment.ODD:
        padding, offset = (dim + 1) % 2 + draw(st.sampled_from((0, 2))), draw(st.sampled_from((1, 3)))
    steps = {"odd": (0, 0, 2), "sixteen": (0, 0, UNIT), "any": (0, 0, 1, 7)}[kind.lengths]
    may_expand = kind.lengths == "any" or draw(rarely())
    return Layout(
        order=draw(st.sampled_from(ORDERS)) if kind.order == "any" else kind.order,
        padding=padding,
        offset=offset,
        extra_rows=draw(st.sampled_from(steps)),
        expanded=draw(weighted({"": 10, "b": 1, "h": 1, "s": 0.5})) if may_expand else "",
    )


@st.composite
def _grad_layouts(draw: Callable[[Any], Any], kind: CompileClass) -> Layout:
    """That of the output's gradient: dense in the order of the class, at times one number for all."""
    if draw(rarely()):
        return Layout(expanded="bhs", last_strided=True)
    return Layout(order=draw(st.sampled_from(ORDERS)) if kind.order == "any" else kind.order)


@st.composite
def _modes(draw: Callable[[Any], Any], kind: CompileClass) -> Mode:
    modes = {Mode.EAGER: 8.0, Mode.STREAM: 1.0, Mode.GRAPH: 1.0, Mode.THREADS: 1.0}
    if not kind.gradients:
        modes |= {Mode.NO_GRAD: 1, Mode.INFERENCE: 2}
    is_dense = kind.alignment is Alignment.NATURAL  # as what autocast converts to
    if kind.dtype != "float32" and kind.entry is Entry.SDPA and is_dense:
        modes[Mode.AUTOCAST] = 1
    found: Mode = draw(weighted(modes))
    return Mode.EAGER if kind.refusals else found


@st.composite
def _masks(draw: Callable[[Any], Any], kind: CompileClass) -> dict[str, Any]:
    sizes = kind.mask_sizes
    if not kind.mask_row_odd:
        sizes = draw(st.sampled_from(("bh", "b1", "1h", "11"))) + sizes[2:]
    return {
        "mask_sizes": sizes,
        "hidden": draw(weighted({"some": 6, "rows": 2, "all": 1, "none": 1})),
    }


@st.composite
def _features(draw: Callable[[Any], Any], kind: CompileClass, sizes: dict[str, Any]) -> dict[str, Any]:
    """What the functions of FlashAttention have beside PyTorch's."""
    found: dict[str, Any] = {}
    if kind.window:
        side = st.one_of(st.sampled_from((0, 1, 63, 64, 65)), st.integers(0, 400), st.sampled_from(FAR_SIDES))
        left, right = draw(side), draw(side)
        unbounded = draw(st.sampled_from(("", "right") if kind.causal else ("", "", "left", "right")))
        found["window"] = (-1 if unbounded == "left" else left, -1 if unbounded == "right" else right)
    if kind.softcap:
        found["softcap"] = draw(st.sampled_from((1.0, 15.0, 50.0)))
    if kind.entry is Entry.VARLEN:
        count = draw(st.integers(1, 4))
        most = isqrt(MAX_PAIRS // (kind.heads_kv * kind.group)) // count  # the truth has all pairs of the packed tokens
        lengths = [st.integers(0, min(sizes[name], most)) for name in ("seqlen_q", "seqlen_k")]
        sequences = [(draw(lengths[0]), draw(lengths[1])) for _ in range(count)]
        found |= {"batch": 1, "sequences": _filled_up(sequences, kind)}
    if kind.entry is Entry.KVCACHE:
        found |= draw(_caches(kind, sizes))
    return found


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
    cached = tuple(draw(full) for _ in range(batch))
    sizes = {"batch": batch, "seqlen_q": queries, "seqlen_k": capacity}
    sizes["num_splits"] = draw(weighted({0: 3, 1: 1, 3: 0.5, 16: 0.5}))
    may_turn = appended and kind.head_dim > 1 and not kind.cache_type  # what is turned is no number of 8 bits
    if may_turn and not is_extreme and draw(st.booleans()):  # it may overflow
        half = kind.head_dim // 2
        sizes |= {"rotary": 2 * draw(st.sampled_from((half, -(-half // 2)))), "interleaved": draw(st.booleans())}
    return sizes | {"appended": appended, "cached": cached, "scale": draw(st.sampled_from((None, 0.1)))}
