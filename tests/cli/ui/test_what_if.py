"""Compiles that a page asks for: one at a time, cancellable, known ones at once, and refusals in words."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.shared.compiled_config import CompileRequest, default_request
from blocktune.cli.ui.forms import ShapeForm, kernel_choices, shape_fields
from blocktune.cli.ui.what_if import MAX_WAITING, WhatIfs
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.compile.cache import ResourceCache
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from tests.support.fakes.faked_compiles import faked_compiles
from tests.support.stores.live_servers import LiveServer, live_server

H200 = device_named("h200")
SMALL = AttentionShape(
    batch=1, num_heads=1, num_heads_kv=1, seqlen_q=128, seqlen_k=128, head_dim=32, head_dim_v=32, dtype="float16"
)
WAIT_S = 120


def settled(what_ifs: WhatIfs, number: int) -> dict[str, Any]:
    """The state of a compile once it neither waits nor runs."""
    deadline = time.monotonic() + WAIT_S
    while (found := what_ifs.state(number))["state"] in ("waiting", "compiling"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return faked_compiles(monkeypatch, tmp_path)


@pytest.fixture
def slow(fakes: Any, tmp_path: Path) -> Iterator[WhatIfs]:
    """Compiles of kernels some of which never end."""
    kernels = "tests.support.fakes.compile_fakes:get_kernel"
    with CompileFarm(workers=1, cache=ResourceCache(tmp_path / "cache"), kernels=kernels) as farm:
        yield WhatIfs(farm)


def fake_request(fakes: Any, name: str) -> CompileRequest:
    return CompileRequest(fakes.KERNELS[name], fakes.config(name), fakes.SHAPE, H200.limits)


@pytest.mark.compiles_kernels
def test_compiles_wait_for_one_another_and_can_be_dropped(slow: WhatIfs, fakes: Any) -> None:
    first, second, third = (
        slow.ask(fake_request(fakes, name), H200)["id"] for name in ("sleeping", "sleeping", "broken")
    )
    while slow.state(first)["state"] != "compiling":
        time.sleep(0.02)
    assert [slow.state(number)["state"] for number in (second, third)] == ["waiting", "waiting"]
    assert [slow.state(number)["ahead"] for number in (first, second, third)] == [0, 1, 2]
    assert slow.cancel(second)["state"] == "cancelled"
    assert slow.state(third)["ahead"] == 1
    assert slow.cancel(first)["state"] == "cancelled"
    done = settled(slow, third)
    assert done["answer"]["outcome"] == "compile_error"
    assert "BLOCK_M is too small" in done["answer"]["error"]
    assert slow.cancel(third)["state"] == "done"


@pytest.mark.compiles_kernels
def test_a_queue_has_an_end(slow: WhatIfs, fakes: Any) -> None:
    for _ in range(MAX_WAITING):
        slow.ask(fake_request(fakes, "sleeping"), H200)
    with pytest.raises(UsageError, match=f"but {MAX_WAITING} do"):
        slow.ask(fake_request(fakes, "sleeping"), H200)
    slow.cancel(MAX_WAITING)
    assert slow.ask(fake_request(fakes, "sleeping"), H200)["state"] == "waiting"


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def server(caches: Path) -> Iterator[LiveServer]:
    """A server without a database, whose compiles begin with empty caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(caches / "triton"))
        with (
            CompileFarm(workers=1, cache=ResourceCache(caches / "resources")) as farm,
            live_server(caches / "none.db", what_ifs=WhatIfs(farm)) as running,
        ):
            yield running


def ask(server: LiveServer, **parameters: int) -> dict[str, Any]:
    """Ask for a config, and return its state once it is done."""
    form = {"device": "h200", "shape": SMALL.to_json(), "kernel": "flash_fwd", "parameters": parameters}
    status, job = server.ask("what-if", "POST", form)
    assert status == 200, job
    deadline = time.monotonic() + WAIT_S
    while job["state"] in ("waiting", "compiling"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        job = server.ask(f"what-if/{job['id']}")[1]
    return job


@pytest.mark.compiles_kernels
def test_a_tile_that_was_never_compiled_is_compiled_once(server: LiveServer) -> None:
    tile = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
    cold, warm = ask(server, **tile), ask(server, **tile)
    answer = cold["answer"]
    assert answer["outcome"] == "ok"
    assert not answer["cached"]
    assert warm["answer"] == answer | {"cached": True}
    assert warm["seconds"] < cold["seconds"]
    resources = KernelResources(**answer["resources"])
    request = default_request("flash_fwd", SMALL, H200.limits).with_choices(tile, [])
    assert answer["config"] == request.config.to_json()
    assert answer["occupancy"]["blocks_per_sm"] > 0
    assert answer["predicted_us"] == pytest.approx(
        predict_us(request.kernel, request.config, SMALL, H200, CompiledCode(resources, None)), rel=0.2
    )
    assert answer["words"].startswith("Predicted ")
    assert [row["us"] for row in answer["terms"]] == sorted((row["us"] for row in answer["terms"]), reverse=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "h2000"}, "h2000"),
        ({"kernel": "no_such_kernel"}, "no_such_kernel"),
        ({"kernel": "flash_bwd"}, "flash_bwd"),
        ({"parameters": {"block_q": 64}}, "but got block_q"),
        ({"parameters": {"block_m": 77}}, "77"),
        ({"parameters": {"block_m": 10**9}}, "block_m"),
        ({"shape": SMALL.to_json() | {"head_dim": 0}}, "head_dim"),
        ({"shape": {}}, "shape"),
        ({"parameters": {"block_m": "; rm -rf /"}}, "fields of its form"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_words(server: LiveServer, changes: dict[str, Any], words: str) -> None:
    form = {"device": "h200", "shape": SMALL.to_json(), "kernel": "flash_fwd", "parameters": {}} | changes
    status, answer = server.ask("what-if", "POST", form)
    assert status == 422
    assert words in answer["message"]


def test_a_compile_that_no_one_asked_for_is_refused(server: LiveServer) -> None:
    assert "number 999" in server.ask("what-if/999")[1]["message"]
    assert server.ask("what-if/999", "DELETE")[0] == 422


def test_a_form_gives_the_shape_that_the_flags_give(server: LiveServer) -> None:
    flags = {
        "seq": 4096,
        "dim": 128,
        "heads": 16,
        "kv_heads": 4,
        "causal": True,
        "dtype": "fp16",
        "features": "softcap",
    }
    status, found = server.ask("shape", "POST", {"device": "a100", "flags": flags})
    shape = complete_shape(4096, 128, heads=16, kv_heads=4, causal=True, dtype="fp16")
    assert status == 200
    assert AttentionShape.from_json(found["shape"]).features.softcap
    assert found["shape"] | {"features": None} == shape.to_json() | {"features": None}
    assert (found["sweep"], found["device"]) == (None, device_named("a100").name)
    plain = ShapeForm("h200", {"seq": 512, "dim": 64, "causal_lower_right": True}).shape()
    assert plain == complete_shape(512, 64, causal=Causal.LOWER_RIGHT)
    kernels = server.ask("kernels", "POST", {"device": "h200", "shape": plain.to_json()})[1]
    assert kernels == kernel_choices(plain, H200)
    assert all(set(each["default"]) == set(each["parameters"]) for each in kernels)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"seq": 512},
        {"seq": "512", "dim": 64},
        {"seq": True, "dim": 64},
        {"seq": 0, "dim": 64},
        {"seq": 512, "dim": 64, "dtype": "fp4"},
        {"seq": 512, "dim": 64, "features": "x"},
        {"seq": 512, "dim": 64, "shell": "rm"},
    ],
)
def test_a_form_that_is_filled_in_wrongly_is_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ShapeForm("h200", flags).shape()


def test_fields_of_the_form_say_what_they_mean() -> None:
    fields = {each["name"]: each for each in shape_fields()}
    assert [name for name, each in fields.items() if each["needed"]] == ["seq", "dim"]
    assert set(fields["dtype"]["choices"]) == {"bf16", "fp16", "fp32", "fp8"}
    assert all(each["help"] and "default" not in each["help"] for each in fields.values())
    assert {each["kind"] for each in fields.values()} == {"int", "bool", "str"}
