"""What PyTorch's tools do with every entry point: graphs, exported programs, fake and meta tensors, counted FLOPs."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from blocktune import attention, flash_attn_func
from blocktune.runtime.dispatch import dispatcher, obstacles
from tests.support.attention.entry_points import entry_points

pytestmark = pytest.mark.triton_free

NAMES = list(entry_points())


@pytest.fixture(autouse=True)
def ours_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs hold our ops for tensors on the CPU, too."""
    for module in (obstacles, dispatcher):
        monkeypatch.setattr(module, "KERNEL_DEVICE", "cpu")
    torch._dynamo.reset()
    attention.reload()
    yield
    attention.reload()


def copies(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """New rows are written into caches."""
    return tuple(tensor.clone() for tensor in tensors)


@pytest.mark.few(6)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_entry_point_is_one_graph(name: str, dynamic: bool) -> None:
    function, tensors = entry_points()[name]
    graph = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(graph(*copies(tensors)), function(*copies(tensors)))


def layout(found: Any) -> list[Any]:
    return [(one.shape, one.stride(), one.dtype) for one in tree_leaves(found)]


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_have_the_results_sizes(name: str) -> None:
    function, tensors = entry_points()[name]
    with FakeTensorMode() as mode:
        found = function(*(mode.from_tensor(tensor) for tensor in tensors))
    assert all(isinstance(one, FakeTensor) for one in tree_leaves(found))
    assert layout(found) == layout(function(*copies(tensors)))


@pytest.mark.parametrize("name", NAMES)
def test_meta_tensors_have_the_results_sizes(name: str) -> None:
    function, tensors = entry_points()[name]
    found = function(*(tensor.to("meta") for tensor in tensors))
    assert {one.device.type for one in tree_leaves(found)} == {"meta"}
    assert layout(found) == layout(function(*copies(tensors)))


@pytest.mark.parametrize("device", ["fake", "meta"])
def test_a_training_step_needs_no_values(device: str) -> None:
    for function, tensors in (entry_points()[name] for name in ("flash_attn_func, features", "flash_attn_varlen_func")):
        mode = FakeTensorMode() if device == "fake" else None
        given = [tensor.to("meta") if mode is None else mode.from_tensor(tensor) for tensor in tensors]
        leaves = [tensor.requires_grad_() for tensor in given[:3]]
        with mode or nullcontext():
            out = tree_leaves(function(*leaves, *given[3:]))[0]
            gradients = torch.autograd.grad(out.sum(), leaves)
        assert layout(gradients) == layout(tensors[:3])


def counted(function: Any, *tensors: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*tensors)
    return counter.get_total_flops()


def step(function: Any) -> Any:
    """The call and its gradients."""

    def train(*tensors: Tensor) -> None:
        leaves = [tensor.requires_grad_() for tensor in tensors[:3]]
        out = tree_leaves(function(*leaves, *tensors[3:]))[0]
        torch.autograd.grad(out.sum(), leaves)

    return train


def test_flops_are_counted_as_of_pytorchs_attention() -> None:
    q, k, v = (torch.empty(2, *own, device="meta") for own in ((4, 20, 16), (4, 24, 16), (4, 24, 16)))
    sizes = q.shape, k.shape, v.shape
    forward, backward = sdpa_flop_count(*sizes), sdpa_backward_flop_count(q.shape, *sizes)
    flash = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    for options in ({}, {"causal": True, "window_size": (3, 0)}, {"dropout_p": 0.5}):
        attend = partial(flash_attn_func, **options)
        assert counted(attend, *flash) == forward
        assert counted(step(attend), *flash) == forward + backward
    assert counted(attention, q, k, v) == forward
    assert counted(step(attention), q, k, v) == forward + backward


@pytest.mark.parametrize("fake", [False, True])
def test_flops_of_packed_sequences_and_caches_are_those_of_their_lengths(fake: bool) -> None:
    """Or of the longest, where no one can read them. What runs is a graph: PyTorch compiles none that is watched."""

    def pairs(name: str) -> float:
        function, tensors = entry_points()[name]
        program = exported(function, tensors).module()
        with FakeTensorMode() if fake else nullcontext() as mode:
            given = [mode.from_tensor(tensor) for tensor in tensors] if fake else tensors
            return counted(function if fake else program, *given) / (2 * 4 * (16 + 16))

    assert pairs("flash_attn_varlen_func") == (3 * 16 * 20 if fake else 4 * 4 + 5 * 6 + 11 * 14)
    assert pairs("flash_attn_with_kvcache") == (3 * 2 * 32 if fake else 2 * (5 + 9 + 20))


def exported(
    function: Any, tensors: tuple[Tensor, ...], *, strict: bool = False, shapes: Any = None
) -> torch.export.ExportedProgram:
    """The entry point as a program, for any sizes that the shapes leave open."""

    class Layer(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return function(*tensors)

    dynamic = None if shapes is None else (shapes,)
    return torch.export.export(Layer(), tensors, strict=strict, dynamic_shapes=dynamic)


FROZEN = {
    "flash_attn_qkvpacked_func": {3},
    "flash_attn_kvpacked_func": {2},
    "flash_attn_varlen_qkvpacked_func": {3},
    "flash_attn_varlen_kvpacked_func": {2},
    "flash_attn_varlen_func, pages": {8},
    "flash_attn_varlen_func, pages, many queries": {8},
    "varlen_attn, pages": {8},
    "flash_attn_with_kvcache, pages": {32},
    "flash_attn_with_kvcache, new rows in pages": {32},
}
"""The sizes that decide what a call is: tensors in one, and the rows of a page."""


@pytest.mark.few(8)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_an_exported_entry_point_leaves_every_size_open(name: str, strict: bool) -> None:
    function, tensors = entry_points()[name]
    shapes = tuple(dict.fromkeys(range(tensor.dim()), torch.export.Dim.AUTO) for tensor in tensors)
    program = exported(function, copies(tensors), strict=strict, shapes=shapes)
    sizes = [size for node in program.graph.find_nodes(op="placeholder") for size in node.meta["val"].shape]
    assert {int(size) for size in sizes if is_concrete_int(size) and size > 1} == FROZEN.get(name, set())
    torch.testing.assert_close(program.module()(*copies(tensors)), function(*copies(tensors)))
