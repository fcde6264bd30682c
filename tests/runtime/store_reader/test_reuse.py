"""Graded reuse as callers meet it: a store made on other drivers, compilers and devices, and strict dispatchers."""

import copy
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.torch_attention import scaled_dot_product_attention
from blocktune.runtime.selection.ladder import Rung
from blocktune.runtime.store_reader import provenance
from blocktune.runtime.store_reader.sources import SqliteConfigs
from tests.support.fakes.dispatch_fakes import (
    H200,
    PlainKernel,
    best,
    config,
    pretend_h200,
    shape_like,
    store_with,
    tensors,
)

pytestmark = pytest.mark.triton_free

SHAPE, LONGER = shape_like(32), shape_like(64)
H100 = device_named("h100_sxm5")


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> PlainKernel:
    """The CPU as an H200 with one kernel and a driver."""
    kernel = pretend_h200(monkeypatch)
    monkeypatch.setattr(provenance, "driver_version", lambda: "580.65.06")
    return kernel


@pytest.mark.parametrize(
    ("changes", "rung", "words"),
    [
        ({"driver": "580.65.06"}, Rung.EXACT, "measured on this device for this shape"),
        ({"driver": "570.86.10"}, Rung.OTHER_DRIVER, "with another driver"),
        ({"triton": "3.5.0"}, Rung.OTHER_COMPILER, "with another triton or ptxas"),
        ({"kernel_hash": "1" * 16}, Rung.OTHER_SOURCE, "another version of the kernel's source"),
        ({"device": H100}, Rung.SAME_CAPABILITY, "elsewhere, on a device of this compute capability"),
        ({"shape": LONGER}, Rung.NEAREST, f"measured on this device for {LONGER.label}"),
        ({"shape": LONGER, "device": H100}, Rung.NEAREST, f"compute capability, for {LONGER.label}"),
    ],
    ids=str,
)
def test_the_best_there_is_serves_and_is_named(
    tmp_path: Path, kernel: PlainKernel, changes: dict[str, Any], rung: Rung, words: str
) -> None:
    path = store_with(tmp_path / "store.db", best(**{"shape": SHAPE, "config": config()} | changes))
    dispatcher, arguments = Dispatcher(SqliteConfigs(path)), tensors(SHAPE)
    torch.testing.assert_close(dispatcher(*arguments), scaled_dot_product_attention(*arguments))
    explanation = dispatcher.explain(*arguments)
    assert (explanation.rung, explanation.config, explanation.device) == (rung, config(), H200.key)
    assert words in explanation.reason
    higher = list(Rung)[: list(Rung).index(rung)]  # of which nothing decides by expected times for rows in memory
    assert [rejection.rung for rejection in explanation.passed_over] == [
        one for one in higher if one not in (Rung.FROZEN, Rung.EXPECTED)
    ]
    assert set(kernel.launched) == {config()}


def test_a_config_of_a_larger_device_is_checked_against_this_one(tmp_path: Path) -> None:
    too_large = config(1024)  # more shared memory than an H200 gives a block
    path = store_with(tmp_path / "store.db", best(SHAPE, too_large, device=H100))
    explanation = Dispatcher(SqliteConfigs(path)).explain(*tensors(SHAPE))
    assert explanation.rung is Rung.DEFAULT
    assert any(
        rejection.rung is Rung.SAME_CAPABILITY and "shared memory" in rejection.reason
        for rejection in explanation.passed_over
    )


@pytest.mark.parametrize("changes", [{"driver": "570.86.10"}, {"triton": "3.5.0"}, {"device": H100}, {"shape": LONGER}])
def test_strict_takes_exact_measurements_or_pytorch(
    tmp_path: Path, kernel: PlainKernel, changes: dict[str, Any]
) -> None:
    path = store_with(tmp_path / "store.db", best(**{"shape": SHAPE, "config": config()} | changes))
    dispatcher, arguments = Dispatcher(SqliteConfigs(path), strict=True), tensors(SHAPE)
    torch.testing.assert_close(dispatcher(*arguments), scaled_dot_product_attention(*arguments))
    explanation = dispatcher.explain(*arguments)
    assert (explanation.rung, kernel.launched) == (Rung.SDPA, [])
    assert "strict" in str(explanation)
    store_with(path, best(SHAPE, config(), driver="580.65.06"))
    dispatcher.reload()
    assert dispatcher.explain(*arguments).rung is Rung.EXACT
    dispatcher(*arguments)
    assert set(kernel.launched) == {config()}


def test_strictness_survives_copies() -> None:
    strict = copy.deepcopy(Dispatcher(SqliteConfigs(Path("store.db")), strict=True))
    assert (strict.strict, strict.source) == (True, SqliteConfigs(Path("store.db")))
    assert not copy.deepcopy(Dispatcher(SqliteConfigs(Path("store.db")))).strict


@pytest.mark.gpu
def test_a_group_on_gpus_agrees(tmp_path: Path) -> None:
    """NCCL's tensors are on the GPU; one rank is enough to see that they get there."""
    script = """
        import json, sys, torch, torch.distributed as dist
        from blocktune import attention, sync_configs
        dist.init_process_group("nccl", init_method=f"file://{sys.argv[1]}/meeting", rank=0, world_size=1)
        q = torch.randn(2, 32, 8192, 64, device="cuda", dtype=torch.bfloat16)
        before = attention.explain(q, q, q)
        digest = sync_configs()
        after = attention.explain(q, q, q)
        print(json.dumps({"digest": digest, "same": before.config == after.config and before.rung == after.rung}))
        dist.destroy_process_group()
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(script), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["same"]
    assert len(told["digest"]) == 16
