"""What a call costs on the host. The bounds for a GPU are those that issue 2 sets for the H200 machine."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from blocktune.kernels import dispatch, plan, registry, resolver
from blocktune.kernels.dispatch import Dispatcher
from blocktune.kernels.launch import TritonLaunch
from blocktune.kernels.registry import competing, get_kernel
from blocktune.kernels.shape import AttentionShape

from .dispatch_fakes import H200, ListSource, PlainKernel, shape_like, tensors, tuned

CALLS = 10_000
LOOKUP_US = 3.0
OVER_BARE_LAUNCH_US = 5.0
LOOKUP_ON_ANY_MACHINE_US = 30.0


@dataclass(frozen=True, slots=True)
class HostTime:
    """Host time of one call: median and 99th percentile, in microseconds."""

    median_us: float
    p99_us: float

    def __str__(self) -> str:
        return f"median {self.median_us:6.2f} us, p99 {self.p99_us:6.2f} us"


def host_time(call: Callable[[], Any], synchronise: Callable[[], Any] = lambda: None) -> HostTime:
    """The time of single calls, without that of the clock.

    The queue of the GPU is drained between batches, since a full queue makes the host wait.
    """
    clock = time.perf_counter_ns
    empty, samples = [], []
    for index in range(CALLS + 100):
        if index % 100 == 0:
            synchronise()
        start = clock()
        middle = clock()
        call()
        end = clock()
        if index >= 100:
            empty.append(middle - start)
            samples.append(end - middle)
    own = statistics.median(empty)
    ordered = sorted(samples)
    return HostTime((ordered[len(ordered) // 2] - own) / 1000, (ordered[len(ordered) * 99 // 100] - own) / 1000)


def looked_up(dispatcher: Dispatcher, arguments: Any) -> Callable[[], Any]:
    """What a call does before its plan runs."""
    plans = dispatcher._plans

    def look_up() -> Any:
        return plans.of(*arguments, False, False)

    assert look_up() is not None
    return look_up


def test_a_look_up_is_cheap_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", {"plain": PlainKernel()})
    monkeypatch.setattr(plan, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(dispatch, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: H200)
    dispatcher = Dispatcher(ListSource())
    arguments = tensors(shape_like(16))
    dispatcher(*arguments)
    assert host_time(looked_up(dispatcher, arguments)).median_us < LOOKUP_ON_ANY_MACHINE_US


def test_a_miss_resolves_without_a_compiler_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that decodes misses with every token; the ladder must not be what it waits for."""
    kernel = PlainKernel()
    monkeypatch.setattr(registry, "KERNELS", {"plain": kernel})
    monkeypatch.setattr(plan, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: H200)
    rows = [
        tuned(shape_like(16 * i, batch=b), kernel.default_config(shape_like(), H200.limits))
        for i in range(1, 60)
        for b in (1, 2, 4)
    ]
    dispatcher = Dispatcher(ListSource(rows))
    dispatcher(*tensors(shape_like(5)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the kernel's stand-in computes: several threads of it wait for each other
    seconds = []
    for seqlen in range(100, 140):
        arguments = tensors(shape_like(1, seqlen_k=seqlen))
        start = time.perf_counter()
        dispatcher(*arguments)
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    assert min(seconds) < 0.005  # other programs may have had the processor at times


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(kernel.name for kernel in competing()))
def test_host_cost_on_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = AttentionShape(batch=1, num_heads=4, num_heads_kv=4, seqlen_q=128, seqlen_k=128, head_dim=64, head_dim_v=64)
    device, kernel = resolver.current_device(None), get_kernel(name)
    if kernel.unsupported(shape, device.limits):
        pytest.skip(f"{name} does not run on this GPU")
    arguments = tuple(tensor.cuda() for tensor in tensors(shape))
    config = kernel.default_config(shape, device.limits)
    dispatcher = Dispatcher(ListSource([tuned(shape, config)]))
    dispatcher(*arguments)
    assert dispatcher.explain(*arguments).config == config

    synchronise = torch.cuda.synchronize
    (bound_plan,) = dispatcher._plans.values()
    out = torch.empty_like(arguments[0])
    times = {
        "look-up": host_time(looked_up(dispatcher, arguments), synchronise),
        "blocktune.attention": host_time(lambda: dispatcher(*arguments), synchronise),
        "kernel[grid](...)": host_time(_bare_launch(kernel.bind(config, shape), arguments, out), synchronise),
        "its plan alone": host_time(lambda: bound_plan.run(*arguments, None), synchronise),
        "F.scaled_dot_product_attention": host_time(lambda: scaled_dot_product_attention(*arguments), synchronise),
    }
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}, {name}, {CALLS} calls")
        for what, measured in times.items():
            print(f"  {what:32s} {measured}")
    assert times["look-up"].median_us <= LOOKUP_US
    assert times["blocktune.attention"].median_us <= times["kernel[grid](...)"].median_us + OVER_BARE_LAUNCH_US


def _bare_launch(bound: Any, arguments: tuple[torch.Tensor, ...], out: torch.Tensor) -> Callable[[], Any]:
    """The launch as a user would write it: all arguments ready, `kernel[grid](...)`."""
    if not isinstance(bound, TritonLaunch):
        return lambda: bound(*arguments, out, None, 0.125)
    ready = bound.arguments(*arguments, out, None, 0.125)
    return lambda: bound.function[bound.grid](*ready, **bound.options)
