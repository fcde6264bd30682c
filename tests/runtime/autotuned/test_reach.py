"""A stored config beyond the list serves only if a search could have come to it."""

from typing import Any

import pytest

from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.runtime.autotuned.reach import is_in_reach
from blocktune.tuner.subject.neighbours import further_neighbours, neighbours

LISTED: dict[str, Any] = {"BLOCK": 128, "GROUP": 12, "ACT": "relu", "EVEN": True, "num_warps": 4, "num_stages": 3}


def config(**parameters: Any) -> LaunchConfig:
    return LaunchConfig("m:f", tuple(parameters.items()))


LIST = [config(**LISTED), config(**LISTED | {"BLOCK": 256, "ACT": "gelu"}), config(**LISTED, ir_override="ours.ttgir")]


@pytest.mark.parametrize("changed", [{"BLOCK": 16}, {"BLOCK": 1 << 14, "num_warps": 32}, {"maxnreg": 128}, {}])
def test_steps_of_sizes_warps_stages_and_a_bound_of_registers_are_in_reach(changed: dict[str, Any]) -> None:
    assert is_in_reach(config(**LISTED | changed), LIST)


@pytest.mark.parametrize(
    "changed",
    [
        {"BLOCK": 192},
        {"BLOCK": 8},
        {"GROUP": 24},
        {"ACT": "silu"},
        {"EVEN": False},
        {"EVEN": 1},
        {"ir_override": "theirs.ttgir"},
        {"ACT": "gelu", "EVEN": False},
        {"num_ctas": 2},
        {"num_warps": 4.0},
        {"num_stages": 8},
        {"maxnreg": 512},
        {"MORE": 1},
    ],
)
def test_what_no_search_tries_is_out_of_reach(changed: dict[str, Any]) -> None:
    """`ACT` says what the kernel computes, and `ir_override` names code: a search leaves both as they are."""
    assert not is_in_reach(config(**LISTED | changed), LIST)


def test_a_parameter_less_is_out_of_reach() -> None:
    assert not is_in_reach(config(**{name: value for name, value in LISTED.items() if name != "EVEN"}), LIST)


def test_every_step_of_a_search_is_in_reach() -> None:
    for first in LIST:
        for near in [*neighbours(first, LIST), *further_neighbours(first, LIST)]:
            assert all(is_in_reach(step, LIST) for step in (near, *neighbours(near, LIST)))
