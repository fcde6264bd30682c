"""Drawn cases are documents, the same ones for the same seed, and cover what they are to cover."""

import random
from dataclasses import replace
from itertools import islice

import pytest
import torch

from tools.differential.cases.case import Case, CompileClass, Layout, class_from_json, class_to_json
from tools.differential.cases.classes import MAX_DIM, NO_SCALES, SCALES, STEP, UNIT, dims_deck, planned_classes
from tools.differential.cases.enums import Alignment, Entry
from tools.differential.cases.features import SPLITS
from tools.differential.cases.limits import MAX_ELEMENTS, MAX_PAIRS
from tools.differential.cases.strategies import drawn_cases
from tools.differential.cases.tensors import inputs_of, view_of

CPU = torch.device("cpu")


def drawn(seed: int, classes: int, each: int) -> list[Case]:
    kinds = islice(planned_classes(seed), classes)
    return [case for number, kind in enumerate(kinds) for _, case in drawn_cases(kind, number, each)]


@pytest.fixture(scope="module")
def some() -> list[Case]:
    return drawn(7, 40, 2)


def test_a_case_is_what_its_document_says(some: list[Case]) -> None:
    for case in some:
        assert Case.from_json(case.to_json()) == case
        assert class_from_json(class_to_json(case.kind)) == case.kind


def test_the_same_seed_draws_the_same_cases(some: list[Case]) -> None:
    assert drawn(7, 3, 2) == some[:6]
    assert drawn(8, 3, 2) != some[:6]


def test_cases_differ(some: list[Case]) -> None:
    assert len({case.text for case in some}) == len(some)


def test_everything_that_a_cache_takes_is_drawn() -> None:
    kinds = [kind for kind in islice(planned_classes(13), 800) if kind.entry in (Entry.KVCACHE, Entry.VARLEN)]
    caches = [kind for kind in kinds if kind.entry is Entry.KVCACHE]
    pages = {0, 1, 7, 16, 24, 48, 64, 100, 128, 256, 512}
    assert {kind.page_size for kind in caches} == pages | {32}
    assert {(kind.picked, kind.padded) for kind in caches if not kind.page_size} == {
        (False, False), (False, True), (True, False), (True, True),
    }  # fmt: skip
    assert {kind.page_size for kind in kinds if kind.entry is Entry.VARLEN} == pages
    assert {kind.sinks for kind in kinds} == {False, True}
    assert {kind.cache_type for kind in caches} == {"", "float8_e4m3fn", "int8"}
    assert {kind.scales for kind in caches} == {"", NO_SCALES, *SCALES}
    found = [case for number, kind in enumerate(caches) for _, case in drawn_cases(kind, number, 1)]
    assert {case.num_splits for case in found} == set(SPLITS)
    assert {case.interleaved for case in found if case.rotary} == {False, True}
    assert all(case.rotary <= case.kind.head_dim for case in found)


def test_a_job_that_goes_on_draws_what_is_left_of_it(some: list[Case]) -> None:
    assert [case for _, case in drawn_cases(some[0].kind, 0, 2, 1)] == some[1:2]


def test_tensors_of_fewer_dimensions_have_a_batch_entry() -> None:
    kind = CompileClass(entry=Entry.SDPA, dtype="float16", head_dim=16, head_dim_v=16, rank=3)
    drawn = {rank: [case for _, case in drawn_cases(replace(kind, rank=rank), 1239, 100)] for rank in (3, 4)}
    assert {rank: min(case.batch for case in found) for rank, found in drawn.items()} == {3: 1, 4: 0}


def test_every_multiple_of_8_and_other_widths_come_in_turns() -> None:
    others = [1, 5, 71, 287]
    deck = dims_deck(random.Random(3), others)
    for side in (0, 1):
        assert {dims[side] for dims in deck} == {*range(STEP, MAX_DIM + 1, STEP), *others}
    assert 0.5 < sum(head_dim == head_dim_v for head_dim, head_dim_v in deck) / len(deck) < 0.75


def test_sizes_are_bounded_and_strides_keep_to_their_class(some: list[Case]) -> None:
    for case in some:
        if case.kind.is_packed:
            tokens = [sum(lengths) for lengths in zip(*case.sequences, strict=True)]
            assert case.heads * tokens[0] * tokens[1] <= 1.1 * MAX_PAIRS
        else:
            assert case.batch * case.heads * case.seqlen_q * case.seqlen_k <= MAX_PAIRS
        if case.kind.entry in (Entry.SDPA, Entry.FLASH):
            width = max(case.kind.head_dim, case.kind.head_dim_v)
            assert case.batch * case.heads * max(case.seqlen_q, case.seqlen_k) * width <= MAX_ELEMENTS
        if case.kind.alignment is Alignment.PADDED and not case.query.last_strided:
            query = inputs_of(case, CPU).query.tensor
            assert all(stride % UNIT == 0 for stride in query.stride()[:-1])
            assert query.storage_offset() % UNIT == 0


@pytest.mark.parametrize(
    "layout",
    [
        Layout(order="sbh", padding=3, offset=1, extra_rows=2),
        Layout(order="bsh", expanded="h"),
        Layout(order="hsb", last_strided=True),
        Layout(expanded="bhs", last_strided=True),
    ],
)
def test_a_layout_is_how_the_tensor_lies_in_memory(layout: Layout) -> None:
    view = view_of((2, 3, 5), 7, layout, torch.float32, torch.Generator().manual_seed(0))
    assert view.tensor.shape == (2, 3, 5, 7)
    assert view.tensor.storage_offset() == layout.offset
    strides = dict(zip("bhs", view.tensor.stride(), strict=False))
    for letter in layout.expanded:
        assert strides[letter] == 0
    if not layout.expanded:
        assert sorted(strides, key=strides.__getitem__, reverse=True) == list(layout.order)
    assert (view.tensor.stride(-1) != 1) == layout.last_strided
    view.memory.fill_(2.0)
    assert bool((view.tensor == 2.0).all())


def test_the_first_row_of_an_odd_tensor_begins_at_an_odd_element() -> None:
    kind = CompileClass(
        entry=Entry.SDPA, dtype="float16", head_dim=64, head_dim_v=64, alignment=Alignment.ODD, lengths="odd"
    )
    for _, case in drawn_cases(kind, 5, 20):
        key = inputs_of(case, CPU).key.tensor
        if not case.key.last_strided:
            assert key.storage_offset() % 2 == 1
        if not (case.key.last_strided or case.key.expanded or 1 in key.shape):
            assert all(stride % 2 == 1 for stride in key.stride()[:-1]) or case.batch == 2
