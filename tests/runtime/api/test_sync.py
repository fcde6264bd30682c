"""Ranks with different stores choose the same configs after `sync_configs`, or all of them say why not."""

import json
from typing import Any

import pytest

import blocktune
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.api.rank_sync import ANSWER_BYTES, SyncedConfigs, error_text, sync_configs
from blocktune.runtime.store_reader.provenance import Reuse
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from tests.support.fakes.dispatch_fakes import H200, shape_like
from tests.support.suite import warm_python
from tools import program

pytestmark = pytest.mark.triton_free

Told = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What every rank of every scenario told; all of them are played in one go."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [*program("ranks.sync_ranks"), str(folder)]
    result = warm_python.run(command, timeout=120)
    assert result.returncode == 0, result.stderr
    found: Told = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(("scenario", "ranks"), [("two", 2), ("four", 4)])
def test_all_ranks_take_what_rank_0_has(told: Told, scenario: str, ranks: int) -> None:
    assert [rank["before"] for rank in told[scenario]] == list(range(ranks))
    assert [rank["after"] for rank in told[scenario]] == [0] * ranks
    assert len({rank["hash"] for rank in told[scenario]}) == 1
    assert [rank["autotuned"] for rank in told[scenario]] == [[128]] * ranks


def test_the_hash_names_the_decision(told: Told) -> None:
    assert told["two"][0]["hash"] == told["four"][0]["hash"] != told["subgroup"][1]["hash"]


def test_a_group_follows_its_own_first_rank_and_leaves_others_alone(told: Told) -> None:
    assert [rank["after"] for rank in told["subgroup"]] == [0, 1, 1]
    assert "hash" not in told["subgroup"][0]


@pytest.mark.parametrize(
    ("scenario", "why"),
    [
        ("other device", "same kind of device"),
        ("other limits", "same kind of device"),
        ("no GPU on rank 0", "rank 0: NoDeviceError: A GPU is required here; rank 1: "),
        ("no GPU on rank 1", "rank 1: NoDeviceError: A GPU is required here. Give all ranks"),
        ("nonsense", "AttributeError: 'object' object has no attribute"),
        ("other triton", "triton"),
        ("other kernel", "kernels"),
        ("other strictness", "strictness"),
    ],
)
def test_where_one_differs_all_raise_and_keep_what_they_had(told: Told, scenario: str, why: str) -> None:
    for rank in told[scenario]:
        assert why in rank["error"]
        assert rank["after"] == rank["before"]
        assert rank["autotuned"] == []
    assert len({rank["error"] for rank in told[scenario]}) == 1


def test_without_a_group_it_is_wrong_use() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        sync_configs()


def test_it_is_a_public_name() -> None:
    assert blocktune.sync_configs is sync_configs


def test_a_decision_survives_the_way_and_serves_its_device_only() -> None:
    rows = (
        TunedConfig(
            shape=shape_like(64),
            config=KernelConfig("plain", 64, 64, 4, 2, extra=(("own", 3),)),
            origin=Origin.BORROWED,
            time_us=3.5,
            reuse=Reuse.OTHER_DRIVER,
        ),
        TunedConfig(shape=shape_like(32), config=KernelConfig("plain", 64, 64, 4, 2), origin=Origin.PREDICTED),
    )
    synced = SyncedConfigs.from_json(json.loads(json.dumps(SyncedConfigs(H200.key, rows).to_json())))
    assert synced.configs(H200) == rows
    assert synced.configs(device_named("h100_sxm5")) == ()


def test_a_problem_of_any_letters_fits_an_answer() -> None:
    for letter in ("a", "ö", "\N{GRINNING FACE}", "\\", '"'):
        assert len(json.dumps({"problem": error_text(ValueError(2000 * letter))})) <= ANSWER_BYTES
