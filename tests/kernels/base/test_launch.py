"""The short way to launch: when it is taken, and that it passes what the long way passes."""

from dataclasses import dataclass
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from blocktune.kernels.base import launch
from blocktune.kernels.base.direct_launch import MAX_MAPS, EncodedMaps, direct_launcher
from blocktune.kernels.base.launch import TritonLaunch
from blocktune.kernels.base.steps import based
from tests.support.fakes.fake_launches import Compiled, Recorder

GRID = (7, 1, 1)


def bound(function: Any) -> TritonLaunch:
    return TritonLaunch(
        function,
        GRID,
        lambda q, k, v, out, lse, scale: (q, k, v, out, lse, 2 * scale),
        lambda q, k, v, out: (len(q), 64),
        {"num_warps": 4},
    )


def unloaded_kernel() -> CompiledKernel:
    kernel = object.__new__(CompiledKernel)
    kernel.module = None  # nothing to unload
    return kernel


def test_the_long_way_passes_leading_and_trailing_arguments_and_options() -> None:
    function = Recorder()
    bound(function)("q", "k", "v", "out", None, 0.5)
    assert function.calls == [(GRID, ("q", "k", "v", "out", None, 1.0, 1, 64), {"num_warps": 4})]


def test_the_short_way_passes_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "can_pin", lambda compiled: True)
    monkeypatch.setattr(launch, "DIRECT_TRITON", None)
    compiled = Recorder()
    function = Recorder(returns=compiled)
    short = bound(function).pinned("q", "k", "v", "out", None, 0.5)
    short("q2", "k2", "v2", "out2", "lse2", 1.0)
    assert len(function.calls) == 1
    assert compiled.calls == [
        (GRID, ("q", "k", "v", "out", None, 1.0, 1, 64), {}),  # at once, so that a wrong signature shows
        (GRID, ("q2", "k2", "v2", "out2", "lse2", 2.0, 1, 64), {}),
    ]


def test_what_the_interpreter_returns_is_not_pinned() -> None:
    function = Recorder(returns=None)
    long = bound(function)
    assert long.pinned("q", "k", "v", "out", None, 0.5) is long
    assert len(function.calls) == 1


@pytest.mark.parametrize(
    ("version", "pins"), [("3.5.1", False), ("3.6.0", True), ("3.9.0", True), ("3.10.0", False), ("4.0.0", False)]
)
def test_only_tried_versions_of_triton_are_pinned(monkeypatch: pytest.MonkeyPatch, version: str, pins: bool) -> None:
    monkeypatch.setattr(launch, "_triton_version", launch._triton_version.__wrapped__)
    monkeypatch.setattr(launch.metadata, "version", lambda package: version)
    assert launch.can_pin(unloaded_kernel()) is pins


@triton.jit
def _add(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), n)


def test_this_triton_passes_all_arguments_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CompiledKernel[grid](*arguments)` hands grid, hooks and then every argument to the launcher, in order."""
    if not isinstance(_add, triton.runtime.jit.JITFunction):
        pytest.skip("the interpreter compiles nothing")
    received: list[tuple[Any, ...]] = []
    compiled = unloaded_kernel()
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda self: None)
    monkeypatch.setattr(CompiledKernel, "launch_metadata", lambda self, grid, stream, *arguments: None)
    compiled._run = lambda *arguments: received.append(arguments)
    compiled.function, compiled.packed_metadata = "function", "metadata"
    compiled[GRID]("x", 3, 16, stream=5)
    ((*before, x, n, block),) = received
    assert (before[:6], [x, n, block]) == ([*GRID, 5, "function", "metadata"], ["x", 3, 16])


@dataclass(frozen=True)
class Tensor:
    """Memory at an address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was encoded; the driver's parts that need a GPU are replaced."""
    made: list[Any] = []

    def encode(described: Any, metadata: Any) -> list[Any]:
        made.append((described, metadata))
        return [f"map of {described}", 8, 64]

    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", encode)
    monkeypatch.setattr("torch._C._cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr("torch._C._cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    return made


LAUNCH = (*GRID, 103, "function", False, True, None, None, "packed", None, None, None)
DESCRIBED = [(1, lambda tensor: f"block of {tensor.address}")]


def direct(compiled: Compiled, descriptors: Any = DESCRIBED) -> Any:
    return direct_launcher(compiled, GRID, lambda a, b, scale: (a, b, None, 2 * scale), (5, 6), descriptors)


def test_the_direct_way_passes_addresses_and_keeps_encoded_descriptors(encoded: list[Any]) -> None:
    compiled = Compiled(1)
    launch = direct(compiled)
    launch(Tensor(16), Tensor(32), 0.5)
    launch(Tensor(48), Tensor(32), 1.0)
    launch(Tensor(48), Tensor(64), 1.0)
    assert compiled.run.calls == [
        (*LAUNCH, 16, "map of block of 32", 8, 64, None, 1.0, 5, 6),
        (*LAUNCH, 48, "map of block of 32", 8, 64, None, 2.0, 5, 6),
        (*LAUNCH, 48, "map of block of 64", 8, 64, None, 2.0, 5, 6),
    ]
    assert encoded == [("block of 32", "meta0"), ("block of 64", "meta0")]


def test_a_descriptor_of_a_part_belongs_to_its_address_and_rows(encoded: list[Any]) -> None:
    """Workspaces come back at the same address for another number of packed tokens."""
    compiled = Compiled(1)
    described = [(0, lambda part: (based(part[0]).data_ptr(), part[1]))]
    launch = direct_launcher(compiled, GRID, None, (), described)
    assert launch is not None
    for part in ((64, 5), (64, 5), (64, 9), (128, 5), (64, 9)):
        launch(part, 1.0)
        assert compiled.run.calls[-1] == (*LAUNCH, f"map of {part}", 8, 64, 1.0)
    assert [part for part, _ in encoded] == [(64, 5), (64, 9), (128, 5)]


@pytest.mark.usefixtures("encoded")
def test_the_direct_way_without_descriptors() -> None:
    compiled = Compiled(0)
    direct(compiled, ())(Tensor(16), Tensor(32), 0.5)
    assert compiled.run.calls == [(*LAUNCH, 16, 32, None, 1.0, 5, 6)]


def test_encoded_descriptors_do_not_pile_up(encoded: list[Any]) -> None:
    maps = EncodedMaps(lambda tensor: tensor.address, "meta")
    for address in range(3 * MAX_MAPS):
        maps.encode(Tensor(address), address)
        assert len(maps.kept) <= MAX_MAPS
    assert len(encoded) == 3 * MAX_MAPS


@pytest.mark.usefixtures("encoded")
@pytest.mark.parametrize("when", ["enter", "exit"])
def test_a_profiler_s_hooks_are_called_by_the_ordinary_way(when: str) -> None:
    compiled = Compiled(1)
    launch = direct(compiled)
    chain = getattr(triton.knobs.runtime, f"launch_{when}_hook")
    chain.add(hook := lambda metadata: None)
    try:
        launch(Tensor(16), Tensor(32), 0.5)
    finally:
        chain.remove(hook)
    assert compiled.run.calls == []
    assert compiled.ordinary.calls == [(GRID, (Tensor(16), "block of 32", None, 1.0, 5, 6), {})]


@pytest.mark.usefixtures("encoded")
@pytest.mark.parametrize(
    "compiled", [Compiled(1, scratch=128), Compiled(1, metadata=(None,)), Compiled(0, metadata=("a", "b")), Compiled(2)]
)
def test_a_launcher_that_is_not_as_expected_is_left_alone(compiled: Compiled) -> None:
    assert direct(compiled) is None


def test_the_real_launcher_has_the_parts_that_the_direct_way_takes() -> None:
    """Of Triton 3.6: read from its source, since it cannot be made without a GPU."""
    if launch._triton_version() != launch.DIRECT_TRITON:
        pytest.skip(f"only Triton {launch.DIRECT_TRITON} is launched directly")
    from triton.backends.nvidia import driver

    wrapped = driver.wrap_handle_tensordesc(print, {"a": "tensordesc<fp16[1]>"}, None)
    assert (
        dict(zip(wrapped.__code__.co_freevars, wrapped.__closure__ or (), strict=True))["launcher"].cell_contents
        is print
    )
    assert driver.wrap_handle_tensordesc(print, {"a": "*fp16"}, None) is print
    assert driver._BASE_ARGS_FORMAT == "iiiKKppOOOOOO"
