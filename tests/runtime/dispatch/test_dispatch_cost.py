"""What a call costs on the host: on a GPU no more than a bare launch, and no more than PyTorch's own attention."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

from blocktune.kernels import registry
from blocktune.kernels.base.launch import TritonLaunch
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.dispatch import dispatcher as dispatch
from blocktune.runtime.dispatch import obstacles, resolver
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.tuner.compare.stock_autotune import KEY
from tests.support.attention.host_time import CALLS, calmest, host_time
from tests.support.fakes.dispatch_fakes import H200, ListSource, PlainKernel, shape_like, tensors, tuned
from tests.support.recording import HOST_COST
from tools.pages.checks.gpu_test_tables import COSTS_COLUMNS

LOOKUP_US = 2.0
LOOKUP_ON_ANY_MACHINE_US = 30.0


def looked_up(dispatcher: Dispatcher, arguments: Any) -> Callable[[], Any]:
    """What a call does before its plan runs."""
    fast_path = dispatcher.resolver.fast_path

    def look_up() -> Any:
        return fast_path.find(("scaled_dot_product_attention", 3, 0.0, False, None, False), arguments)

    assert look_up() is not None
    return look_up


def test_a_look_up_is_cheap_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", {"plain": PlainKernel()})
    monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(dispatch, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: H200)
    dispatcher = Dispatcher(ListSource())
    arguments = tensors(shape_like(16))
    dispatcher(*arguments)
    assert host_time(looked_up(dispatcher, arguments)).median_us < LOOKUP_ON_ANY_MACHINE_US


@pytest.mark.usefixtures("one_thread")
def test_a_miss_resolves_without_a_compiler_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that decodes misses with every token; the ladder must not be what it waits for."""
    kernel = PlainKernel()
    monkeypatch.setattr(registry, "KERNELS", {"plain": kernel})
    monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: H200)
    rows = [
        tuned(shape_like(16 * i, batch=b), kernel.default_config(shape_like(), H200.limits))
        for i in range(1, 60)
        for b in (1, 2, 4)
    ]
    dispatcher = Dispatcher(ListSource(rows))
    dispatcher(*tensors(shape_like(5)))
    seconds = []
    for seqlen in range(100, 140):
        arguments = tensors(shape_like(1, seqlen_k=seqlen))
        start = time.thread_time()
        dispatcher(*arguments)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.005  # of this thread: other programs have the processor at times


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash_fwd", "flash_fwd_tma", "flash_fwd_hopper"])
def test_host_cost_on_a_gpu(
    name: str, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    shape = AttentionShape(batch=1, num_heads=4, num_heads_kv=4, seqlen_q=128, seqlen_k=128, head_dim=64, head_dim_v=64)
    device, kernel = resolver.current_device(None), get_kernel(name)
    if kernel.unsupported(shape, device.limits):
        pytest.skip(f"{name} does not run on this GPU")
    query, key, value = (tensor.cuda() for tensor in tensors(shape))
    config = kernel.default_config(shape, device.limits)
    dispatcher = Dispatcher(ListSource([tuned(shape, config)]))
    dispatcher(query, key, value)
    assert dispatcher.explain(query, key, value).config == config
    calls: dict[str, Callable[[], Any]] = {
        "look_up": looked_up(dispatcher, (query, key, value)),
        "attention": lambda: dispatcher(query, key, value),
        "sdpa": lambda: scaled_dot_product_attention(query, key, value),
    }
    out = torch.empty_like(query)
    calls |= ways_to_launch(kernel.bind(config, shape), (query, key, value, out, None, 0.125))
    with torch.no_grad():  # as in serving
        times = calmest(calls)
        for what in ("bare_launch", "compiled_kernel", "stock_autotune"):
            out.zero_()
            calls[what]()
            torch.testing.assert_close(out, dispatcher(query, key, value))
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}, {name}, {CALLS} calls")
        for what, measured in times.items():
            print(f"  {COSTS_COLUMNS[what]:24s} {measured}")
    told = {what: one.document for what, one in times.items()}
    record_property(HOST_COST, {"kernel": name, "calls": CALLS, "times": told})
    assert times["look_up"].median_us <= LOOKUP_US
    assert times["attention"].median_us <= times["bare_launch"].median_us
    assert times["attention"].median_us <= times["sdpa"].median_us


def ways_to_launch(bound: TritonLaunch, arguments: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """Launches of a kernel as its users would write them, with all arguments at hand: bare, of the compiled kernel, and
    by stock autotune, which has two configs to look up the better of."""
    grid, names = bound.grid, bound.function.arg_names
    ready = bound.arguments(*arguments)
    compiled = bound.function[grid](*ready, **bound.options)
    tuned = ("BLOCK_M", "BLOCK_N", "OPTIONS")
    first = next(index for index, argument in enumerate(names) if argument in tuned)
    chosen = {name: value for name, value in zip(names, ready, strict=True) if name in tuned}
    rest = {name: value for name, value in list(zip(names, ready, strict=True))[first:] if name not in chosen}
    configs = [triton.Config(chosen, **bound.options) for _ in range(2)]
    tuner = triton.autotune(configs=configs, key=KEY, do_bench=lambda call, quantiles: [1.0] * len(quantiles))(
        bound.function
    )

    def autotuned() -> None:
        tuner[lambda meta: grid](*ready[:first], **rest)

    autotuned()
    return {
        "bare_launch": lambda: bound.function[grid](*ready, **bound.options),
        "compiled_kernel": lambda: compiled[grid](*ready),
        "stock_autotune": autotuned,
    }
