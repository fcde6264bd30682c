"""Calls of distributed tensors on gloo: what one device computes, whatever of batch and heads the ranks share."""

import json
from typing import Any

import pytest

from tests.support.suite import warm_python
from tools import program

pytestmark = [pytest.mark.triton_free, pytest.mark.xdist_group("ranks")]

Told = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What the ranks found, by how many there were."""
    command = [*program("ranks.distributed_tensors"), str(tmp_path_factory.mktemp("ranks"))]
    result = warm_python.run(command, timeout=280)
    assert result.returncode == 0, result.stderr
    found: Told = json.loads(result.stdout)
    assert not any(status for one in found.values() for status in one["statuses"]), result.stderr
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_entry_point_takes_distributed_tensors(told: Told, ranks: int) -> None:
    for found in told[str(ranks)]["told"]:
        placements = [own for own in found.values() if isinstance(own, dict)]
        assert found.get("compiled", 0.0) < 1e-6
        assert len(placements) >= 2
        for errors in placements:
            assert errors["flash_attn_func, features"] < 1e-4
            assert all(error < 1e-2 if "fp8" in name else error < 1e-4 for name, error in errors.items()), errors
    assert "flash_attn_varlen_func" in told["2"]["told"][0]["heads"]
    assert "flash_attn_with_kvcache, pages" in told["2"]["told"][0]["batch"]


def test_what_ranks_cannot_share_is_refused_with_the_way_out(told: Told) -> None:
    for message in told["2"]["told"][1]["refusals"]:
        assert "local_map" in message
    assert len(told["2"]["told"][1]["refusals"]) == 6
