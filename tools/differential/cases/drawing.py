"""Examples of Hypothesis strategies by number."""

from collections.abc import Mapping
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

CASES_APART = 1 << 16
"""How far the seeds of classes are apart: more cases than any has."""

Drawn = TypeVar("Drawn")


def draw_example(strategy: st.SearchStrategy[Drawn], number: int) -> Drawn:
    """An example, the same one for the same number (a seed) and version of Hypothesis.

    Of a longer run most examples would be variations of each other: Hypothesis repeats parts of what it has drawn. The
    first example of a run is the simplest one, whatever the seed.
    """
    examples: list[Drawn] = []

    @seed(number)
    @settings(
        max_examples=2,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: Drawn) -> None:
        examples.append(example)

    collect()
    return examples[-1]


def weigh(weights: Mapping[Any, float]) -> st.SearchStrategy[Any]:
    """One of these, about as often as its weight says."""
    least = min(weights.values())
    return st.sampled_from([value for value, weight in weights.items() for _ in range(round(weight / least))])


def rarely() -> st.SearchStrategy[bool]:
    return weigh({False: 11, True: 1})
