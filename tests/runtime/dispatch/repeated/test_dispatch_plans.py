"""What the dispatcher remembers, where its configs come from, and what a bad one costs; without a GPU."""

import copy
import itertools
import logging
import pickle
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.dispatch import resolver
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention, best_config
from blocktune.runtime.dispatch.launches import launch_trial
from blocktune.runtime.dispatch.resolver import MAX_PLANS
from blocktune.runtime.selection.ladder import Rung
from blocktune.runtime.store_reader.sources import SqliteConfigs
from tests.support.fakes.dispatch_fakes import (
    H200,
    BrokenSource,
    ListSource,
    PlainKernel,
    best,
    config,
    pretend_h200,
    shape_like,
    store_with,
    tensors,
    tuned,
)
from tests.support.suite import warm_python

pytestmark = pytest.mark.triton_free

SHAPE = shape_like(32)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> PlainKernel:
    return pretend_h200(monkeypatch)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_stores_config_runs_and_is_explained(kernel: PlainKernel, tmp_path: Path) -> None:
    path = store_with(tmp_path / "store.db", best(SHAPE, config()))
    dispatcher = Dispatcher(SqliteConfigs(path))
    dispatcher(*tensors(SHAPE))
    explanation = dispatcher.explain(*tensors(SHAPE))
    assert set(kernel.launched) == {config()}
    assert (explanation.rung, explanation.origin, explanation.time_us) == (Rung.EXACT, Origin.MEASURED, 10.0)
    assert "measured on this device for this shape" in str(explanation)


def test_a_source_is_read_once_until_reload(kernel: PlainKernel) -> None:
    source = ListSource()
    dispatcher = Dispatcher(source)
    assert source.reads == 0
    for seqlen in (16, 32, 48):
        dispatcher(*tensors(shape_like(seqlen)))
    assert source.reads == 1
    assert dispatcher.explain(SHAPE).rung is Rung.DEFAULT
    source.rows = [tuned(SHAPE, config())]
    dispatcher.reload()
    dispatcher(*tensors(SHAPE))
    assert (source.reads, dispatcher.explain(SHAPE).rung) == (2, Rung.EXACT)


def test_the_scale_is_an_argument_and_no_plan(kernel: PlainKernel) -> None:
    arguments = tensors(SHAPE)
    dispatcher = Dispatcher(ListSource())
    for scale in (None, 0.5, 1, 2.0):
        expected = scaled_dot_product_attention(*arguments, scale=scale)
        torch.testing.assert_close(dispatcher(*arguments, scale=scale), expected)
    assert len(dispatcher.resolver.plans) == 1


def test_a_misaligned_slice_has_a_plan_of_its_own(kernel: PlainKernel) -> None:
    size = 4 * 32 * 64
    dispatcher = Dispatcher(ListSource())
    for offsets in itertools.product((0, 1), repeat=3):
        arguments = [torch.randn(size + 1)[offset : offset + size].view(1, 4, 32, 64) for offset in offsets]
        for _ in range(2):
            torch.testing.assert_close(dispatcher(*arguments), scaled_dot_product_attention(*arguments))
    assert len(dispatcher.resolver.plans) == 8


def test_a_kernel_that_cannot_read_the_layout_gives_way_without_a_warning(
    kernel: PlainKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel, "layout_problem", lambda q, k, v: "rows too far apart" if k.stride(2) > 64 else None)
    dispatcher = Dispatcher(ListSource())
    assert dispatcher.explain(*tensors(SHAPE)).rung is Rung.DEFAULT
    explanation = dispatcher.explain(*tensors(SHAPE, layout="bshd"))
    assert explanation.rung is Rung.SDPA
    assert "rows too far apart" in str(explanation)
    assert warnings_in(caplog) == []


def test_a_config_that_does_not_launch_gives_way_once(kernel: PlainKernel, caplog: pytest.LogCaptureFixture) -> None:
    kernel.broken = {config()}
    dispatcher = Dispatcher(ListSource([tuned(SHAPE, config()), tuned(shape_like(64), config(64))]))
    for shape in (SHAPE, shape_like(48)):
        arguments = tensors(shape)
        for _ in range(2):
            torch.testing.assert_close(dispatcher(*arguments), scaled_dot_product_attention(*arguments))
    assert set(kernel.launched) == {config(64)}
    assert len(warnings_in(caplog)) == 1
    assert "out of resource" in warnings_in(caplog)[0]
    explanation = dispatcher.explain(SHAPE)
    assert explanation.rung is Rung.NEAREST
    assert "out of resource" in explanation.passed_over[0].reason


def test_when_nothing_launches_pytorch_computes(kernel: PlainKernel) -> None:
    kernel.broken = {kernel.default_config(SHAPE, H200.limits)}
    dispatcher = Dispatcher(ListSource())
    arguments = tensors(SHAPE)
    torch.testing.assert_close(dispatcher(*arguments), scaled_dot_product_attention(*arguments))
    assert dispatcher.explain(*arguments).rung is Rung.SDPA


def test_lack_of_memory_is_no_fault_of_the_config(kernel: PlainKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(launch_trial, "new_results", exhausted)
        dispatcher = Dispatcher(ListSource())
        with pytest.raises(torch.OutOfMemoryError):
            dispatcher(*tensors(SHAPE))
    dispatcher(*tensors(SHAPE))
    assert dispatcher.explain(SHAPE).rung is Rung.DEFAULT


def test_an_unknown_device_is_pytorchs(kernel: PlainKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(index: int | None) -> DeviceSpec:
        raise UserWarning("a warning that the user made an error")

    monkeypatch.setattr(resolver, "current_device", unknown)
    dispatcher = Dispatcher(ListSource())
    arguments = tensors(SHAPE)
    torch.testing.assert_close(dispatcher(*arguments), scaled_dot_product_attention(*arguments))
    assert "not known" in dispatcher.explain(*arguments).reason


def test_a_broken_source_costs_one_warning(kernel: PlainKernel, caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = Dispatcher(BrokenSource())
    for seqlen in (16, 32):
        arguments = tensors(shape_like(seqlen))
        torch.testing.assert_close(dispatcher(*arguments), scaled_dot_product_attention(*arguments))
    assert len(warnings_in(caplog)) == 1
    assert dispatcher.explain(SHAPE).warnings == ("BrokenSource cannot be read: OSError: no such disk",)


def test_a_new_shape_while_a_graph_is_captured_is_tried_on_another_stream_and_captured(
    kernel: PlainKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher, apart = Dispatcher(ListSource()), []

    def run(task: Callable[[], Any], device: torch.device) -> Any:
        apart.append(len(kernel.launched))
        plan = task()
        apart.append(len(kernel.launched))
        return plan

    monkeypatch.setattr(resolver, "run_on_side_thread", run)
    arguments, wide = tensors(SHAPE), tensors(shape_like(32, head_dim=256))
    with monkeypatch.context() as patch:
        patch.setattr(resolver, "is_capturing", lambda query: True)
        for _ in range(2):
            torch.testing.assert_close(dispatcher(*arguments), scaled_dot_product_attention(*arguments))
        torch.testing.assert_close(dispatcher(*wide), scaled_dot_product_attention(*wide))
    trial = apart[1] - apart[0]
    assert trial
    assert len(kernel.launched) == trial + 2  # the two captured ones
    assert not dispatcher.resolver.plans
    dispatcher(*arguments)
    launches = len(kernel.launched)
    with monkeypatch.context() as patch:
        patch.setattr(resolver, "is_capturing", lambda query: True)
        dispatcher(*arguments)
    assert len(kernel.launched) == launches + 1


def test_plans_do_not_pile_up(kernel: PlainKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "MAX_PLANS", 8)
    dispatcher = Dispatcher(ListSource())
    for seqlen in range(1, 30):
        dispatcher(*tensors(shape_like(seqlen)))
        assert len(dispatcher.resolver.plans) <= 8
    assert MAX_PLANS >= 1000


def test_misses_are_counted_by_shape(kernel: PlainKernel) -> None:
    dispatcher = Dispatcher(ListSource([tuned(SHAPE, config())]))
    for seqlen, calls in ((16, 1), (32, 5), (48, 3)):
        for layout in ("bhsd", "bshd"):
            for _ in range(calls):
                dispatcher(*tensors(shape_like(seqlen), layout=layout))
    assert dispatcher.misses() == {shape_like(48): 6, shape_like(16): 2}


def test_warmup_makes_the_plans_that_calls_use(kernel: PlainKernel) -> None:
    source = ListSource([tuned(SHAPE, config())])
    dispatcher = Dispatcher(source)
    causal = shape_like(48, causal=Causal.UPPER_LEFT, num_heads_kv=2)
    assert [explanation.rung for explanation in dispatcher.warmup([SHAPE, causal])] == [Rung.EXACT, Rung.NEAREST]
    plans = dict(dispatcher.resolver.plans)
    for layout in ("bhsd", "bshd"):
        dispatcher(*tensors(SHAPE, layout=layout))
        dispatcher(*tensors(causal, layout=layout), is_causal=True, enable_gqa=True)
    assert dispatcher.resolver.plans == plans
    with pytest.raises(UsageError, match="upper left"):
        dispatcher.warmup([shape_like(causal=Causal.LOWER_RIGHT, seqlen_k=64)])


def test_a_shape_is_explained_for_any_device(kernel: PlainKernel) -> None:
    dispatcher = Dispatcher(ListSource([tuned(SHAPE, config())]))
    explanation = dispatcher.explain(SHAPE, device="a100_sxm4_80")
    assert (explanation.rung, explanation.config) == (Rung.EXACT, config())
    assert explanation.to_json()["config"] == config().to_json()
    assert kernel.launched == []
    assert best_config(shape_like(head_dim=256), "h200").rung is Rung.SDPA


# --- threads, processes, copies ---


def test_threads_share_a_dispatcher(kernel: PlainKernel) -> None:
    source = ListSource()
    dispatcher = Dispatcher(source)
    problems: list[Tensor] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        arguments = tensors(shape_like(16 + seed % 3))
        expected = scaled_dot_product_attention(*arguments)
        start.wait()
        for _ in range(50):
            got = dispatcher(*arguments)
            if not torch.allclose(got, expected, atol=1e-5):
                problems.append(got)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (problems, source.reads, len(dispatcher.resolver.plans)) == ([], 1, 3)


def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    script = """
        import os, threading, torch, warnings
        from blocktune import attention
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forks beside threads
        torch.set_num_threads(1)
        q = torch.randn(1, 2, 16, 16)
        held, done = threading.Event(), threading.Event()
        def hold():
            with attention._miss_lock():
                held.set()
                done.wait()
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        child = os.fork()
        if not child:
            attention(q, q, q)
            os._exit(17)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))
        done.set()
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(script)]
    result = warm_python.run(command, timeout=60)
    assert result.stdout.strip() == "17", result.stderr


def test_copies_of_attention_are_attention() -> None:
    assert copy.deepcopy({"attention": attention})["attention"] is attention
    assert pickle.loads(pickle.dumps(attention)) is attention
    other = copy.deepcopy(Dispatcher(SqliteConfigs(Path("store.db"))))
    assert other._source == SqliteConfigs(Path("store.db"))
