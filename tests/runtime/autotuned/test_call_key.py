"""What tells calls of a kernel apart, in a process and in the store."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blocktune.runtime.autotuned.call_key import CallKey, power_of_two
from blocktune.runtime.autotuned.config import LaunchProblem


def param(name: str, *, constant: bool = False, specialise: bool = True) -> Any:
    return SimpleNamespace(name=name, is_constexpr=constant, do_not_specialize=not specialise)


PARAMS = (param("x"), param("n"), param("stride"), param("steps", specialise=False), param("BLOCK", constant=True))
KEY = CallKey(PARAMS, ["n"], {})
BASE = torch.zeros(64, dtype=torch.float16)


def keys(*args: Any, **kwargs: Any) -> tuple[Any, LaunchProblem]:
    return KEY.quick(args, kwargs), KEY.problem(args, kwargs)


@pytest.mark.parametrize(
    ("other", "counts"),
    [
        ((BASE, 101, 32, 5), True),  # a key value
        ((BASE.float(), 100, 32, 5), True),  # a data type
        ((BASE[1:], 100, 32, 5), True),  # an address that does not divide by 16
        ((BASE, 100, 33, 5), True),  # a number that does not
        ((BASE, 100, 1, 5), True),  # the number 1
        ((torch.ones(64, dtype=torch.float16), 100, 48, 7), False),  # other values that Triton compiles alike
    ],
)
def test_what_counts(other: tuple[Any, ...], counts: bool) -> None:
    for mine, others in zip(keys(BASE, 100, 32, 5), keys(*other), strict=True):
        assert (mine != others) is counts


def test_sizes_count_in_a_process_alone_where_they_are_far() -> None:
    plain = keys(BASE, 100, 32, 5)
    for length, is_equal in ((100, True), (999, False)):
        other = keys(torch.ones(length, dtype=torch.float16), 100, 32, 5)
        assert (plain[0] == other[0]) is is_equal
        assert plain[1] == other[1]


def test_launch_options_and_grids_do_not_count() -> None:
    plain = keys(BASE, n=100, stride=32, steps=5)
    assert keys(BASE, n=100, stride=32, steps=5, grid=(1,), warmup=False, BLOCK=64)[1] == plain[1]
    assert keys(BASE, n=100, stride=32, steps=5, grid=lambda meta: (2,), warmup=False)[0] == plain[0]


def test_equal_values_of_other_types_are_other_calls() -> None:
    for place in (1, 2):
        calls = [(BASE, *(value if at == place else 32 for at in (1, 2)), 5) for value in (1, True, 1.0, None)]
        assert len({KEY.quick(args, {}) for args in calls}) == 4
    assert keys(BASE, [1, 2], 32, 5)[0] == keys(BASE, [1, 2], 32, 5)[0] != keys(BASE, [1, 3], 32, 5)[0]


def test_it_counts_which_tensor_does_not_lie_at_a_multiple_of_16() -> None:
    both = CallKey((param("x"), param("y")), [], {})
    odd, even = BASE[1:], BASE[8:]
    assert both.quick((even, BASE), {}) == both.quick((BASE, even), {})
    assert len({both.quick(args, {}) for args in ((BASE, BASE), (odd, BASE), (BASE, odd), (odd, odd))}) == 4


def test_an_argument_that_is_left_out_is_none_of_its_values() -> None:
    assert keys(BASE, 100)[0] != keys(BASE, 100, None)[0]
    assert keys(BASE, n=100)[0] != keys(BASE, n=100, stride=None)[0]


def test_what_counts_by_position_counts_by_name() -> None:
    plain = keys(BASE, n=100, stride=32, steps=5)[0]
    assert keys(BASE, n=100, stride=48, steps=7)[0] == plain
    for other in ({"n": 101}, {"stride": 33}, {"stride": 1}, {"stride": 2.0}):
        assert keys(BASE, **{"n": 100, "stride": 32, "steps": 5} | other)[0] != plain


def test_tensors_count_wherever_they_are() -> None:
    """Also as a key value, and where Triton does not specialise."""
    for place in (1, 3):
        args = [BASE, 100, 32, 5]
        args[place] = BASE
        aligned = KEY.quick(args, {})
        args[place] = BASE[1:]
        assert KEY.quick(args, {}) != aligned


def test_the_store_knows_a_call_in_words() -> None:
    assert keys(BASE[1:], 100, 32, 5)[1].label == "n=100 (fp16! /16)"
    assert keys(torch.zeros(4, dtype=torch.bfloat16), 100, 1, 5)[1].label == "n=100 (bf16 =1)"


def test_many_arguments_are_known_by_their_hash() -> None:
    many = CallKey([param(f"a{number}") for number in range(300)], [], {})
    one, other = many.problem([BASE] * 300, {}), many.problem([BASE] * 299 + [BASE[1:]], {})
    assert one != other
    assert len(one.document) < 100


def test_key_values_may_be_grouped() -> None:
    grouped = CallKey(PARAMS, ["n"], {"n": power_of_two})
    assert [power_of_two(size) for size in (0, 1, 2, 3, 100, 128, 129)] == [0, 1, 2, 4, 128, 128, 256]
    assert grouped.problem((BASE, 100, 32, 5), {}) == grouped.problem((BASE, 128, 32, 5), {})
    assert grouped.problem((BASE, 100, 32, 5), {}) != grouped.problem((BASE, 129, 32, 5), {})


def test_key_values_of_any_type_are_taken() -> None:
    assert keys(BASE, [1, 2], 32, 5) == keys(BASE, [1, 2], 32, 5)
    assert keys(BASE, torch.float16, 32, 5)[1].label.startswith("n=torch.float16")
    long, other = (keys(BASE, "n" * 5000 + end, 32, 5)[1] for end in "ab")
    assert long != other
    assert len(long.document) < 200
