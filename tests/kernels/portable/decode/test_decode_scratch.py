"""Who shares counters and workspace with whom; streams and captures are only pretended."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blocktune.kernels.portable.decode.scratch import scratch

pytestmark = pytest.mark.triton_free

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a GPU would say: the current stream, and whether it is captured."""
    state = SimpleNamespace(stream=1, capturing=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state.stream, raising=False)
    monkeypatch.setattr("blocktune.kernels.portable.decode.scratch._kept", {})
    monkeypatch.setattr("blocktune.kernels.portable.decode.scratch._spare", {})
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
