"""What is compiled ahead is what a launch looks up, wherever the kernel stands."""

import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import triton
from triton import knobs
from triton import language as tl

from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LaunchConfig, launch_config
from blocktune.runtime.autotuned.kernel import TunedKernel
from blocktune.runtime.autotuned.settings import Settings
from blocktune.tuner.compile_server import client
from blocktune.tuner.compile_server.client import ServerClient
from blocktune.tuner.compile_server.compile_ahead import CompileAhead, _has_more_to_a_thread
from blocktune.tuner.offline.code import compiled_offline
from blocktune.tuner.offline.signature import positional_signature
from blocktune.tuner.offline.specialization import function_named, specialization_of
from examples.autotuned_matmul import matmul_kernel
from tests.support.fakes.fake_triton import FakeGpu, active
from tests.support.libraries import autotuned_kernels
from tests.support.libraries.autotuned_kernels import CONFIGS, fatal_kernel, lingering_kernel, scale_kernel, sum_kernel
from tests.support.triton_modes import compiled_here

pytestmark = compiled_here

H200 = device_named("h200")
LIMITS = H200.limits


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's cache, which the workers of the module share."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(autouse=True)
def gpu(code: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(code))
    for kernel in (scale_kernel, sum_kernel):
        jitted = function_named(f"tests.support.libraries.autotuned_kernels:{kernel.base_fn.__name__}")
        jitted.device_caches.clear()
    with active(FakeGpu()) as made:
        yield made


@pytest.fixture(scope="module")
def compiler() -> Iterator[CompileAhead]:
    made = CompileAhead(workers=1, timeout_s=60)
    yield made
    made.close()


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def call_of(tuner: Any, *args: Any) -> AutotunedCall:
    def never(call: AutotunedCall) -> Any:
        raise AssertionError(call)

    kernel, kwargs = TunedKernel(tuner, Settings(), never), {"grid": grid, "warmup": False}
    return kernel.call_of(args, kwargs)


def compiled(call: AutotunedCall, compiler: CompileAhead) -> dict[Any, Any]:
    found = [specialization_of(call, config, LIMITS.cc) for config in call.configs]
    return compiler.compile(call.name, [each for each in found if each is not None], LIMITS.cc)


def launched_from_cache(call: AutotunedCall) -> list[bool]:
    """Whether each config's launch finds its code on disk."""
    found: list[bool] = []
    earlier = knobs.compilation.listener
    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    try:
        for config in call.configs.values():
            call.tuner.fn.run(*call.args, **call.kwargs, **config.all_kwargs())
    finally:
        knobs.compilation.listener = earlier
    return found


@pytest.mark.parametrize("kernel", ["scale", "sum"])
def test_a_launch_compiles_nothing_after_workers_did(kernel: str, compiler: CompileAhead) -> None:
    x = torch.ones(1000)
    call = call_of(scale_kernel, x, 1000, 2.0) if kernel == "scale" else call_of(sum_kernel, torch.zeros(1), x, 1000)
    assert all(specialization_of(call, config, LIMITS.cc).document is not None for config in call.configs)  # type: ignore[union-attr]
    ended = compiled(call, compiler)
    assert [each.outcome for each in ended.values()] == [Outcome.OK] * len(CONFIGS)
    assert all(each.resources.registers > 0 for each in ended.values())
    assert launched_from_cache(call) == [True] * len(CONFIGS)
    assert specialization_of(call, call.default, LIMITS.cc) is None  # this process has the code


def test_a_kernel_in_a_function_is_compiled_by_threads(compiler: CompileAhead, monkeypatch: pytest.MonkeyPatch) -> None:
    @triton.autotune(CONFIGS[:2], ["n"])
    @triton.jit
    def local_kernel(x, n, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + offsets, 1.0, offsets < n)

    monkeypatch.setattr(CompileAhead, "_prepare_server", None)
    call = call_of(local_kernel, torch.ones(1000), 1000)
    assert [each.outcome for each in compiled(call, compiler).values()] == [Outcome.OK] * 2
    assert launched_from_cache(call) == [True] * 2


def test_a_worker_that_sees_another_source_leaves_it_to_this_process(compiler: CompileAhead) -> None:
    call = call_of(scale_kernel, torch.ones(1000), 1000, 2.0)
    found = specialization_of(call, call.default, LIMITS.cc)
    assert found is not None
    job = {"kernel": call.name, "spec": found.document, "key": "0" * 64, "cc": list(LIMITS.cc)}
    server = compiler._prepare_server(call.name)
    for change in ({}, {"kernel": "no.such_module:kernel"}):
        assert server.submit(job | change, lambda answer: answer["resources"], lambda lost: lost).result() is None


def test_a_compile_that_hangs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    hurried = CompileAhead(workers=1, timeout_s=0.001)
    call = call_of(scale_kernel, torch.ones(1000), 1000, 2.0)
    one = replace(call, configs={call.default: call.configs[call.default]})
    (ended,) = compiled(one, hurried).values()
    hurried.close()
    assert ended.outcome is Outcome.COMPILE_TIMEOUT
    assert "took more than 0.001 s" in ended.error


def test_what_takes_long_to_compile_begins_first(
    compiler: CompileAhead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def submitted(self: Any, job: Any, *rest: Any) -> Any:
        begun.append((job["spec"]["constant_vals"], job["spec"]["options"]["num_warps"]))
        raise RuntimeError("the order is known")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # where no code is
    monkeypatch.setattr(client.ServerClient, "submit", submitted)
    call = call_of(scale_kernel, torch.ones(1000), 1000, 2.0)
    made = [specialization_of(call, config, LIMITS.cc) for config in call.configs]
    with pytest.raises(RuntimeError, match="the order is known"):
        compiler.compile(call.name, [each for each in made if each is not None], LIMITS.cc)
    assert begun == [([512], 2)]


def test_a_compile_that_dies_costs_its_config(compiler: CompileAhead) -> None:
    """The others of its call are compiled, by a worker that takes the dead one's place."""
    call = call_of(fatal_kernel, torch.ones(1000), 1000)
    ended = {config.parameters["BLOCK"]: each for config, each in compiled(call, compiler).items()}
    assert {block: str(each.outcome) for block, each in ended.items()} == {128: "ok", 256: "compile_error", 512: "ok"}
    assert "ended by SIGABRT" in ended[256].error


def test_what_is_sure_to_spill_is_waited_for_no_longer() -> None:
    """Here every code counts as spilling. The workers of the heavier configs end, and others take the next jobs."""
    three = CompileAhead(workers=3, timeout_s=60)
    call, started = call_of(lingering_kernel, torch.ones(1000), 1000), time.monotonic()
    made = [specialization_of(call, config, LIMITS.cc) for config in call.configs]
    ended = three.compile(call.name, [each for each in made if each is not None], LIMITS.cc, max_spill_bytes=-1)
    assert time.monotonic() - started < 50
    by_block = {config.parameters["BLOCK"]: each for config, each in ended.items()}
    assert {block: str(each.outcome) for block, each in by_block.items()} == {
        128: "ok",
        256: "infeasible",
        512: "infeasible",
    }
    assert "BLOCK=128 num_stages=3 num_warps=4 has less to a thread, which spills 0 bytes" in by_block[512].error
    other = call_of(scale_kernel, torch.ones(700), 700, 2.0)
    assert [each.outcome for each in three.compile(other.name, [fresh(other, 16)], LIMITS.cc).values()] == [Outcome.OK]
    three.close()


def test_a_config_that_no_block_can_hold_is_infeasible(compiler: CompileAhead) -> None:
    """Eight stages of these blocks take 384 KiB of shared memory."""
    a = torch.ones(256, 256, dtype=torch.bfloat16)
    config = triton.Config({"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8}, num_warps=8, num_stages=8)
    call = call_of(matmul_kernel, a, a, torch.empty_like(a), 256, 256, 256)
    one = replace(call, configs={launch_config(call.name, config): config})
    (ended,) = compiled(one, compiler).values()
    assert ended.outcome is Outcome.INFEASIBLE
    assert "out of resource: shared memory" in ended.error


def config_of(**values: Any) -> LaunchConfig:
    return LaunchConfig("m:f", tuple(values.items()))


def test_larger_sizes_and_fewer_warps_are_more_to_a_thread() -> None:
    spilling = config_of(BLOCK=128, EVEN=True, num_warps=4, num_stages=2)
    assert _has_more_to_a_thread(config_of(BLOCK=256, EVEN=True, num_warps=4, num_stages=2), spilling)
    assert _has_more_to_a_thread(config_of(BLOCK=128, EVEN=True, num_warps=2, num_stages=2), spilling)
    for other in (
        spilling,
        config_of(BLOCK=64, EVEN=True, num_warps=2, num_stages=2),
        config_of(BLOCK=256, EVEN=True, num_warps=8, num_stages=2),
        config_of(BLOCK=256, EVEN=False, num_warps=4, num_stages=2),
        config_of(BLOCK=256, EVEN=True, num_warps=4, num_stages=3),
        config_of(BLOCK=256, num_warps=4, num_stages=2),
    ):
        assert not _has_more_to_a_thread(other, spilling)


def test_workers_compile_for_what_the_process_is_now(
    compiler: CompileAhead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another cache, and a module that is on a path which the process has taken since its workers were started."""
    compiled(call_of(scale_kernel, torch.ones(1000), 1000, 2.0), compiler)
    (tmp_path / "kernels_of_late.py").write_text(Path(autotuned_kernels.__file__).read_text())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(client.ServerClient, "_listen", None)  # no other process is started
    call = call_of(import_module("kernels_of_late").scale_kernel, torch.ones(1000), 1000, 2.0)
    assert [each.outcome for each in compiled(call, compiler).values()] == [Outcome.OK] * len(CONFIGS)
    assert launched_from_cache(call) == [True] * len(CONFIGS)


def test_a_process_that_is_lost_is_replaced(compiler: CompileAhead, caplog: pytest.LogCaptureFixture) -> None:
    call = call_of(scale_kernel, torch.ones(1000), 1000, 2.0)
    server = compiler._prepare_server(call.name)
    server._process.result().kill()
    server._listener.join()
    assert [each.outcome for each in compiler.compile(call.name, [fresh(call, 32)], LIMITS.cc).values()] == [Outcome.OK]
    assert compiler._server is not server
    assert not caplog.records


def test_where_no_worker_comes_up_this_process_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "SERVER", "no.such.module")
    alone = CompileAhead(workers=1)
    call = call_of(scale_kernel, torch.ones(500), 500, 2.0)
    ended = alone.compile(call.name, [fresh(call)], LIMITS.cc)
    alone.close()
    assert [each.outcome for each in ended.values()] == [Outcome.OK]
    assert "Configs are compiled one after another: The process that compiles did not start" in caplog.text


def fresh(call: AutotunedCall, block: int = 64) -> Any:
    """The specialization of a config that no other test has compiled."""
    config = triton.Config({"BLOCK": block}, num_warps=1)
    made = replace(call, configs={launch_config(call.name, config): config})
    return specialization_of(made, made.default, LIMITS.cc)


def test_what_is_compiled_offline_is_what_a_launch_compiles(compiler: CompileAhead) -> None:
    call = call_of(scale_kernel, torch.ones(1024), 1024, 2.0)
    kinds = positional_signature(scale_kernel, "*fp32, i32:16, fp32")
    offline = compiled_offline(scale_kernel, kinds, {"BLOCK": 128, "num_warps": 2, "num_stages": 3}, LIMITS)
    launched = compiled(call, compiler)[call.default]
    assert offline.resources == launched.resources
    with pytest.raises(UsageError, match="but x, n, factor has neither"):
        compiled_offline(scale_kernel, {}, {"BLOCK": 128}, LIMITS)


@pytest.mark.parametrize("is_busy", [True, False])
def test_the_process_is_ended_when_it_is_idle_but_not_while_it_compiles(is_busy: bool) -> None:
    compiler, ended = CompileAhead(workers=1), []
    server = SimpleNamespace(is_busy=is_busy, close=lambda: ended.append(True))
    compiler._server = cast(ServerClient, server)
    compiler._close_idle()
    assert (ended, compiler._server is None) == (([], False) if is_busy else ([True], True))
    assert is_busy == (compiler._closing is not None), "it is looked at again"
    if compiler._closing is not None:
        compiler._closing.cancel()
