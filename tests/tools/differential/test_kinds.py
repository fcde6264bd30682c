"""Every kind of call in which a fault was found by hand is drawn."""

from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

import pytest

from tools.differential.cases.case import Case, CompileClass
from tools.differential.cases.classes import planned_classes
from tools.differential.cases.enums import CAPTURED, TRACED, Entry, Mode
from tools.differential.cases.features import CAPS
from tools.differential.cases.limits import INT32, sides_near
from tools.differential.cases.strategies import drawn_cases

CASES = 200
FLASH = {"entry": Entry.FLASH, "gradients": True}
MASKED = {"entry": Entry.SDPA, "mask": "float32", "gradients": True}
TOOLS = {"entry": Entry.VARLEN, "traced": True, "gradients": True}
PAGED = {"entry": Entry.KVCACHE, "page_size": 16, "regime": "few", "octave": 6}


@cache
def case_of(number: int, *options: tuple[str, Any]) -> Case:
    kind = CompileClass(dtype="float16", head_dim=64, head_dim_v=64, **dict(options))
    ((_, case),) = drawn_cases(kind, 3, number + 1, number)
    return case


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "is_one"),
    [
        (FLASH | {"window": True}, lambda case: case.window[0] == INT32),
        (FLASH | {"window": True}, lambda case: case.window[1] == INT32),
        (FLASH | {"window": True}, lambda case: case.window[0] == INT32 + 1 - case.seqlen_k),
        (FLASH | {"window": True}, lambda case: max(case.window) > INT32 + 1),
        (FLASH | {"window": True}, lambda case: case.window == (-1, 0)),
        (FLASH | {"alibi": True}, lambda case: "a" in case.needs),
        (FLASH | {"sinks": True}, lambda case: "s" in case.needs),
        (FLASH | {"sinks": True}, lambda case: case.apart),
        (FLASH | {"softcap": True}, lambda case: case.softcap == max(CAPS)),
        (FLASH, lambda case: case.mode is Mode.REORDERED),
        (FLASH, lambda case: case.mode is Mode.CHECKPOINT),
        (FLASH, lambda case: case.mode is Mode.POOL),
        (FLASH, lambda case: case.mode is Mode.TWO_STREAMS),
        (FLASH, lambda case: case.mode is Mode.FIRST_GRAPH),
        (MASKED, lambda case: case.hides == "least" and case.hidden in ("rows", "all")),
        (MASKED, lambda case: case.hides == "least_of_type" and case.hidden == "left"),
        (MASKED, lambda case: case.hides == "mixed" and case.hidden == "right"),
        (MASKED, lambda case: case.stray == "nan"),
        (MASKED | {"mask": "boolean"}, lambda case: case.mode in CAPTURED and case.scale == 0.0),
        (MASKED | {"mask": "boolean"}, lambda case: case.mode in CAPTURED and (case.scale or 0.0) < 0.0),
        (PAGED, lambda case: case.unused == "minus" and min(case.cached) + case.appended <= case.seqlen_k - 16),
        (PAGED, lambda case: case.shared and min(case.cached) >= 16),
        (PAGED, lambda case: case.one_length),
        ({"entry": Entry.VARLEN}, lambda case: max(case.slack) > 1000),
        ({"entry": Entry.MERGE}, lambda case: case.unwritten and case.hidden in ("rows", "all")),
        *((TOOLS, lambda case, mode=mode: case.mode is mode) for mode in TRACED),
        (TOOLS, lambda case: case.mode is Mode.FULL_GRAPH and case.dynamic),
    ],
)  # fmt: skip
def test_a_class_draws_its_kind_of_case(options: dict[str, Any], is_one: Callable[[Case], bool]) -> None:
    assert any(is_one(case_of(number, *options.items())) for number in range(CASES))  # most are drawn early


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_draws_every_kind_of_class(seed: int) -> None:
    kinds = list(islice(planned_classes(seed), 250))
    assert {kind.entry for kind in kinds} == set(Entry)
    traced = [kind for kind in kinds if kind.traced]
    assert len(traced) > 15
    assert any(kind.is_packed for kind in traced)
    gradients = [kind for kind in kinds if kind.gradients]
    for name in ("window", "alibi", "softcap", "sinks"):
        assert sum(getattr(kind, name) for kind in gradients) >= 5
    assert {kind.mask for kind in gradients} == {"none", "boolean", "additive", "float32"}
    assert any(kind.page_size % 8 for kind in kinds)


def test_sides_are_those_around_the_limits_of_integers() -> None:
    assert {0, 1, 39, 40, 2**31 - 1, 2**31 - 40, 2**31, 2**40, 2**63 - 1} <= set(sides_near(40))
    assert min(sides_near(0)) >= 0
