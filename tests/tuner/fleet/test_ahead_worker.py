"""What is compiled ahead of a job: the configs that its search begins with, for a GPU that is not here."""

import dataclasses
from pathlib import Path

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import competing, get_kernel
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.starting_configs import find_contenders
from blocktune.tuner.cluster.compile_task import compile_part
from blocktune.tuner.cluster.compiling import next_to_begin
from blocktune.tuner.cluster.task_record import TaskRecord
from blocktune.tuner.compile.cache import ResourceCache
from blocktune.tuner.compile.compiler import compile_key, has_code
from blocktune.tuner.compile.shipped_code import unpack_code
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.fleet.ahead_worker import candidates
from blocktune.tuner.fleet.job import Job
from tests.support.triton_modes import compiled_here

H100, H200 = (device_named(name) for name in ("h100-sxm", "h200"))
SHAPE = AttentionShape(batch=1, num_heads=4, seqlen_q=1024, head_dim=64)


def job(**changes: object) -> Job:
    return dataclasses.replace(Job(shape=SHAPE, device=H200.key), **changes)  # type: ignore[arg-type]


def test_the_first_configs_are_those_that_the_search_tries_first() -> None:
    contenders = find_contenders(SHAPE, H200, competing(), ())
    chosen = candidates(job(), 12)
    assert chosen[: len(contenders.first)] == list(contenders.first)[:12]
    assert len(set(chosen)) == 12
    assert {config.kernel for config in candidates(job(kernels=("flash_fwd",)), 5)} >= {"flash_fwd"}


def test_nothing_is_compiled_for_a_device_that_the_catalogue_lacks_or_a_shape_that_nothing_computes() -> None:
    assert candidates(job(device="nvidia x9000|9.0|10"), 12) == []
    assert candidates(job(shape=dataclasses.replace(SHAPE, head_dim=4096, head_dim_v=4096)), 12) == []


def test_jobs_are_compiled_that_begin_next_and_not_those_that_begin_at_once() -> None:
    records = [TaskRecord(job(seed=number), number) for number in range(8)]
    records += [TaskRecord(job(device=H100.key, seed=number), number) for number in (8, 9)]

    def chosen(**gpus: int) -> list[int]:
        present = {device.key: gpus[name] for name, device in (("h100", H100), ("h200", H200)) if name in gpus}
        return [record.number for record in next_to_begin(records, present)]

    assert chosen(h200=2) == [2, 3, 4, 5]
    assert chosen(h200=2, h100=1) == [2, 3, 4, 5, 9]
    assert chosen() == []
    for record in records[:2]:
        record.begin("attempt", "node", "worker")
    assert chosen(h200=2) == [2, 3, 4, 5]
    assert chosen(h200=3) == [3, 4, 5, 6, 7]
    assert chosen(h200=1) == [2, 3]  # a node has gone


@compiled_here
@pytest.mark.exhaustive
def test_a_task_s_code_is_found_where_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = job(kernels=("flash_fwd",))
    code = compile_part({"job": wanted.to_json(), "most": 1, "part": 0, "parts": 1}, None)
    (config,) = candidates(wanted, 1)
    kernels, results = tmp_path / "kernels", tmp_path / "results"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(kernels))
    unpack_code(code, kernels, results)
    spec = get_kernel(config.kernel).compile_spec(config, SHAPE)
    assert has_code(spec, compile_key(spec, H200.limits.cc))
    with CompileFarm(workers=1, cache=ResourceCache(results), need_code=True) as farm:
        assert farm.submit(config.kernel, config, SHAPE, H200.limits.cc).result().cached
