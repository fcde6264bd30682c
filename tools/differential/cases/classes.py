"""Compile classes: what calls have in common that are served by the same compiled kernels.

Compiling dominates the time of a run, so that a class is drawn once and many cases in it: a case varies what no kernel
is compiled for. What decides a compilation besides the constants are strides and addresses that 16 divides or not; the
class says which, and the cases keep to it.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from hypothesis import strategies as st

from tools.differential.cases.case import CompileClass
from tools.differential.cases.drawing import CASES_APART, draw_example, rarely, weigh
from tools.differential.cases.enums import DENSE, KV, QKV, Alignment, Entry

MAX_DIM = 288

UNIT = 16
"""Triton compiles other code for strides that this divides."""

INTERPRETED_DIM = 64
"""The widest heads in Triton's interpreter."""

STEP = 8
"""Head dimensions of models are multiples of it."""

SAME_DIMS = 0.6
"""Share of the classes whose values are as wide as their keys."""

USUAL_DIMS = (64, 128, 96, 256, 80, 192, 32)
"""Head dimensions of models, as many in a deck as multiples of STEP."""

SCALES = ("number", "heads", "batch", "tokens")
NO_SCALES = "none"
"""For what a cache of 8 bits may have a scale each."""

_ENTRIES = weigh({
    Entry.SDPA: 16, Entry.TRANSFORMERS: 4, Entry.FLASH: 6, Entry.FLASH_QKV: 1, Entry.FLASH_KV: 1, Entry.VARLEN: 5,
    Entry.VARLEN_QKV: 1, Entry.VARLEN_KV: 1, Entry.TORCH_VARLEN: 2, Entry.KVCACHE: 6, Entry.MERGE: 1,
})  # fmt: skip


@st.composite
def compile_classes(draw: Callable[[Any], Any]) -> CompileClass:
    """Classes whose head dimensions are yet to be chosen: see `with_dims`."""
    entry = draw(_ENTRIES)
    common: dict[str, Any] = {"entry": entry, "head_dim": 0, "head_dim_v": 0}
    common["dtype"] = draw(weigh({"bfloat16": 4, "float16": 4, "float32": 2}))
    common["traced"] = entry is not Entry.MERGE and draw(weigh({False: 7, True: 1}))
    common |= draw(_lengths(entry, traced=common["traced"]))
    common["gradients"] = entry is not Entry.KVCACHE and draw(weigh({False: 1, True: 1}))
    if entry in (Entry.SDPA, Entry.TRANSFORMERS):
        found = common | draw(_plain(entry))
    else:
        found = common | draw(_features(entry, common["dtype"]))
    if entry in QKV:
        found |= {"group": 1, "square": True}
    return CompileClass(**found)


@st.composite
def _lengths(draw: Callable[[Any], Any], entry: Entry, *, traced: bool) -> dict[str, Any]:
    """How long the sequences are, how many heads there are, and how the tensors lie in memory."""
    regimes = {"few": 3, "short": 5, "medium": 6, "long": 2}
    if traced or entry is Entry.MERGE:
        regimes = {"few": 1, "short": 2}
    elif entry is Entry.KVCACHE:
        regimes = {"few": 4, "medium": 1}
    regime = draw(weigh(regimes))
    found = {"regime": regime, "octave": draw(st.integers(4, 9) if regime == "few" else st.integers(11, 12))}
    alignments = {Alignment.NATURAL: 12, Alignment.PADDED: 3, Alignment.ODD: 3, Alignment.MIXED: 0.5}
    found["alignment"] = draw(weigh(alignments))
    lengths = draw(weigh({"odd": 3, "sixteen": 2, "any": 1}))
    found["lengths"] = "odd" if found["alignment"] is Alignment.ODD else lengths
    found["order"] = draw(weigh({"bhs": 2, "bsh": 2, "sbh": 1}))
    found["square"] = regime in ("short", "medium") and draw(weigh({False: 2, True: 1}))
    heads = st.sampled_from((1, 3) if found["lengths"] == "odd" else (1, 2, 3, 4))
    groups = (1, 1, 3, 5) if found["lengths"] == "odd" else (1, 1, 2, 4, 8, 3)
    return found | {"heads_kv": draw(heads), "group": draw(st.sampled_from(groups))}


@st.composite
def _features(draw: Callable[[Any], Any], entry: Entry, dtype: str) -> dict[str, Any]:
    """What the functions of FlashAttention have beside PyTorch's."""
    if entry is Entry.MERGE:
        return {}
    found: dict[str, Any] = {"causal": draw(st.booleans()), "window": draw(weigh({False: 1, True: 1}))}
    found["page_size"] = draw(_page_sizes(entry))
    if entry is Entry.TORCH_VARLEN:
        return found
    found |= {"softcap": draw(weigh({False: 3, True: 1})), "alibi": draw(weigh({False: 3, True: 1}))}
    found["slopes_by_batch"] = found["alibi"] and draw(st.booleans())
    found["sinks"] = entry not in (*QKV, *KV) and draw(weigh({False: 3, True: 1}))
    if entry is Entry.KVCACHE and not found["page_size"]:
        where = draw(weigh({"": 2, "picked": 1, "padded": 1, "picked padded": 1}))
        found |= {name: name in where for name in ("picked", "padded")}
    if entry is Entry.KVCACHE and dtype != "float32":
        found["cache_type"] = draw(weigh({"": 3, "float8_e4m3fn": 2, "int8": 1}))
        own = (NO_SCALES,) if found["cache_type"] == "float8_e4m3fn" else ()  # int8 stands for nothing by itself
        found["scales"] = found["cache_type"] and draw(st.sampled_from((*SCALES, *own)))
    return found


@st.composite
def _plain(draw: Callable[[Any], Any], entry: Entry) -> dict[str, Any]:
    """What calls with PyTorch's arguments have, and the models of transformers."""
    found: dict[str, Any] = {"mask": draw(weigh({"none": 10, "boolean": 4, "additive": 4, "float32": 2}))}
    found["causal"] = found["mask"] == "none" and draw(st.booleans())
    if found["mask"] != "none":
        letters = (draw(weigh({letter: 4 if letter == "k" else 2, "1": 1})) for letter in "bhqk")
        found |= {"mask_sizes": "".join(letters), "mask_transposed": draw(rarely())}
        found["mask_row_odd"] = draw(st.booleans())
    if entry is Entry.TRANSFORMERS:
        found["window"] = found["causal"] and draw(st.booleans())
        return found | {name: draw(weigh({False: 3, True: 1})) for name in ("softcap", "sinks")}
    special = draw(weigh({"": 28, "rank": 1, "refusals": 1}))
    if special == "rank":
        found |= {"rank": draw(st.sampled_from((2, 3, 5))), "group": 1}
    return found | {"refusals": special == "refusals"}


def _page_sizes(entry: Entry) -> st.SearchStrategy[int]:
    odd = {1: 0.5, 7: 0.5, 24: 0.5, 100: 0.5, 512: 0.5}
    sizes: dict[Entry, dict[int, float]] = {
        Entry.KVCACHE: {0: 5, 16: 2, 64: 2, 256: 2, 48: 1, 32: 0.5, 128: 0.5} | odd,
        Entry.VARLEN: {0: 5, 16: 1, 48: 1, 64: 0.5, 128: 0.5, 256: 0.5} | odd,
        Entry.TORCH_VARLEN: {0: 3, 16: 1, 64: 0.5, 256: 0.5} | odd,
    }
    return weigh(sizes.get(entry, {0: 1}))


def with_dims(kind: CompileClass, head_dim: int, head_dim_v: int) -> CompileClass:
    """The class with these head dimensions. Lengths, heads and order are free where they decide no stride's divisor: of
    rows of whole units, and with anything but a plain forward also the log-sum-exp has strides."""
    if kind.entry in (*QKV, *KV):
        head_dim_v = head_dim
    whole = head_dim % UNIT == 0 and head_dim_v % UNIT == 0 and kind.alignment in (Alignment.NATURAL, Alignment.PADDED)
    plain = kind.entry is Entry.SDPA and kind.mask == "none" and not kind.gradients
    lengths = kind.lengths
    if whole and plain:
        lengths = "any"
    elif lengths == "any" and not whole:
        lengths = "sixteen"
    dense = kind.is_plain or kind.entry in (*DENSE, Entry.MERGE)  # others have one order
    order = "any" if whole else kind.order if dense else "bsh"
    return replace(kind, head_dim=head_dim, head_dim_v=head_dim_v, lengths=lengths, order=order)


def for_cpu(kind: CompileClass) -> CompileClass:
    """The class for a CPU, and Triton's interpreter, which multiplies bfloat16 wrongly, and is slow."""
    regime = "few" if kind.regime == "few" else "tiny"
    dtype = "float16" if kind.dtype == "bfloat16" else kind.dtype
    heads_kv, group = (min(number, 3 if kind.lengths == "odd" else 2) for number in (kind.heads_kv, kind.group))
    kind = replace(kind, regime=regime, octave=min(kind.octave, 5), dtype=dtype, heads_kv=heads_kv, group=group)
    widths = ((width - 1) % INTERPRETED_DIM + 1 for width in (kind.head_dim, kind.head_dim_v))
    return with_dims(kind, *widths)


def cases_in(kind: CompileClass) -> int:
    """How many cases a class is worth: the fewer kernels they share, the fewer. Most of a class's kernels are compiled
    within the first 50 of its cases; a case with a new kernel takes seconds, one without a tenth of one."""
    if kind.traced:
        return 5
    if kind.alignment is Alignment.MIXED or kind.refusals:
        return 12
    if kind.entry is Entry.MERGE:
        return 60
    return 300 if kind.regime == "few" or kind.rank != 4 else 420


def planned_classes(number: int) -> Iterator[CompileClass]:
    """Classes without end, the same ones for the same number (a seed). Every multiple of STEP as head_dim and as
    head_dim_v comes in turns, in a drawn order, with other widths, which come in turns as well, and usual ones."""
    dice = random.Random(number)
    others = [width for width in range(1, MAX_DIM + 1) if width % STEP]
    dice.shuffle(others)
    for deck in count():
        share = MAX_DIM // STEP
        between = [others[place % len(others)] for place in range(deck * share, (deck + 1) * share)]
        for index, dims in enumerate(dims_deck(dice, between)):
            yield with_dims(draw_example(compile_classes(), (number * CASES_APART + deck) * CASES_APART + index), *dims)


def dims_deck(dice: random.Random, others: Sequence[int]) -> list[tuple[int, int]]:
    """(head_dim, head_dim_v), each with every multiple of STEP, the others, and as many usual ones. Where the two
    differ, those that do have changed places."""
    widths = range(STEP, MAX_DIM + 1, STEP)
    dims = [*widths, *others, *dice.choices(USUAL_DIMS, k=len(widths))]
    dice.shuffle(dims)
    other = [index for index in range(len(dims)) if dice.random() > SAME_DIMS]
    values = list(dims)
    for index, source in zip(other, other[1:] + other[:1], strict=True):
        values[index] = dims[source]
    return list(zip(dims, values, strict=True))
