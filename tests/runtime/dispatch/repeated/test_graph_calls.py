"""Calls as graphs hold them: a text and few tensors, found again by the fast path of eager calls."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune import flash_attn_func
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.graphs.graph_call import BLOCKS, DRAWN, GraphCall, graph_call
from blocktune.runtime.dispatch.torch_attention import scaled_dot_product_attention as pytorchs
from tests.support.fakes.dispatch_fakes import ListSource
from tests.support.fakes.feature_fakes import pretend_features

pytestmark = pytest.mark.triton_free

PLAIN: dict[str, Any] = {
    "dispatcher": 0, "lse": False, "causal": "none", "scale": 0.25, "window": (-1, -1), "softcap": 0.0,
    "dropout_p": 0.0, "deterministic": False, "page_size": 0, "block_sizes": (0, 0), "num_splits": 0, "tensors": (),
}  # fmt: skip


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    pretend_features(monkeypatch)
    torch._dynamo.reset()
    return Dispatcher(ListSource())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scale": 1 / 3, "causal": "lower_right", "window": (5, 0), "lse": True},
        {"scale": math.inf, "tensors": ("mask", BLOCKS, DRAWN), "block_sizes": (16, 32), "dropout_p": 0.1},
    ],
)
def test_a_text_says_all_of_a_call(changes: dict[str, Any]) -> None:
    call = GraphCall(**PLAIN | changes)
    assert graph_call(call.text) == call
    assert GraphCall(**PLAIN | changes | {"num_splits": 2}).text != call.text


def test_tensors_of_a_call_are_told_apart_by_name() -> None:
    mask, blocks, drawn = torch.ones(1, 1, 16, 16) > 0, torch.ones(1, 1, 1, 1) > 0, torch.tensor([7, 8])
    call = GraphCall(**PLAIN | {"tensors": ("mask", BLOCKS, DRAWN), "block_sizes": (16, 32)})
    extras, (block_mask, seed, offset) = call.parts((mask, blocks, drawn))
    assert block_mask is not None
    assert extras == (mask,)
    assert (block_mask.block_q, block_mask.block_k, block_mask.mask is blocks, seed, offset) == (16, 32, True, 7, 8)
    assert [id(one) for one in call.guarded((mask, blocks, drawn))] == [id(mask), id(blocks)]


def rows(grad: bool = True) -> list[Tensor]:
    return [torch.randn(2, 4, 24, 16).requires_grad_(grad) for _ in range(3)]


def test_a_graph_that_trains_finds_its_plans_the_short_way(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = torch.compile(lambda *tensors: dispatcher(*tensors, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    leaves = rows()
    for _ in range(2):  # the first call compiles, in a state of the dispatcher that guards tell from others
        torch.autograd.grad(graph(*leaves).sum(), leaves)
    monkeypatch.setattr(dispatcher, "forward", None)
    monkeypatch.setattr(dispatcher, "backward", None)
    out, grad = graph(*leaves), torch.randn(2, 4, 24, 16)
    (dv,) = torch.autograd.grad(out, leaves[2], grad)  # linear in the values: the same pairs were dropped
    torch.testing.assert_close((dv * leaves[2]).sum(), (grad * out).sum())


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)])
def test_gradients_of_some_inputs(dispatcher: Dispatcher, needed: tuple[int, ...]) -> None:
    leaves = [tensor.requires_grad_(place in needed) for place, tensor in enumerate(rows(grad=False))]
    wanted = [leaves[place] for place in needed]
    graph = torch.compile(lambda *tensors: dispatcher(*tensors, is_causal=True), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        got = torch.autograd.grad(graph(*leaves).sum(), wanted)
    torch.testing.assert_close(got, torch.autograd.grad(pytorchs(*leaves, is_causal=True).sum(), wanted))


def test_the_log_sum_exp_of_a_graph_has_a_gradient(dispatcher: Dispatcher) -> None:
    leaves = rows()

    def merged(*tensors: Tensor) -> Tensor:
        out, lse, _ = flash_attn_func(*tensors, softcap=3.0, return_attn_probs=True, dispatcher=dispatcher)
        return out.sum() + lse.square().sum()

    graph = torch.compile(merged, backend="aot_eager", fullgraph=True)
    got, right = (torch.autograd.grad(call(*leaves), leaves) for call in (graph, merged))
    torch.testing.assert_close(got, right)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch's own forward-mode rules take it
def test_transforms_in_a_graph_are_pytorchs(dispatcher: Dispatcher) -> None:
    """They have no rule for our ops: a derivative would be 0, or an error of PyTorch's."""
    query, key, value = rows(grad=False)

    def slope(attend: Any, **options: Any) -> Any:
        return torch.func.grad(lambda query: attend(query, key, value, **options).square().sum())

    graph = torch.compile(slope(dispatcher), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(graph(query), slope(pytorchs)(query))
    capped = {"softcap": 1e4, "dispatcher": dispatcher}
    graph = torch.compile(slope(flash_attn_func, **capped), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(graph(query), slope(flash_attn_func, **capped)(query))
    tangent = torch.compile(
        lambda query: torch.func.jvp(lambda one: flash_attn_func(one, key, value, **capped), (query,), (query,))[1],
        backend="aot_eager",
    )
    assert tangent(query).abs().max() > 0
