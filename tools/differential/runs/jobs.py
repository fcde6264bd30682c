"""The cases of a seed, as jobs for workers, and each by its number."""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tools.differential.cases.case import Case, CompileClass, class_to_json
from tools.differential.cases.classes import cases_in, for_cpu, planned_classes
from tools.differential.cases.strategies import drawn_cases

CLASSES_APART = 1_000_003
"""How far the seeds of classes are apart in those of runs."""

NUMBERS_APART = 1000
"""How far the numbers of the first cases of classes are apart, so that they do not depend on which classes run."""


def planned_jobs(
    seed: int,
    entry: str | None = None,
    most: int | None = None,
    per_class: int | None = None,
    *,
    small: bool = False,
) -> Iterator[dict[str, Any]]:
    """Jobs of drawn classes until there are `most` cases: without end by default. per_class: cases of one at most."""
    left = sys.maxsize if most is None else most
    for place, kind in enumerate(planned_classes(seed)):
        if left <= 0:
            return
        if entry is None or kind.entry == entry:
            count = min(cases_in(kind), left, per_class or left)
            left -= count
            job = {"kind": class_to_json(_as_run(kind, small)), "seed": _seed_of(seed, place), "count": count}
            yield job | {"number": place * NUMBERS_APART}


def case_of(seed: int, number: int, *, small: bool = False) -> Case:
    """The case of this number, as reports name it."""
    place, index = divmod(number, NUMBERS_APART)
    kind = _as_run(next(islice(planned_classes(seed), place, None)), small)
    return next(case for _, case in drawn_cases(kind, _seed_of(seed, place), index + 1, index))


def _as_run(kind: CompileClass, small: bool) -> CompileClass:
    return for_cpu(kind) if small else kind


def _seed_of(seed: int, place: int) -> int:
    return seed * CLASSES_APART + place
