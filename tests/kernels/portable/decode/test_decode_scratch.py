"""Who shares counters and workspace with whom; streams and captures are only pretended."""

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware import side_thread
from blocktune.kernels.portable.decode.scratch import scratch
from tests.support.fakes.fake_launches import pretend_side_thread

pytestmark = pytest.mark.triton_free

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a GPU would say: the current stream, and whether it is captured."""
    state = SimpleNamespace(stream=1, capturing=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state.stream, raising=False)
    pretend_side_thread(monkeypatch)
    monkeypatch.setattr("blocktune.kernels.portable.decode.scratch._kept", {})
    monkeypatch.setattr("blocktune.kernels.portable.decode.scratch._spare", {})
    monkeypatch.setattr("blocktune.kernels.portable.decode.scratch._handed_out", [])
    monkeypatch.setattr("blocktune.kernels.portable.decode.scratch.SPARE_COUNTERS", 16)
    return state


def zeros(found: tuple[Any, Any]) -> torch.Tensor:
    assert not found[1].any()
    return found[1]  # type: ignore[no-any-return]


def test_launches_of_a_stream_share_and_streams_do_not(gpu: Any) -> None:
    work, counters = scratch(CPU, 8, 100)
    assert (work.dtype, counters.dtype) == (torch.float32, torch.int32)
    assert scratch(CPU, 3, 50) == (work, counters)
    gpu.stream = 2
    assert scratch(CPU, 3, 50)[1] is not counters


def test_it_grows_and_never_shrinks(gpu: Any) -> None:
    scratch(CPU, 8, 100)
    work, counters = scratch(CPU, 64, 10)
    assert (work.numel(), zeros((work, counters)).numel()) == (100, 64)
    work, counters = scratch(CPU, 8, 200)
    assert (work.numel(), counters.numel()) == (200, 64)


def test_every_launch_in_a_graph_has_its_own_even_when_the_spare_zeros_are_used_up(gpu: Any) -> None:
    _, shared = scratch(CPU, 8, 100)
    gpu.capturing = True
    found = [scratch(CPU, 6, 100) for _ in range(4)]
    addresses = {zeros(one).data_ptr() for one in found} | {shared.data_ptr()}
    assert len(addresses) == 5
    assert [one[1].numel() for one in found] == [6] * 4
    assert found[1][1].data_ptr() - found[0][1].data_ptr() == 32  # aligned
    gpu.capturing = False
    assert scratch(CPU, 8, 100)[1] is shared


def test_a_capture_may_come_first(gpu: Any) -> None:
    gpu.capturing = True
    assert zeros(scratch(CPU, 5, 10)).numel() == 5


class ThreadPools:
    """PyTorch's allocator as far as it matters here: the thread that asks decides which pool memory comes from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pooled_threads: set[int] = set()
        self.from_pool: list[int] = []
        for name in ("empty", "zeros"):
            monkeypatch.setattr(torch, name, self._noting(getattr(torch, name)))

    def _noting(self, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noting(*sizes: Any, **options: Any) -> torch.Tensor:
            made = allocate(*sizes, **options)
            if threading.get_ident() in self.pooled_threads:
                self.from_pool.append(made.numel())
            return made

        return noting


def pretend_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the real side thread run without a GPU."""
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr("blocktune.kernels.portable.decode.scratch.run_on_side_thread", side_thread.run_on_side_thread)
    monkeypatch.setattr(side_thread, "load_library", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def test_kept_memory_never_comes_from_the_pool_of_the_calling_thread(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_device(monkeypatch)
    pools = ThreadPools(monkeypatch)
    pools.pooled_threads.add(threading.get_ident())  # a user's MemPool, or PyTorch warming up a graph
    scratch(CPU, 8, 100)
    scratch(CPU, 8, 200)
    assert pools.from_pool == []
    gpu.capturing = True  # the workspace of a captured launch is the graph's own, its counters outlive the capture
    scratch(CPU, 6, 50)
    assert pools.from_pool == [50]


def test_kept_memory_is_no_inference_tensor(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_device(monkeypatch)
    with torch.inference_mode():
        work, counters = scratch(CPU, 8, 100)
    assert not work.is_inference()
    assert not counters.is_inference()


def test_memory_that_graphs_have_addresses_of_is_never_freed(gpu: Any) -> None:
    gpu.capturing = True
    storages = [torch.multiprocessing.reductions.StorageWeakRef(scratch(CPU, 6)[1].untyped_storage()) for _ in range(9)]
    gc.collect()
    assert not any(storage.expired() for storage in storages)
