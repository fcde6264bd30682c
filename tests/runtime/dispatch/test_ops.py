"""Our ops in compiled and exported graphs: the same numbers, strides and gradients as eager calls, whatever computes
them, and one graph for all lengths."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.testing._internal.two_tensor import TwoTensor

from blocktune import BlockMask, attention, block_sparse_attention, flash_attn_func, flash_attn_varlen_func
from blocktune.kernels import registry
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.dispatch import dispatcher, obstacles, resolver
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.graphs import engines
from tests.support.fakes.dispatch_fakes import H200, ListSource
from tests.support.fakes.feature_fakes import FeatureBackward, FeatureForward

pytestmark = pytest.mark.triton_free

NAMES = ("attention_forward", "attention_backward")
FORWARD, BACKWARD = (getattr(torch.ops.blocktune, name).default for name in NAMES)
SDPA, PLAIN = torch.ops.blocktune.scaled_dot_product_attention.default, torch.ops.blocktune.attention_plain.default
CALL = torch.ops.blocktune.attention_call.default
DROPOUT = tuple(getattr(torch.ops.blocktune, f"{name}_dropout").default for name in NAMES)


@pytest.fixture(autouse=True)
def traced_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs hold our op for tensors on the CPU, too."""
    for module in (obstacles, dispatcher):
        monkeypatch.setattr(module, "KERNEL_DEVICE", "cpu")
    torch._dynamo.reset()
    attention.reload()
    yield
    attention.reload()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FeatureForward, FeatureBackward]]:
    """Kernels behind the ops, instead of PyTorch's mathematics."""
    both = FeatureForward(), FeatureBackward()
    monkeypatch.setattr(registry, "KERNELS", {kernel.name: kernel for kernel in both})
    monkeypatch.setattr(resolver, "current_device", lambda index: H200)
    served = Dispatcher(ListSource())
    engines._engines[attention._number] = served
    yield both
    engines._engines[attention._number] = attention


def inputs(queries: int = 20, *, layout: str = "bhsd", dim_v: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    made = []
    for heads, length, dim in ((4, queries, 16), (2, 24, 16), (2, 24, dim_v)):
        sizes = (2, heads, length, dim) if layout == "bhsd" else (2, length, heads, dim)
        tensor = torch.randn(sizes)
        made.append((tensor if layout == "bhsd" else tensor.transpose(1, 2)).requires_grad_())
    return made


def results(attend: Any, leaves: list[Tensor], *more: Tensor) -> list[Tensor]:
    out = attend(*leaves, *more)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.randn(out.shape, dtype=out.dtype))]


def compiled(function: Any, *, dynamic: bool = False) -> tuple[Any, Any]:
    """Return the function in one graph, and a counter of the graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter), counter


@pytest.mark.few(1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_forward_and_backward(kernels: tuple[FeatureForward, FeatureBackward], dynamic: bool) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, is_causal=True, enable_gqa=True)

    def expected(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sdpa(query, key, value, is_causal=True, enable_gqa=True)

    graph, _ = compiled(attend, dynamic=dynamic)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for queries in (20, 22, 29) if dynamic else (20,):
            leaves = inputs(queries)
            torch.testing.assert_close(results(graph, leaves), results(expected, leaves))
    lengths = {shape.seqlen_q for shape, _ in kernels[1].seen}
    assert lengths == ({20, 22, 29} if dynamic else {20})  # a plan of its own for every length, by one graph


@pytest.mark.parametrize("served", [True, False])
def test_masks_dropout_and_autocast(served: bool, request: pytest.FixtureRequest) -> None:
    if served:
        request.getfixturevalue("kernels")
    leaves, mask = inputs(), torch.rand(2, 1, 1, 24) > 0.3

    def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return attention(query, key, value, mask, enable_gqa=True)

    graph, _ = compiled(masked)
    expected = results(lambda *tensors: sdpa(*tensors, enable_gqa=True), leaves, mask)
    torch.testing.assert_close(results(graph, leaves, mask), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = graph(*leaves, mask)
        assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), expected[0], atol=3e-2, rtol=3e-2)


def test_a_mask_that_learns_where_no_kernel_serves() -> None:
    leaves = [*inputs(), torch.randn(1, 4, 1, 24).requires_grad_()]

    def attend(*tensors: Tensor) -> Tensor:
        return attention(*tensors, enable_gqa=True)

    graph, _ = compiled(attend)
    torch.testing.assert_close(results(graph, leaves), results(lambda *own: sdpa(*own, enable_gqa=True), leaves))


@pytest.mark.parametrize("served", [True, False])
def test_dropout_in_a_graph_is_drawn_once(served: bool, request: pytest.FixtureRequest) -> None:
    if served:
        request.getfixturevalue("kernels")
    query, key, value = inputs()
    graph, _ = compiled(lambda *tensors: attention(*tensors, dropout_p=0.5, enable_gqa=True))
    torch.manual_seed(2)
    out = graph(query, key, value)
    torch.manual_seed(2)
    assert torch.equal(graph(query, key, value), out)
    assert not torch.equal(graph(query, key, value), out)
    grad = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, value, grad)  # linear in the values: the same pairs must have been dropped
    torch.testing.assert_close((dv * value).sum(), (grad * out).sum())


def noted(function: Any) -> tuple[Any, dict[str, set[Any]]]:
    """Return the function compiled, and what it calls then by namespace, forward and backward."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    seen: dict[str, set[Any]] = {}

    def note(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        for node in graph.graph.nodes:
            seen.setdefault(getattr(node.target, "namespace", ""), set()).add(node.target)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    return torch.compile(function, fullgraph=True, backend=backend), seen


def test_no_cuda_graph_holds_dropout(kernels: tuple[FeatureForward, FeatureBackward]) -> None:
    """Its pairs are drawn for every run. Without dropout there is nothing that a replay must not repeat."""
    for dropout_p, expected in ((0.0, (FORWARD, BACKWARD)), (0.5, DROPOUT)):
        assert all((torch.Tag.cudagraph_unsafe in op.tags) == (dropout_p > 0) for op in expected)
        graph, ops = noted(lambda *tensors, p=dropout_p: attention(*tensors, dropout_p=p, enable_gqa=True))
        results(graph, inputs())
        assert ops["blocktune"] == set(expected)


def test_flash_attentions_functions_are_one_graph() -> None:
    options: dict[str, Any] = {"causal": True, "window_size": (5, -1), "softcap": 3.0}
    leaves = [tensor.detach().transpose(1, 2).requires_grad_() for tensor in inputs()]
    slopes = torch.rand(4)

    def attend(*tensors: Tensor) -> Any:
        return flash_attn_func(*tensors, alibi_slopes=slopes, **options)

    graph, _ = compiled(attend)
    torch.testing.assert_close(results(graph, leaves), results(attend, leaves))
    packed = [tensor[0].detach().requires_grad_() for tensor in leaves]
    bounds_q, bounds_k = (torch.tensor([0, 4, last], dtype=torch.int32) for last in (20, 24))

    def attend_packed(*tensors: Tensor) -> Any:
        return flash_attn_varlen_func(*tensors, bounds_q, bounds_k, 16, 20, causal=True)

    graph, _ = compiled(attend_packed, dynamic=True)
    torch.testing.assert_close(results(graph, packed), results(attend_packed, packed))


def test_block_masks_are_one_graph(kernels: tuple[FeatureForward, FeatureBackward]) -> None:
    mask = BlockMask(16, 16, torch.tensor([[[[True, False], [True, True]]]]))
    leaves = inputs(32)

    def attend(*tensors: Tensor) -> Tensor:
        return block_sparse_attention(*tensors, mask)

    graph, _ = compiled(attend)
    ours = results(graph, leaves)
    assert kernels[1].launched
    torch.testing.assert_close(ours, results(attend, leaves))


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_call(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attention(query, key, value, is_causal=True, enable_gqa=True)

    lengths = {2: torch.export.Dim("queries", min=2, max=512)}
    example = tuple(tensor.detach() for tensor in inputs())
    program = torch.export.export(Layer(), example, strict=strict, dynamic_shapes=(lengths, None, None))
    assert SDPA in [node.target for node in program.graph.nodes]
    other = [tensor.detach() for tensor in inputs(33)]
    torch.testing.assert_close(program.module()(*other), sdpa(*other, is_causal=True, enable_gqa=True))


def test_what_no_kernel_takes_stays_pytorchs_in_the_graph() -> None:
    leaves = [tensor.detach().double() for tensor in inputs()]
    function, ops = noted(lambda *tensors: attention(*tensors, enable_gqa=True))
    torch.testing.assert_close(function(*leaves), sdpa(*leaves, enable_gqa=True))
    assert "aten" in ops
    assert "blocktune" not in ops


def test_tensors_that_are_more_stay_pytorchs_in_the_graph() -> None:
    leaves = [TwoTensor(tensor.detach(), tensor.detach() * 2) for tensor in inputs()]
    graph, counter = compiled(lambda *tensors: attention(*tensors, enable_gqa=True))
    out = graph(*leaves)
    assert type(out) is TwoTensor
    torch.testing.assert_close(out.b, sdpa(*(leaf.b for leaf in leaves), enable_gqa=True))
    assert "blocktune" not in str(counter.graphs[0].code)
    parameters = [torch.nn.Parameter(tensor.detach()) for tensor in inputs()]
    graph(*parameters)
    assert "blocktune.scaled_dot_product_attention" in str(counter.graphs[1].code)


def test_meta_tensors_have_sizes() -> None:
    query, key, value = (tensor.detach().to("meta") for tensor in inputs())
    assert attention(query, key, value, enable_gqa=True).shape == query.shape
    turned = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    assert flash_attn_func(*turned, softcap=1.0).shape == turned[0].shape


@pytest.mark.few(2)
@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize(("layout", "scale"), [("bhsd", 0.25), ("bshd", 0.5), ("bshd", -0.5), ("bhsd", 0.0)])
def test_calls_without_gradients_are_one_op_with_few_arguments(
    layout: str, scale: float, served: bool, request: pytest.FixtureRequest
) -> None:
    if served:
        request.getfixturevalue("kernels")
    leaves = [leaf.detach() for leaf in inputs(layout=layout, dim_v=8)]
    graph, ops = noted(lambda *tensors: attention(*tensors, is_causal=True, scale=scale, enable_gqa=True))
    expected = sdpa(*(leaf.double() for leaf in leaves), is_causal=True, scale=scale, enable_gqa=True).float()
    torch.testing.assert_close(graph(*leaves), expected, atol=1e-4, rtol=1e-4)
    assert ops["blocktune"] == {PLAIN}
    with torch.no_grad():
        torch.testing.assert_close(graph(*inputs(layout=layout, dim_v=8)), expected, atol=1e-4, rtol=1e-4)
    assert ops["blocktune"] == {PLAIN}
    opcheck(PLAIN, (*leaves, True, abs(scale), True, attention._number))


def test_a_call_in_a_graph_adds_few_guards() -> None:
    """They are checked in every call."""
    explained: list[Any] = []
    leaves = [leaf.detach() for leaf in inputs()]

    def of_ours(name: str) -> bool:
        return "sdpa_arguments" in name or "graphs" in name

    def keep(guards: Any) -> list[bool]:
        explained.append([one.name for one in guards if of_ours(one.name)])
        return [True for _ in guards]

    graph = torch.compile(lambda *tensors: attention(*tensors), backend="aot_eager", options={"guard_filter_fn": keep})
    graph(leaves[0][:, :2], leaves[1], leaves[2])
    (names,) = explained
    assert 0 < len(names) <= 6, names


def test_a_second_derivative_through_a_graph_is_refused() -> None:
    leaves = inputs()
    out = SDPA(*leaves, None, 0.0, False, None, True, attention._number)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(UsageError, match="differentiable once"):
        first.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_layer_trains_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    for module in (obstacles, dispatcher):
        monkeypatch.setattr(module, "KERNEL_DEVICE", "cuda")
    mask = torch.rand(2, 1, 1, 256, device="cuda") > 0.2

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, is_causal=True) + attention(query, key, value, mask)

    def expected(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sdpa(query, key, value, is_causal=True) + sdpa(query, key, value, mask)

    graph = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    for queries in (256, 200) if dynamic else (256,):
        leaves = [
            torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for length in (queries, 256, 256)
        ]
        grad = torch.randn_like(leaves[0])
        out = graph(*leaves)
        got = [out, *torch.autograd.grad(out, leaves, grad)]
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        right = expected(*doubles)
        for one, exact in zip(got, [right, *torch.autograd.grad(right, doubles, grad.double())], strict=True):
            assert (one.double() - exact).norm() <= 1.5e-2 * exact.norm()
    served = [one for one in attention._resolver.plans.values() if getattr(one, "launch", None) is not None]
    assert served
    shapes: list[AttentionShape | None] = [one.explanation.shape for one in served]
    assert {shape.features.label for shape in shapes if shape is not None} == {"", "boolean"}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # one that PyTorch captures to begin its memory pool
def test_a_graph_with_dropout_is_replayed_with_new_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (obstacles, dispatcher):
        monkeypatch.setattr(module, "KERNEL_DEVICE", "cuda")
    query, key, value = torch.randn(3, 2, 4, 128, 64, device="cuda", dtype=torch.bfloat16).unbind()

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """With something before and behind that is captured."""
        return attention(query.sin(), key.cos(), value * 2, dropout_p=0.5) + 1

    graph = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    outputs = [graph(query, key, value).clone() for _ in range(5)]
    assert all(not torch.equal(one, other) for one, other in pairwise(outputs))
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    gradients = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        out = graph(*leaves)
        (grad,) = torch.autograd.grad(out.sum(), leaves[2])
        # linear in the values: the pairs that were dropped going forward were dropped going back
        sums = (one.sum(dtype=torch.double) for one in (grad * leaves[2], out - 1))
        torch.testing.assert_close(*sums, rtol=2e-2, atol=2)
        gradients.append(grad.clone())
    assert all(not torch.equal(one, other) for one, other in pairwise(gradients))
