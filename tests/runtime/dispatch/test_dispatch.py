"""The dispatcher without a GPU equals PyTorch whatever is asked."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.launches.results import empty_output, new_gradients, strides_like
from blocktune.runtime.dispatch.obstacles import call_obstacle, needs_gradients
from blocktune.runtime.selection.ladder import Rung
from tests.support.fakes.dispatch_fakes import ListSource, PlainKernel, pretend_h200, shape_like, tensors

pytestmark = pytest.mark.triton_free

SHAPE = shape_like(32)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> PlainKernel:
    return pretend_h200(monkeypatch)


# --- what the caller sees: PyTorch's function ---


def test_the_signature_is_pytorchs() -> None:
    expected = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    parameters = inspect.signature(attention).parameters
    assert list(parameters) == expected
    assert [parameter.default for parameter in parameters.values()][3:] == [None, 0.0, False, None, False]


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[Tensor], dict[str, Any]]:
    """Arguments of attention as users have them: any layout, alignment, head groups, masks, empty sequences."""
    batch, groups, heads_kv = (draw(st.integers(1, 3)) for _ in range(3))
    seqlen_q, seqlen_k = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    dim, dim_v = draw(st.sampled_from([16, 24, 80])), draw(st.sampled_from([16, 24, 80]))
    made = [
        draw(views(batch, heads, length, width))
        for heads, length, width in (
            (heads_kv * groups, seqlen_q, dim),
            (heads_kv, seqlen_k, dim),
            (heads_kv, seqlen_k, dim_v),
        )
    ]
    options: dict[str, Any] = {"enable_gqa": groups > 1, "scale": draw(st.sampled_from([None, 0.3]))}
    mask = draw(st.sampled_from(["none", "none", "causal", "bool", "float"]))
    if mask == "causal":
        options["is_causal"] = True
    elif mask == "bool":
        options["attn_mask"] = torch.rand(seqlen_q, seqlen_k) > 0.4
    elif mask == "float":
        options["attn_mask"] = torch.randn(seqlen_q, seqlen_k)
    return made, options


@st.composite
def views(draw: st.DrawFn, batch: int, heads: int, length: int, width: int) -> Tensor:
    """A [batch, heads, length, width] view of larger memory in some order of dimensions, perhaps misaligned."""
    order = draw(st.sampled_from([(0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 0, 2)]))
    padding, offset = draw(st.sampled_from([0, 0, 3, 8])), draw(st.sampled_from([0, 0, 1, 4]))
    outer = [(batch, heads, length)[dim] for dim in order]
    memory = torch.randn(outer[0] * outer[1] * outer[2] * (width + padding) + offset)
    view = memory[offset:].view(*outer, width + padding)[..., :width]
    return view.permute(*(order.index(dim) for dim in range(3)), 3)


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Equal values, sizes and strides; the strides of dimensions of size 1 mean nothing."""
    torch.testing.assert_close(got, expected, equal_nan=True)
    meaningful = [dim for dim in range(got.dim()) if got.shape[dim] > 1] if got.numel() else []
    assert [got.stride(dim) for dim in meaningful] == [expected.stride(dim) for dim in meaningful]


@given(call=calls())
@settings(max_examples=60, deadline=None)
def test_on_the_cpu_it_is_pytorchs_attention(call: tuple[list[Tensor], dict[str, Any]]) -> None:
    arguments, options = call
    assert_same(attention(*arguments, **options), scaled_dot_product_attention(*arguments, **options))


def test_with_a_kernel_it_is_pytorchs_attention_too(kernel: PlainKernel) -> None:
    dispatcher = Dispatcher(ListSource())

    @given(call=calls())
    @settings(max_examples=100, deadline=None)
    def check(call: tuple[list[Tensor], dict[str, Any]]) -> None:
        arguments, options = call
        got = dispatcher(*arguments, **options)
        torch.testing.assert_close(got, scaled_dot_product_attention(*arguments, **options), equal_nan=True)
        if arguments[0].shape == got.shape and dispatcher.explain(*arguments, **options).rung is not Rung.SDPA:
            assert got.stride() == torch.empty_like(arguments[0]).stride()

    check()
    assert kernel.launched


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("head_dim_v", [64, 32])
def test_the_output_has_the_dimension_order_of_the_query(kernel: PlainKernel, layout: str, head_dim_v: int) -> None:
    query, key, value = tensors(shape_like(32, head_dim_v=head_dim_v), layout=layout)
    got = Dispatcher(ListSource())(query, key, value)
    assert kernel.launched
    order = sorted(range(4), key=query.stride().__getitem__)
    assert got.shape == (*query.shape[:3], head_dim_v)
    assert sorted(range(4), key=got.stride().__getitem__) == order
    assert got.untyped_storage().nbytes() == got.numel() * got.element_size()


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=5), data=st.data())
@settings(max_examples=100, deadline=None)
def test_strides_like_is_what_empty_like_gives_dense_tensors(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    dense = torch.empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    got = strides_like(dense.stride(), shape)
    large = [dim for dim, size in enumerate(shape) if size > 1]
    assert [got[dim] for dim in large] == [dense.stride(dim) for dim in large]


def test_a_broadcast_dimension_comes_last_in_memory() -> None:
    assert strides_like((0, 64, 256, 1), (2, 4, 8, 16)) == (512, 16, 64, 1)


def windows(rows: int, dim: int) -> torch.Tensor:
    """[1, 2, rows, dim] of a signal: neighbouring rows share all elements but one."""
    return torch.randn(1, 2, rows + dim).unfold(2, dim, 1)[:, :, :rows]


@pytest.mark.parametrize("head_dim_v", [8, 16])
@pytest.mark.parametrize("rows", [3, 30])
def test_elements_of_a_row_stay_next_to_each_other_where_rows_overlap(rows: int, head_dim_v: int) -> None:
    """Kernels write them next to each other; `torch.empty_like` puts them apart where there are fewer rows."""
    query = windows(rows, 16)
    assert query.stride()[2:] == (1, 1)
    assert empty_output(query, head_dim_v).stride()[2:] == (head_dim_v, 1)
    gradients = new_gradients(query, query[:, :1], query[:, :1], packed=False)
    assert [gradient.stride()[2:] for gradient in gradients] == [(16, 1)] * 3


def test_wrong_arguments_raise_as_in_pytorch(kernel: PlainKernel) -> None:
    query, key, value = tensors(SHAPE)
    for wrong in ([query, key[:, :3], value], [query, key.half(), value], [query, key[..., :32], value]):
        with pytest.raises((RuntimeError, ValueError)) as expected:
            scaled_dot_product_attention(*wrong)
        with pytest.raises(type(expected.value)):
            Dispatcher(ListSource())(*wrong)


# --- what goes to PyTorch, and says so ---

OBSTACLES: list[tuple[str, Callable[[Tensor], dict[str, Any]]]] = [
    ("with boolean", lambda query: {"attn_mask": torch.ones(32, 32, dtype=torch.bool)}),
    ("with dropout", lambda query: {"dropout_p": 0.5}),
    ("gradients", lambda query: {"query": query.requires_grad_()}),
    ("no plain tensor", lambda query: {"query": torch.nn.Parameter(query, requires_grad=False)}),
]


@pytest.mark.parametrize(("reason", "change"), OBSTACLES, ids=[reason for reason, _ in OBSTACLES])
def test_a_call_that_the_kernels_do_not_run_is_explained(
    kernel: PlainKernel, reason: str, change: Callable[[Tensor], dict[str, Any]]
) -> None:
    query, key, value = tensors(SHAPE)
    arguments = {"query": query, "key": key, "value": value} | change(query)
    dispatcher = Dispatcher(ListSource())
    torch.manual_seed(0)
    got = dispatcher(**arguments)
    torch.manual_seed(0)
    torch.testing.assert_close(got, scaled_dot_product_attention(**arguments))
    explanation = dispatcher.explain(**arguments)
    assert (explanation.rung, kernel.launched) == (Rung.SDPA, [])
    assert reason in explanation.reason


LAYOUTS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("data type", lambda tensor: tensor.double()),
    ("four dimensions", lambda tensor: tensor[0]),
    ("four dimensions", lambda tensor: tensor[None]),
    ("last dimension", lambda tensor: tensor.transpose(2, 3).contiguous().transpose(2, 3)),
    ("empty", lambda tensor: tensor[:, :, :0]),
    ("no config", lambda tensor: torch.cat([tensor] * 4, -1)),
]


@pytest.mark.parametrize(("reason", "change"), LAYOUTS)
def test_tensors_that_the_kernels_do_not_take_are_explained(
    kernel: PlainKernel, reason: str, change: Callable[[Tensor], Tensor]
) -> None:
    arguments = [change(tensor) for tensor in tensors(SHAPE)]
    dispatcher = Dispatcher(ListSource())
    torch.testing.assert_close(dispatcher(*arguments), scaled_dot_product_attention(*arguments))
    explanation = dispatcher.explain(*arguments)
    assert (explanation.rung, kernel.launched) == (Rung.SDPA, [])
    assert reason in explanation.reason


def test_grouped_heads_need_the_flag(kernel: PlainKernel) -> None:
    arguments = tensors(shape_like(32, num_heads_kv=2))
    dispatcher = Dispatcher(ListSource())
    with pytest.raises(RuntimeError):
        dispatcher(*arguments)
    assert "enable_gqa" in dispatcher.explain(*arguments).reason
    dispatcher(*arguments, enable_gqa=True)
    assert kernel.launched


def test_cpu_tensors_are_explained() -> None:
    explanation = attention.explain(*tensors(SHAPE))
    assert explanation.rung is Rung.SDPA
    assert "cuda" in explanation.reason


def test_gradients_flow_and_no_grad_uses_the_kernel(kernel: PlainKernel) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tensors(SHAPE))
    dispatcher = Dispatcher(ListSource())
    dispatcher(query, key, value).sum().backward()
    assert query.grad is not None
    assert kernel.launched == []
    with torch.no_grad():
        dispatcher(query, key, value)
    assert kernel.launched


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # PyTorch's own, from 2.14
def test_tracing_sees_pytorchs_attention(kernel: PlainKernel) -> None:
    query, key, value = tensors(SHAPE)
    dispatcher = Dispatcher(ListSource())
    graph = make_fx(dispatcher)(query, key, value)
    assert "scaled_dot_product" in graph.code
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(NotImplementedError, match="forward AD"):  # PyTorch has none here; a kernel would drop it
            dispatcher(dual, key, value)
    expected = scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(torch.vmap(dispatcher)(query, key, value), expected)
    traced = torch.jit.trace(lambda q: dispatcher(q, key, value), (query,), check_trace=False)
    torch.testing.assert_close(traced(query * 2), scaled_dot_product_attention(query * 2, key, value))
    assert kernel.launched == []


def test_autocast_converts_as_for_pytorch(kernel: PlainKernel) -> None:
    arguments = tensors(SHAPE)
    dispatcher = Dispatcher(ListSource())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = dispatcher(*arguments)
        explanation = dispatcher.explain(*arguments)
        torch.testing.assert_close(got, scaled_dot_product_attention(*arguments), atol=2e-2, rtol=2e-2)
    assert explanation.shape is not None
    assert (got.dtype, explanation.shape.dtype) == (torch.bfloat16, "bfloat16")
    assert kernel.launched
    with torch.autocast("cpu", dtype=torch.bfloat16):
        doubles = [tensor.double() for tensor in arguments]
        assert dispatcher(*doubles).dtype == scaled_dot_product_attention(*doubles).dtype == torch.float64


def test_tensors_without_strides_raise_as_in_pytorch() -> None:
    sparse = torch.eye(16).to_sparse()[None, None]
    with pytest.raises(RuntimeError):
        attention(sparse, sparse, sparse)
    assert "no strides" in attention.explain(sparse, sparse, sparse).reason
    with pytest.raises(UsageError, match="key or value is missing"):
        attention.explain(torch.eye(16))


def test_the_long_question_knows_what_the_short_one_refuses() -> None:
    query, key, value = tensors(SHAPE)
    assert call_obstacle(query, key, value) is None
    for change in [change for _, change in OBSTACLES[3:]]:
        changed = {"query": query, "key": key, "value": value} | change(query.clone())
        assert call_obstacle(**changed) is not None or needs_gradients(*changed.values())
