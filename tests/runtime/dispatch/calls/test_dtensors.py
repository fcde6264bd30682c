"""Calls of distributed tensors on gloo: what one device computes, whatever of batch and heads the ranks share."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.suite import warm_python
from tools import program

pytestmark = [pytest.mark.triton_free, pytest.mark.xdist_group("ranks")]

Told = Callable[[int], list[dict[str, Any]]]


def rank_answers(ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Return what each of so many ranks found."""
    result = warm_python.run([*program("ranks.distributed_tensors"), str(folder), str(ranks)], timeout=280)
    assert result.returncode == 0, result.stderr
    played = json.loads(result.stdout)
    assert not any(played["statuses"]), result.stderr
    found: list[dict[str, Any]] = played["told"]
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What ranks found, played once for each number of them."""
    return cache(lambda ranks: rank_answers(ranks, tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (1, 4))])
def test_every_entry_point_takes_distributed_tensors(told: Told, ranks: int) -> None:
    for found in told(ranks):
        placements = [own for own in found.values() if isinstance(own, dict)]
        assert found.get("compiled", 0.0) < 1e-6
        assert len(placements) >= 2
        for errors in placements:
            assert errors["flash_attn_func, features"] < 1e-4
            assert all(error < 1e-2 if "fp8" in name else error < 1e-4 for name, error in errors.items()), errors


def test_packed_sequences_and_pages_are_among_them(told: Told) -> None:
    first, _ = told(2)
    assert "flash_attn_varlen_func" in first["heads"]
    assert "flash_attn_with_kvcache, pages" in first["batch"]


def test_what_ranks_cannot_share_is_refused_with_the_way_out(told: Told) -> None:
    _, second = told(2)
    assert len(second["refusals"]) == 6
    assert all("local_map" in message for message in second["refusals"])
