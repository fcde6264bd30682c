"""Launches that are repeated: they pass what the ordinary way passes, and what cannot be repeated is not."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from blocktune.kernels.base.direct_launch import direct_launcher
from blocktune.kernels.base.feature_arguments import run_time_numbers
from blocktune.kernels.base.launch import DIRECT_TRITON, _triton_version
from blocktune.kernels.base.steps import Workspace, new_memory
from blocktune.kernels.hopper.common.persistent_blocks import tile_counter
from blocktune.kernels.values.dropout import drawn_words, share_kept
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.launches import replay as replays
from blocktune.runtime.dispatch.launches.launch_replays import RecordedLaunch, RepeatedLaunch
from blocktune.runtime.dispatch.launches.recording import Recording
from blocktune.runtime.dispatch.launches.replay import LaunchReplay
from tests.support.attention.entry_calls import SIZE, backward_of, entry_calls
from tests.support.fakes.dispatch_fakes import ListSource
from tests.support.fakes.fake_launches import Calls, Compiled, Recorder, pretend_kernels, pretend_stream
from tests.support.triton_modes import compiled_here

GRID = (7, 1, 1)
HEAD = (*GRID, 103, "function", False, True, None, None, "packed", None, None, None)
CPU = torch.device("cpu")
ENTRIES = sorted(name for name in entry_calls("cpu") if "compiled" not in name and name != "block mask")
MANY = 1 << 32
"""Above it a number is an address."""


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)


def kernel(compiled: Compiled, descriptors: Any = ()) -> Callable[..., None]:
    launch = direct_launcher(compiled, GRID, None, (5,), descriptors)
    assert launch is not None
    return launch


@pytest.mark.usefixtures("stream")
def test_addresses_are_put_into_the_arguments_of_the_recorded_launch() -> None:
    compiled, first, second = Compiled(0), torch.zeros(4), torch.zeros(4)
    with Recording([None, first, second]) as recording:
        kernel(compiled)(second, None, 0.5, first)
    replay = recording.replay()
    assert replay is not None
    compiled.run.calls.clear()
    for _ in range(2):
        replay.start((0, 64, 32))
        replay.start((0, 64, 48))
    assert compiled.run.calls == [(*HEAD, address, None, 0.5, 64, 5) for address in (32, 48)] * 2


@pytest.mark.usefixtures("stream")
def test_parts_of_the_workspace_move_with_it() -> None:
    compiled, space = Compiled(0), Workspace((3, torch.float32), (0, torch.int32), (70, torch.float32))

    def launch() -> Tensor:
        memory = space.new(CPU)
        kernel(compiled)(*space.parts(memory, as_addresses=True), memory)
        return memory

    with Recording([]) as recording:
        launch()
    replay = recording.replay()
    assert replay is not None
    compiled.run.calls.clear()
    replay.start(())
    *_, first, none, second, whole, five = compiled.run.calls[0]
    assert (none, five, second - first, whole) == (None, 5, 256, first)
    assert first % 16 == 0


@pytest.mark.usefixtures("stream")
def test_what_is_kept_for_a_stream_is_found_in_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    compiled = Compiled(0)
    own = tile_counter(torch.device("cpu", 0))
    with Recording([]) as recording:
        kernel(compiled)(tile_counter(torch.device("cpu", 0)))
    replay = recording.replay()
    assert replay is not None
    compiled.run.calls.clear()
    replay.start(())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    replay.start(())
    assert compiled.run.calls[0] == (*HEAD, own.data_ptr(), 5)
    assert compiled.run.calls[1][-2] != own.data_ptr()


def unknown(compiled: Compiled, tensor: Tensor) -> None:
    kernel(compiled)(tensor.clone())


def operator_between(compiled: Compiled, tensor: Tensor) -> None:
    kernel(compiled)(tensor)
    tensor.add_(1)


def long_launch_after(compiled: Compiled, tensor: Tensor) -> None:
    kernel(compiled)(tensor)
    Recorder()[GRID](tensor)


def two_workspaces(compiled: Compiled, tensor: Tensor) -> None:
    for _ in range(2):
        kernel(compiled)(new_memory(4, torch.float32, tensor.device), tensor)


def nothing(compiled: Compiled, tensor: Tensor) -> None:
    del compiled, tensor


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("launch", [unknown, operator_between, long_launch_after, two_workspaces, nothing])
def test_what_is_more_than_known_kernels_is_not_repeated(launch: Callable[[Compiled, Tensor], None]) -> None:
    tensor = torch.zeros(4)
    with Recording([tensor]) as recording:
        launch(Compiled(0), tensor)
    assert recording.replay() is None


@pytest.mark.usefixtures("stream")
def test_a_launch_is_recorded_a_few_times_at_most() -> None:
    compiled, tensor, recorded = Compiled(0), torch.zeros(4), RecordedLaunch(chances=2)
    for launch in (unknown, nothing):
        assert recorded.launch(partial(launch, compiled, tensor), [tensor]) is None
    assert recorded.launch(lambda: kernel(compiled)(tensor), [tensor]) is None
    assert RecordedLaunch().launch(lambda: kernel(compiled)(tensor), [tensor]) is not None


@pytest.mark.usefixtures("stream")
def test_a_profiler_sees_every_launch() -> None:
    compiled, tensor, hook = Compiled(0), torch.zeros(4), triton.knobs.runtime.launch_enter_hook
    repeating = RepeatedLaunch(lambda tensor, number: kernel(compiled)(tensor, number))
    repeating(tensor, 7)
    assert repeating._replay is not None
    assert not repeating._replay.is_hooked()
    repeating(tensor, 7)
    hook.add(print)
    try:
        assert repeating._replay.is_hooked()
        repeating(tensor, 7)
    finally:
        hook.remove(print)
    assert compiled.run.calls == [(*HEAD, tensor.data_ptr(), 7, 5)]
    assert len(compiled.ordinary.calls) == 2


@pytest.mark.usefixtures("stream")
def test_arguments_do_not_pile_up() -> None:
    tensor = torch.zeros(4)
    with Recording([tensor]) as recording:
        kernel(Compiled(0))(tensor)
    replay = recording.replay()
    assert replay is not None
    for address in range(3 * replays.MAX_KEPT):
        replay.start((address,))
        assert len(replay._kept) <= replays.MAX_KEPT


@pytest.mark.usefixtures("stream")
def test_the_device_of_the_recording_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, tensor, entered = Compiled(0), torch.zeros(4), []
    with Recording([tensor]) as recording:
        kernel(compiled)(tensor)
    current = [0]
    monkeypatch.setattr("torch._C._cuda_getDevice", lambda: current[0])

    def enter(index: int) -> Any:
        entered.append(index)
        current[0] = index
        return nullcontext()

    replay = recording.replay()
    assert replay is not None
    monkeypatch.setattr(torch.cuda, "device", enter)
    replay.start((64,))
    assert entered == [3]
    assert compiled.run.calls[-1] == (*HEAD, 64, 5)


def keeping(make: Callable[..., Tensor], kept: list[Tensor]) -> Callable[..., Tensor]:
    """Return what makes tensors and keeps them: memory that is freed could become that of a result."""

    def made(*arguments: Any, **options: Any) -> Tensor:
        kept.append(make(*arguments, **options))
        return kept[-1]

    return made


def renamed(calls: Calls, given: set[int], results: Any) -> Calls:
    """Return arguments with names for the addresses of new memory, those of encoded maps included: of results by their
    place, of all else by the order in which they come."""
    results = results if isinstance(results, tuple) else (results,)
    names = {result.data_ptr(): f"result {place}" for place, result in enumerate(results)}

    def name(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(name, value))
        if type(value) is not int or value < MANY or value in given or value % (1 << 30) == 0:
            return value
        return names.setdefault(value, f"new {len(names)}")

    return [tuple(map(name, call)) for call in calls]


def dropped_backward(dispatcher: Dispatcher) -> tuple[Callable[[], Any], None]:
    tensors = [torch.randn(SIZE, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    return backward_of(partial(dispatcher, dropout_p=0.1), tensors), None


@compiled_here
@pytest.mark.skipif(_triton_version() != DIRECT_TRITON, reason="only this Triton is launched directly")
@pytest.mark.parametrize("entry", [*ENTRIES, "dropout, backward"])
def test_a_repeated_call_passes_what_the_ordinary_way_passes(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, dispatcher = pretend_kernels(monkeypatch), Dispatcher(ListSource())
    makes: dict[str, Any] = {
        **entry_calls("cpu", dispatcher),
        "dropout, backward": partial(dropped_backward, dispatcher),
    }
    make = makes[entry]
    for _ in range(2):
        learn, _ = make()
        for _ in range(3):
            learn()
    kept: list[Tensor] = []
    for name in ("rand", "randn", "tensor"):
        monkeypatch.setattr(torch, name, keeping(getattr(torch, name), kept))
    call, _ = make()
    call()
    given = {tensor.data_ptr() for tensor in kept}

    def arguments(*, is_known: bool) -> Calls:
        with monkeypatch.context() as patch:
            if not is_known:
                patch.setattr(LaunchReplay, "is_hooked", lambda replay: True)
                patch.setattr(RecordedLaunch, "launch", lambda self, start, inputs: start())
            calls.clear()
            torch.manual_seed(0)  # the same pairs are dropped
            results = call()
            return renamed(calls, given, results)

    # memory that one of the ways has freed may come back under the address of other memory, but not every time
    assert any(arguments(is_known=True) == arguments(is_known=False) for _ in range(4))
    assert "result 0" in str(arguments(is_known=True))


@pytest.mark.usefixtures("stream")
def test_every_launch_gets_its_own_words_of_dropped_pairs() -> None:
    compiled, tensor = Compiled(0), torch.zeros(4)
    with Recording([tensor]) as recording:
        kernel(compiled)(tensor, *run_time_numbers(Extras(dropout_p=0.5, seed=7 << 32 | 3, offset=3), 0.25))
    replay = recording.replay()
    assert replay is not None
    compiled.run.calls.clear()
    for seed, offset in ((7 << 32 | 3, 3), (1 << 63, 8), (7 << 32 | 3, 3)):
        replay.start((tensor.data_ptr(),), drawn_words(seed, offset))
    words = [(3, 7, 3), (0, -(1 << 31), 8), (3, 7, 3)]
    threshold = 1 << 15
    assert compiled.run.calls == [(*HEAD, tensor.data_ptr(), 0.25, 0.0, 0.5, *drawn, threshold, 5) for drawn in words]


@compiled_here
@pytest.mark.skipif(_triton_version() != DIRECT_TRITON, reason="only this Triton is launched directly")
def test_calls_with_dropout_are_repeated_with_new_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, dispatcher = pretend_kernels(monkeypatch), Dispatcher(ListSource())
    call, _ = entry_calls("cpu", dispatcher)["dropout"]()
    for _ in range(3):
        call()
    monkeypatch.setattr(RecordedLaunch, "launch", None)  # the ordinary way
    calls.clear()
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        call()
    begin = len(HEAD) + calls[0][len(HEAD) :].index(share_kept(0.1)) + 1
    first, same, other = (launch[begin : begin + 3] for launch in calls)
    assert first == same != other
