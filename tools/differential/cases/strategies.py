"""The cases of a compile class, as Hypothesis draws them."""

from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from tools.differential.cases.case import Case, CompileClass, Layout
from tools.differential.cases.classes import UNIT
from tools.differential.cases.drawing import CASES_APART, draw_example, rarely, weigh
from tools.differential.cases.enums import HOOKED, QKV, TRACED, Alignment, Entry, Mode, Values
from tools.differential.cases.features import features, masks
from tools.differential.cases.limits import MAX_ELEMENTS, MAX_PAIRS

WRONGS = (
    "head_dim", "length", "key_type", "mask_type", "mask_shape", "mask_and_causal", "heads", "dropout", "rank",
    "device", "batch", "integers",
)  # fmt: skip
"""What can be wrong with a call, beside nothing."""

ORDERS = ("bhs", "bsh", "sbh", "hbs", "shb", "hsb")

_VALUES = weigh({
    Values.NORMAL: 12, Values.LARGE: 1, Values.TINY: 1, Values.CONSTANT: 1, Values.ZEROS: 1, Values.SPIKES: 1.5,
    Values.INF: 1, Values.NAN: 1,
})  # fmt: skip
_SCALES = weigh({None: 4, 0.1: 1, 1.0: 1, 0.037: 1, 2.5: 0.5, 20.0: 0.25, 1e-30: 0.25, 0.0: 0.5, -0.2: 0.5})


def drawn_cases(kind: CompileClass, number: int, most: int, first: int = 0) -> Iterator[tuple[int, Case]]:
    """Cases number `first` to `most` of a class, with their numbers."""
    strategy = cases(kind)
    for index in range(first, most):
        yield index, draw_example(strategy, number * CASES_APART + index)


@st.composite
def cases(draw: Callable[[Any], Any], kind: CompileClass) -> Case:
    """Cases of one class."""
    values: dict[str, Any] = {"kind": kind, "seed": draw(st.integers(0, 2**31 - 1))}
    batches = st.sampled_from((1, 3) if kind.lengths == "odd" else (1, 2, 3))
    # a call of fewer dimensions is about one batch entry
    batch = 0 if draw(rarely()) and draw(rarely()) and kind.rank >= 4 else draw(batches)
    seqlen_q, seqlen_k = draw(_lengths(kind))
    values |= _bound_sizes(batch, seqlen_q, seqlen_k, kind)
    for name, dim in (("query", kind.head_dim), ("key", kind.head_dim), ("value", kind.head_dim_v)):
        values[name] = draw(_layouts(kind, dim))
    values["grad"] = draw(_grad_layouts(kind))
    values["values"] = draw(_VALUES)
    if kind.cache_type and values["values"] in (Values.INF, Values.NAN):  # of which 8 bits know nothing
        values["values"] = Values.NORMAL
    values["scale"] = draw(_SCALES)
    values["mode"] = draw(_modes(kind))
    values["dynamic"] = values["mode"] in TRACED and draw(weigh({False: 3, True: 1}))
    if kind.gradients:
        values["needs"] = draw(_needs(kind))
        values["deterministic"] = kind.entry in (Entry.FLASH, Entry.VARLEN) and draw(rarely())
    if kind.mask != "none" or kind.entry is Entry.MERGE:
        values |= draw(masks(kind))
    values |= draw(features(kind, values))
    if kind.entry is Entry.MERGE and values["values"] not in (Values.TINY, Values.ZEROS):
        values["values"] = Values.NORMAL  # parts are rounded
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
    elif kind.regime == "tiny":
        found = draw(_around(1, 40)), draw(_around(1, 40))
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
    return (found[1], found[1]) if kind.entry in QKV else found


def _bound_sizes(batch: int, seqlen_q: int, seqlen_k: int, kind: CompileClass) -> dict[str, int]:
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
    if draw(weigh({False: 40, True: 1})):
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
        expanded=draw(weigh({"": 10, "b": 1, "h": 1, "s": 0.5})) if may_expand else "",
    )


@st.composite
def _grad_layouts(draw: Callable[[Any], Any], kind: CompileClass) -> Layout:
    """That of the output's gradient: dense in the order of the class, at times one number for all."""
    if draw(rarely()):
        return Layout(expanded="bhs", last_strided=True)
    return Layout(order=draw(st.sampled_from(ORDERS)) if kind.order == "any" else kind.order)


@st.composite
def _modes(draw: Callable[[Any], Any], kind: CompileClass) -> Mode:
    if kind.refusals:
        return Mode.EAGER
    if kind.traced:
        traced: Mode = draw(st.sampled_from(TRACED))
        return traced
    modes = {Mode.EAGER: 8.0, Mode.WARMED: 1.0, Mode.GRAPH: 2.0, Mode.THREADS: 1.0, Mode.TWO_STREAMS: 1.0}
    modes |= dict.fromkeys((Mode.STREAM, Mode.DEFAULTS, Mode.FIRST_GRAPH, Mode.POOL, Mode.EMPTIED), 0.5)
    modes |= dict.fromkeys(HOOKED, 0.5) if kind.gradients else {Mode.NO_GRAD: 1, Mode.INFERENCE: 2}
    is_dense = kind.alignment is Alignment.NATURAL  # as what autocast converts to
    if kind.dtype != "float32" and kind.entry is Entry.SDPA and is_dense:
        modes[Mode.AUTOCAST] = 1
    found: Mode = draw(weigh(modes))
    return found


@st.composite
def _needs(draw: Callable[[Any], Any], kind: CompileClass) -> str:
    """Which tensors require gradients."""
    found: str = draw(st.sampled_from(("qkv", "qkv", "qkv", "q", "k", "v", "qk", "qv", "kv")))
    has_bias = kind.mask in ("additive", "float32") and kind.entry is Entry.SDPA
    for letter, has in (("m", has_bias), ("a", kind.alibi), ("s", kind.sinks)):
        if has and draw(st.booleans()):
            found += letter
    return found
