"""Tensors of other ranks than four and nested ones: `attention` computes what PyTorch computes, and raises what it
raises."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from blocktune import attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
L, S, E = 9, 23, 8
LAYOUTS = [torch.strided, torch.jagged]
pytestmark = [pytest.mark.triton_free, pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")]


def outcome(function: Any, *arguments: Any, **options: Any) -> Tensor | type[Exception]:
    """What the function returns, or the type of what it raises."""
    try:
        result: Tensor = function(*arguments, **options)
    except Exception as error:
        return type(error)
    return result


def assert_alike(arguments: tuple[Tensor, ...], *masks: Tensor, **options: Any) -> None:
    theirs, ours = (outcome(function, *arguments, *masks, **options) for function in (sdpa, attention))
    if isinstance(theirs, type):
        assert isinstance(ours, type)
        assert issubclass(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def inputs(leading: tuple[int, ...], device: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(*leading, length, E, device=device) for length in (L, S, S))
    return q, k, v


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"scale": -0.3}])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3, 4), (2, 1, 3, 4)])
@pytest.mark.parametrize("device", DEVICES)
def test_other_ranks_are_pytorchs(device: str, leading: tuple[int, ...], options: dict[str, Any]) -> None:
    arguments = inputs(leading, device)
    assert_alike(arguments, **options)
    leaves = [tensor.requires_grad_() for tensor in arguments]
    gradients = [
        torch.autograd.grad(function(*leaves, **options).square().sum(), leaves) for function in (sdpa, attention)
    ]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", [(S,), (L, S), (1, S), (3, L, S), (1, 1, L, S), (3, 3, L, S), (L, S + 1)])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3, 4)])
@pytest.mark.parametrize("device", DEVICES)
def test_their_masks_are_pytorchs(
    device: str, leading: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    arguments = inputs(leading, device)
    mask = (
        torch.rand(sizes, device=device) > 0.3 if dtype is torch.bool else torch.randn(sizes, device=device).to(dtype)
    )
    assert_alike(arguments, mask)


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_may_differ(device: str) -> None:
    q, k, v = inputs((2, 3), device)
    for arguments in ((q[0], k, v), (q, k[0], v[0]), (q[0, 0], k, v), (q[:, :1], k, v), (q[:1], k, v), (q, k, v[0])):
        assert_alike(arguments)
        assert_alike(arguments, torch.randn(2, 3, L, S, device=device))


@pytest.mark.few(1)
@pytest.mark.parametrize("leading", [(3,), (2, 3, 4)])
def test_a_compiled_graph_has_them_too(leading: tuple[int, ...]) -> None:
    arguments, mask = inputs(leading, "cpu"), torch.randn(L, S)
    compiled = torch.compile(lambda *given: attention(*given), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments, mask), sdpa(*arguments, mask))


def nested(layout: torch.layout, device: str, *, grad: bool = False) -> Tensor:
    """Two sequences [heads, length, dim] of different lengths."""
    torch.manual_seed(0)
    parts = [torch.randn(length, 2, E, device=device) for length in (3, 5)]
    if layout is torch.jagged:
        return torch.nested.nested_tensor(parts, layout=layout, requires_grad=grad).transpose(1, 2)
    parts = [part.transpose(0, 1).contiguous() for part in parts]
    return torch.nested.nested_tensor(parts, layout=layout, requires_grad=grad)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"scale": -0.3}, {"is_causal": True}])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", DEVICES)
def test_nested_tensors_are_pytorchs(device: str, layout: torch.layout, options: dict[str, Any]) -> None:
    given = nested(layout, device)
    theirs, ours = (outcome(function, given, given, given, **options) for function in (sdpa, attention))
    if isinstance(theirs, type) or isinstance(ours, type):
        assert ours is theirs
        return
    for one, other in zip(ours.unbind(), theirs.unbind(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nested_tensors_drop_out_and_have_gradients(layout: torch.layout) -> None:
    given = nested(layout, "cpu", grad=True)
    torch.manual_seed(3)
    theirs = sdpa(given, given, given, dropout_p=0.5)
    torch.manual_seed(3)
    ours = attention(given, given, given, dropout_p=0.5)
    for one, other in zip(ours.unbind(), theirs.unbind(), strict=True):
        torch.testing.assert_close(one, other)
        assert one.requires_grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_answer_is_explained(layout: torch.layout) -> None:
    given = nested(layout, "cpu")
    assert "nested" in attention.explain(given, given, given).reason.lower()
