"""Nothing keeps the tensors of a call once its caller lets go of them."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.kernels.base.launch import DIRECT_TRITON, _triton_version
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.launches.launch_replays import RecordedLaunch
from tests.support.attention.entry_calls import entry_calls
from tests.support.fakes import fake_launches
from tests.support.fakes.dispatch_fakes import ListSource
from tests.support.fakes.fake_launches import Calls, Recorder, pretend_kernels
from tests.support.triton_modes import compiled_here

CALLS = 4
"""The slow path, calls that are recorded, and repeated ones."""


@pytest.fixture
def reference_counts_alone() -> Iterator[None]:
    """What only a collection would free counts as kept: on a GPU it is memory for as long."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def forgetful(self: Recorder, grid: tuple[int, int, int]) -> object:
    """Return a launch of the ordinary way that keeps none of its arguments, as Triton does."""
    del grid
    return lambda *arguments, **options: fake_launches.knobs.runtime.launch_enter_hook(None) or self.returns


@compiled_here
@pytest.mark.skipif(_triton_version() != DIRECT_TRITON, reason="only this Triton is launched directly")
@pytest.mark.usefixtures("reference_counts_alone")
@pytest.mark.parametrize("head_dim", [64, 256])
def test_outputs_and_gradients_go_with_their_last_name(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_kernels(monkeypatch)
    monkeypatch.setattr(Recorder, "__getitem__", forgetful)
    dispatcher = Dispatcher(ListSource())
    inputs = [torch.randn(1, 2, 128, head_dim, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    for _ in range(CALLS):
        out = dispatcher(*inputs, is_causal=True)
        grad = torch.randn_like(out)
        kept = [*watched(torch.autograd.grad(out, inputs, grad)), *watched((out, grad))]
        del out, grad
        assert [one() for one in kept] == [None] * 5


def watched(tensors: tuple[Tensor, ...]) -> "list[weakref.ref[Tensor]]":
    return [weakref.ref(tensor) for tensor in tensors]


class Workspaces:
    """What `torch.empty` has allocated: the addresses, and whether tensors still own them."""

    def __init__(self) -> None:
        self._made: list[tuple[range, weakref.ref[Tensor]]] = []
        self._empty = torch.empty

    def empty(self, *sizes: Any, **options: Any) -> Tensor:
        made: Tensor = self._empty(*sizes, **options)
        addresses = range(made.data_ptr(), made.data_ptr() + made.untyped_storage().nbytes())
        self._made.append((addresses, weakref.ref(made)))
        return made

    def is_freed(self, address: int) -> bool:
        owners = [owner() for addresses, owner in self._made if address in addresses]
        return bool(owners) and all(owner is None for owner in owners)


class Launches(Calls):
    """The launches, each of which is looked at when it goes out."""

    def __init__(self, workspaces: Workspaces) -> None:
        super().__init__()
        self._workspaces = workspaces
        self.freed: list[Any] = []

    def append(self, arguments: tuple[Any, ...]) -> None:
        """Note the launch, and what of its arguments points to memory that was given back before it."""
        super().append(arguments)
        addresses = [value[1] if type(value) is tuple else value for value in arguments]  # of a map, or itself
        self.freed += [one for one in addresses if isinstance(one, int) and self._workspaces.is_freed(one)]


EAGER = [name for name in entry_calls("cpu") if "compiled" not in name]


@compiled_here
@pytest.mark.skipif(_triton_version() != DIRECT_TRITON, reason="only this Triton is launched directly")
@pytest.mark.usefixtures("reference_counts_alone")
@pytest.mark.few(6)
@pytest.mark.parametrize("entry", EAGER)
def test_a_workspace_lives_until_the_last_kernel_has_started(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch allocates between two of its kernels, such as zeros while a CUDA graph is captured, would lie in a
    workspace that was given back between them."""
    workspaces = Workspaces()
    launches = Launches(workspaces)
    pretend_kernels(monkeypatch, launches)
    monkeypatch.setattr(Recorder, "__getitem__", forgetful)
    monkeypatch.setattr(RecordedLaunch, "launch", lambda self, start, inputs: start())  # the ordinary way
    call, _ = entry_calls("cpu", Dispatcher(ListSource()))[entry]()
    call()
    monkeypatch.setattr(torch, "empty", workspaces.empty)
    launches.clear()
    call()
    assert launches
    assert launches.freed == []


def test_a_recording_imports_no_compiler() -> None:
    """PyTorch's takes seconds, and the first call of every process would wait for it."""
    code = (
        "import sys, torch; from blocktune.runtime.dispatch.launches.recording import Recording; "
        "tensor = torch.zeros(4)\nwith Recording([tensor]): tensor.add_(1)\nassert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
