"""The short way to launch: when it is taken, and that it passes what the long way passes."""

from collections.abc import Callable
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from blocktune.kernels import launch
from blocktune.kernels.launch import TritonLaunch

GRID = (7, 1, 1)


class Recorder:
    """Stands for a jitted function or a compiled kernel: `recorder[grid](*arguments)` is written down."""

    def __init__(self, returns: Any = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.returns = returns

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            self.calls.append((grid, arguments, options))
            return self.returns

        return run


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
    monkeypatch.setattr(launch, "_can_pin", lambda compiled: True)
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
    monkeypatch.setattr(launch.metadata, "version", lambda package: version)
    assert launch._can_pin(unloaded_kernel()) is pins


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
