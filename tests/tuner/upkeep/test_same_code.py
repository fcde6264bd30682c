"""Winners keep their measurement where another source compiles to the same machine code, and only there."""

import copy
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import get_kernel
from blocktune.runtime.store_reader.export_file import exported_checksum
from blocktune.tuner.candidates.shape_defaults import complete_shape
from tools.checks import same_code

SHAPE = complete_shape(1024, 64)
CONFIG = get_kernel("flash_fwd").default_config(SHAPE, limits_for((9, 0)))
CC = "9.0"
DEVICE = device_named("h200")
ENVIRONMENT = {"triton": "3.6.0"}
CODE = [["0" * 64, 49152, 4]]
EARLIER = "e" * 16


def winner(source: str) -> dict[str, Any]:
    row = {"config": CONFIG.to_json(), "shape": SHAPE.to_json(), "kernel_hash": source, "environment": "e"}
    return row | {"checksum": exported_checksum(row, DEVICE.key, ENVIRONMENT)}


def record(*winners: dict[str, Any]) -> dict[str, Any]:
    return {"device": DEVICE.to_json(), "environments": {"e": ENVIRONMENT}, "bests": [*winners]}


@pytest.mark.parametrize(
    ("source", "code", "end", "carried"),
    [
        (EARLIER, CODE, "same code", True),
        (EARLIER, [["1" * 64, 49152, 4]], "other code", False),
        (EARLIER, [["0" * 64, 65536, 4]], "other code", False),
        (EARLIER, [*CODE, *CODE], "other code", False),
        ("f" * 16, CODE, "of neither source", False),
    ],
)
def test_a_winner_is_carried_where_its_code_is_the_same(
    monkeypatch: pytest.MonkeyPatch, source: str, code: list[list[Any]], end: str, carried: bool
) -> None:
    present = get_kernel(CONFIG.kernel).source_hash
    monkeypatch.setattr(same_code, "source_and_code", lambda winner, cc: (present, CODE))
    given = winner(source)
    before = copy.deepcopy(given)
    ends = same_code.carry(record(given), lambda winner: (EARLIER, code))
    assert ends[end] == 1 == sum(ends.values())
    assert given == (winner(present) if carried else before)


def test_a_winner_of_the_present_source_is_not_compiled() -> None:
    given = winner(get_kernel(CONFIG.kernel).source_hash)

    def ask(winner: dict[str, Any]) -> Any:
        raise AssertionError("nothing is to be asked")

    assert same_code.carry(record(given), ask)["present"] == 1


def test_another_tree_answers_with_its_own_source_and_code() -> None:
    """The tree of this very test, by a process of its own."""
    given = winner(EARLIER)
    with same_code.asking(Path(__file__).parents[3], CC) as ask:
        answers = [ask(given), ask(given)]
    assert answers == 2 * [same_code.source_and_code(given, (9, 0))]
