"""`tune run --executor ray`: which flags go together, and a run on a real cluster."""

import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktune.cli.shared.shapes_file import part_of
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.errors import NoDeviceError, UsageError
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.cluster.connection import (
    chosen_kinds,
    kinds_in,
    processors_of,
    resources_of,
    silent_nodes,
    spare_processors,
)
from tests.support.ranks.ray_clusters import RayFleet, ray_fleet

ROOT = Path(__file__).parents[3]
GRID = ("run", "--grid", "seq=8192 dim=64 heads=32 batch=1,2")
H100, H200 = (device_named(name) for name in ("h100-sxm", "h200"))


@pytest.mark.parametrize("name", ["Makefile", "Dockerfile", "docs/guide/clusters.md"])
def test_what_runs_next_to_ray_does_not_call_its_command(name: str) -> None:
    """Ray has a console command `tune` too, and the one that is installed last stays."""
    mine = [line for line in (ROOT / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    called = [line for line in mine if re.search(r"(?:^\s*|\$\(|/|\[\"|: )tune(?:\"| [a-z]+ )", line)]
    assert called == []
    assert any("blocktune " in line or '"blocktune"' in line for line in mine)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--address", "auto"), "--executor ray"),
        (("--exclude", "triton=3.5"), "--executor ray"),
        (("--executor", "ray", "--gpus", 2), "Ray uses all of its cluster"),
        (("--executor", "ray", "--study", "search.db"), "search.db is a file"),
        (("--executor", "ray", "--exclude", "compiler=3"), "NAME=VERSION"),
        (("--executor", "ray", "--exclude", "triton"), "NAME=VERSION"),
        (("--executor", "slurm"), "slurm"),
        (("--shard", "3/2"), "1 <= I <= N"),
        (("--shard", "3/3"), "leaves no shape of 2"),
    ],
    ids=str,
)
def test_flags_that_do_not_go_together_end_the_command(tune, words: tuple[object, ...], said: str) -> None:
    result = tune(*GRID, *words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_shards_are_all_shapes_once_and_each_has_some_of_every_part() -> None:
    shapes = tuple(complete_shape(512, 64, batch=batch) for batch in range(1, 41))
    parts = [part_of(shapes, f"{number}/16") for number in range(1, 17)]
    assert [shape.batch for shape in parts[2]] == [3, 19, 35]
    assert sorted(shape.batch for part in parts for shape in part) == list(range(1, 41))


def test_without_ray_the_message_says_what_to_install(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = tune(*GRID, "--executor", "ray")
    assert result.exit_code == 2
    assert 'pip install "blocktune[ray]"' in result.stderr


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "no.such.host.invalid:6379"])
def test_an_address_where_nothing_answers_ends_the_command_soon(tune, host: str) -> None:
    pytest.importorskip("ray")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        result = tune(*GRID, "--executor", "ray", "--address", host.format(port=silent.getsockname()[1]))
    assert result.exit_code == 2
    assert "such as auto or host:6379" in result.stderr


def test_ray_is_not_started_where_there_is_no_gpu(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("blocktune.tuner.cluster.connection.present_devices", tuple)
    result = tune(*GRID, "--executor", "ray")
    assert result.exit_code == 4
    assert "Name a cluster by --address" in result.stderr


def node(address: str, alive: bool = True, **resources: float) -> dict[str, object]:
    return {"Alive": alive, "NodeID": address, "NodeManagerAddress": address, "Resources": resources}


def test_nodes_say_which_kinds_of_gpu_they_have() -> None:
    nodes = [
        node("a", CPU=64, GPU=4, **resources_of([H200] * 4)),
        node("b", CPU=16, GPU=8, **resources_of([H100] * 8)),
        node("c", alive=False, GPU=4, **resources_of([H200] * 4)),
        node("d", CPU=8, GPU=1),
        node("e", CPU=8),
    ]
    assert kinds_in(nodes) == {H200.key: 4, H100.key: 8}
    assert silent_nodes(nodes) == ["d"]
    assert [processors_of(nodes, name) for name in "abdef"] == [16, 2, 8, 8, 1]
    assert spare_processors(nodes) == 60 + 8 + 7 + 8
    assert spare_processors([node("f", CPU=2, GPU=4)]) == 0


def test_a_device_is_chosen_where_the_cluster_has_several() -> None:
    present = {H200.key: 4, H100.key: 8}
    assert chosen_kinds(present, "any") == [H100.key, H200.key]
    assert chosen_kinds({H200.key: 4}, None) == [H200.key]
    assert chosen_kinds({}, "h200") == [H200.key]  # a node of it may join
    with pytest.raises(UsageError, match="--device any"):
        chosen_kinds(present, None)
    with pytest.raises(NoDeviceError, match="blocktune devices --ray"):
        chosen_kinds({}, "any")


def test_the_resources_of_this_machine_are_json(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktune.kernels.hardware.device.present_devices", lambda: (H200, H200))
    assert json.loads(tune("devices", "--ray").stdout) == {"blocktune:nvidia h200|9.0|132": 2}


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayFleet]:
    pytest.importorskip("ray")
    with ray_fleet(tmp_path, monkeypatch) as fleet:
        monkeypatch.setattr("blocktune.tuner.cluster.executor.RayExecutor", fleet.executor)
        yield fleet


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.triton_free
def test_two_kinds_of_gpu_meet_in_one_store(tune, fleet: RayFleet) -> None:
    fleet.add_node()
    fleet.add_node(device="h100-sxm")
    words = (*GRID, "--trials", 8, "--executor", "ray", "--address", fleet.cluster.address, "--device", "any")
    result = tune(*words, "--db", fleet.place)
    assert result.exit_code == 0, result.stderr
    assert "2 shapes on 1 nvidia h100" in result.stderr
    lines = sorted(result.stdout.splitlines())
    assert [line.split(":")[0] for line in lines] == [
        f"b{batch} h32 s8192 d64 bf16 on {device.name}" for batch in (1, 2) for device in (H100, H200)
    ]
    for device in (H100, H200):
        with ResultStore.open(fleet.place, read_only=True) as store:
            assert [best.shape.batch for best in store.bests(device)] == [1, 2]
