"""Compile classes: what calls have in common that are served by the same compiled kernels.

Compiling dominates the time of a run, so that a class is drawn once and many cases in it: a case varies what no kernel
is compiled for. What decides a compilation besides the constants are strides and addresses that 16 divides or not; the
class says which, and the cases keep to it.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from hypothesis import strategies as st

from tests.differential.cases.case import Alignment, CompileClass, Entry
from tests.differential.cases.drawing import CASES_APART, drawn, rarely, weighted

MAX_DIM = 288

UNIT = 16
"""Triton compiles other code for strides that this divides."""

SAME_DIMS = 0.6
"""Share of the classes whose values are as wide as their keys."""

USUAL_DIMS = (64, 128, 96, 256, 80, 192, 32)
"""Head dimensions of models, drawn half as often as all others together."""


SCALES = ("number", "heads", "batch", "tokens")
NO_SCALES = "none"
"""For what a cache of 8 bits may have a scale each."""


@st.composite
def compile_classes(draw: Callable[[Any], Any]) -> CompileClass:
    """Classes whose head dimensions are yet to be chosen: see `with_dims`."""
    entry = draw(weighted({Entry.SDPA: 10, Entry.FLASH: 2, Entry.VARLEN: 2, Entry.KVCACHE: 1}))
    common: dict[str, Any] = {"entry": entry, "head_dim": 0, "head_dim_v": 0}
    common["dtype"] = draw(weighted({"bfloat16": 4, "float16": 4, "float32": 2}))
    regimes = {"few": 3, "short": 5, "medium": 6, "long": 2}
    common["regime"] = draw(weighted(regimes if entry is not Entry.KVCACHE else {"few": 4, "medium": 1}))
    common["octave"] = draw(st.integers(4, 9) if common["regime"] == "few" else st.integers(11, 12))
    common["gradients"] = entry is not Entry.KVCACHE and draw(weighted({False: 2, True: 1}))
    alignments = {Alignment.NATURAL: 8, Alignment.PADDED: 3, Alignment.ODD: 3, Alignment.MIXED: 0.5}
    common["alignment"] = draw(weighted(alignments))
    lengths = draw(weighted({"odd": 3, "sixteen": 2, "any": 1}))
    common["lengths"] = "odd" if common["alignment"] is Alignment.ODD else lengths
    common["order"] = draw(weighted({"bhs": 2, "bsh": 2, "sbh": 1}))
    common["square"] = common["regime"] in ("short", "medium") and draw(weighted({False: 2, True: 1}))
    heads = st.sampled_from((1, 3) if common["lengths"] == "odd" else (1, 2, 3, 4))
    groups = (1, 1, 3, 5) if common["lengths"] == "odd" else (1, 1, 2, 4, 8, 3)
    common |= {"heads_kv": draw(heads), "group": draw(st.sampled_from(groups))}
    if entry is not Entry.SDPA:
        common |= {"causal": draw(st.booleans()), "window": draw(weighted({False: 2, True: 1}))}
        common |= {"softcap": draw(weighted({False: 3, True: 1})), "alibi": draw(weighted({False: 3, True: 1}))}
        common["slopes_by_batch"] = common["alibi"] and draw(st.booleans())
        common |= {"sinks": draw(weighted({False: 3, True: 1})), "page_size": draw(_page_sizes(entry))}
        if entry is Entry.KVCACHE and not common["page_size"]:
            where = draw(weighted({"": 2, "picked": 1, "padded": 1, "picked padded": 1}))
            common |= {name: name in where for name in ("picked", "padded")}
        if entry is Entry.KVCACHE and common["dtype"] != "float32":
            common["cache_type"] = draw(weighted({"": 3, "float8_e4m3fn": 2, "int8": 1}))
            own = (NO_SCALES,) if common["cache_type"] == "float8_e4m3fn" else ()  # int8 stands for nothing by itself
            common["scales"] = common["cache_type"] and draw(st.sampled_from((*SCALES, *own)))
        return CompileClass(**common)
    special = draw(weighted({"": 28, "rank": 1, "refusals": 1}))
    common["mask"] = draw(weighted({"none": 10, "boolean": 4, "additive": 3, "float32": 1}))
    common["causal"] = common["mask"] == "none" and draw(st.booleans())
    if common["mask"] != "none":
        letters = (draw(weighted({letter: 4 if letter == "k" else 2, "1": 1})) for letter in "bhqk")
        common |= {"mask_sizes": "".join(letters), "mask_transposed": draw(rarely())}
        common["mask_row_odd"] = draw(st.booleans())
    if special == "rank":
        common |= {"rank": draw(st.sampled_from((2, 3, 5))), "group": 1}
    common["refusals"] = special == "refusals"
    return CompileClass(**common)


def _page_sizes(entry: Entry) -> st.SearchStrategy[int]:
    sizes: dict[Entry, dict[int, float]] = {
        Entry.KVCACHE: {0: 4, 16: 2, 64: 2, 256: 2, 48: 1},
        Entry.VARLEN: {0: 5, 16: 1, 48: 1},
    }
    return weighted(sizes.get(entry, {0: 1}))


def with_dims(kind: CompileClass, head_dim: int, head_dim_v: int) -> CompileClass:
    """The class with these head dimensions. Lengths, heads and order are free where they decide no stride's divisor: of
    rows of whole units, and with anything but a plain forward also the log-sum-exp has strides."""
    whole = head_dim % UNIT == 0 and head_dim_v % UNIT == 0 and kind.alignment in (Alignment.NATURAL, Alignment.PADDED)
    plain = kind.entry is Entry.SDPA and kind.mask == "none" and not kind.gradients
    lengths = kind.lengths
    if whole and plain:
        lengths = "any"
    elif lengths == "any" and not whole:
        lengths = "sixteen"
    packed = kind.entry in (Entry.VARLEN, Entry.KVCACHE)  # which have one order
    order = "any" if whole else "bsh" if packed else kind.order
    return replace(kind, head_dim=head_dim, head_dim_v=head_dim_v, lengths=lengths, order=order)


def cases_in(kind: CompileClass) -> int:
    """How many cases a class is worth: the fewer kernels they share, the fewer."""
    if kind.alignment is Alignment.MIXED or kind.refusals:
        return 10
    return 28 if kind.regime == "few" or kind.rank != 4 else 44


def planned_classes(number: int) -> Iterator[CompileClass]:
    """Classes without end, the same ones for the same number (a seed). Every head_dim and every head_dim_v from 1 to
    MAX_DIM comes in turns, in a drawn order, and the usual ones between them."""
    dice = random.Random(number)
    for deck in count():
        for index, dims in enumerate(dims_deck(dice)):
            yield with_dims(drawn(compile_classes(), (number * CASES_APART + deck) * CASES_APART + index), *dims)


def dims_deck(dice: random.Random) -> list[tuple[int, int]]:
    """(head_dim, head_dim_v), each with every dimension, and half as many usual ones. Where the two differ, those that
    do have changed places."""
    dims = [*range(1, MAX_DIM + 1), *dice.choices(USUAL_DIMS, k=MAX_DIM // 2)]
    dice.shuffle(dims)
    other = [index for index in range(len(dims)) if dice.random() > SAME_DIMS]
    values = list(dims)
    for index, source in zip(other, other[1:] + other[:1], strict=True):
        values[index] = dims[source]
    return list(zip(dims, values, strict=True))
