"""Wrong calls of `attention` are answered as by the installed PyTorch: an error of its type, or the same values.

The calls are made where our kernels are out of reach, where they would serve them, where they have served others of the
same kind, and on the way through PyTorch that its fused backends need. Fakes stand for a GPU in the last three.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from blocktune.kernels import registry
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.dispatch import dispatcher as dispatch
from blocktune.runtime.dispatch import obstacles, resolver, torch_attention
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.torch_attention import scaled_dot_product_attention as pytorchs
from blocktune.runtime.selection.ladder import Rung
from tests.support.fakes.dispatch_fakes import H200, ListSource
from tests.support.fakes.feature_fakes import FeatureBackward, FeatureForward

pytestmark = pytest.mark.triton_free

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
Call = tuple[tuple[Any, ...], dict[str, Any]]
Answer = Tensor | BaseException

torch.manual_seed(0)
Q, K, GROUPED = torch.randn(2, 4, 20, 16), torch.randn(2, 4, 24, 16), torch.randn(2, 2, 24, 16)
HALVES = Q.half(), K.half(), K.half()
SEEN = torch.rand(20, 24) > 0.3
ADDED = torch.randn(20, 24)


def masks(*sizes: int, dtype: torch.dtype = torch.bool) -> dict[str, Any]:
    return {"attn_mask": torch.ones(sizes, dtype=dtype)}


OPTIONS: dict[str, dict[str, Any]] = {
    "a mask and is_causal": {"attn_mask": SEEN, "is_causal": True},
    "an added mask and is_causal": {"attn_mask": ADDED, "is_causal": True},
    "a mask, is_causal and dropout": {"attn_mask": SEEN, "is_causal": True, "dropout_p": 1.0},
    "a mask of integers": masks(20, 24, dtype=torch.int32),
    "a mask of bytes": masks(20, 24, dtype=torch.uint8),
    "a mask of complex numbers": masks(20, 24, dtype=torch.complex64),
    "a mask in half": masks(20, 24, dtype=torch.float16),
    "a mask in double": masks(20, 24, dtype=torch.float64),
    "a mask with no dimension": masks(),
    "a mask with one dimension": masks(24),
    "an added mask with one dimension": masks(24, dtype=torch.float32),
    "a mask with one dimension of another size": masks(25, dtype=torch.float32),
    "a mask with five dimensions": masks(1, 2, 4, 20, 24),
    "a mask of other keys": masks(20, 25),
    "a mask of other queries": masks(21, 24),
    "a mask of another batch": masks(3, 1, 20, 24),
    "a mask of other heads": masks(1, 3, 20, 24),
    "a mask of no keys": masks(20, 0),
    "a sparse mask": {"attn_mask": ADDED.to_sparse()},
    "a mask that is a list": {"attn_mask": [True]},
    "a mask that is an array": {"attn_mask": SEEN.numpy()},
    "dropout -0.1": {"dropout_p": -0.1},
    "dropout 1.5": {"dropout_p": 1.5},
    "dropout nan": {"dropout_p": float("nan")},
    "dropout inf": {"dropout_p": float("inf")},
    "dropout 1.0": {"dropout_p": 1.0},
    "dropout True": {"dropout_p": True},
    "dropout False": {"dropout_p": False},
    "dropout 0": {"dropout_p": 0},
    "dropout None": {"dropout_p": None},
    "dropout '0.1'": {"dropout_p": "0.1"},
    "dropout ''": {"dropout_p": ""},
    "dropout []": {"dropout_p": []},
    "dropout 1j": {"dropout_p": 1j},
    "dropout of NumPy": {"dropout_p": np.float32(0.0)},
    "dropout in a tensor": {"dropout_p": torch.tensor(0.0)},
    "is_causal None": {"is_causal": None},
    "is_causal 1": {"is_causal": 1},
    "is_causal 0": {"is_causal": 0},
    "is_causal 1.0": {"is_causal": 1.0},
    "is_causal 'x'": {"is_causal": "x"},
    "is_causal in a tensor": {"is_causal": torch.tensor(True)},
    "is_causal of NumPy": {"is_causal": np.bool_(True)},
    "enable_gqa None": {"enable_gqa": None},
    "enable_gqa 1": {"enable_gqa": 1},
    "enable_gqa 'x'": {"enable_gqa": "x"},
    "scale 'x'": {"scale": "x"},
    "scale 2": {"scale": 2},
    "scale True": {"scale": True},
    "scale 1j": {"scale": 1j},
    "scale [1.0]": {"scale": [1.0]},
    "scale of NumPy": {"scale": np.float32(0.5)},
    "scale of NumPy in double": {"scale": np.float64(0.5)},
    "scale in a tensor": {"scale": torch.tensor(0.5)},
    "scale in a tensor of one dimension": {"scale": torch.tensor([0.5])},
    "scale in a tensor of two": {"scale": torch.tensor([0.5, 1.0])},
    "scale that requires a gradient": {"scale": torch.tensor(0.5, requires_grad=True)},
    "scale nan": {"scale": float("nan")},
    "scale 0": {"scale": 0},
    "a keyword with a slip": {"casual": True},
    "a keyword of another function": {"mask": None},
    "the query twice": {"query": Q},
}
"""Options of a call whose tensors fit."""

TENSORS: dict[str, Call] = {
    "no arguments": ((), {}),
    "no value": ((Q, K), {}),
    "scale by position": ((Q, K, K, None, 0.0, False, 0.5), {}),
    "an array": ((Q.numpy(), K, K), {}),
    "None": ((Q, None, K), {}),
    "a list": ((Q, K, [1.0]), {}),
    "numbers": ((Q[0, 0, 0, 0], K[0, 0, 0, 0], K[0, 0, 0, 0]), {}),
    "vectors": ((Q[0, 0, 0], K[0, 0, 0], K[0, 0, 0]), {}),
    "vectors and a mask": ((Q[0, 0, 0], K[0, 0, 0], K[0, 0, 0]), masks(20, 24)),
    "a query with one dimension": ((Q[0, 0, 0], K, K), {}),
    "a query with one dimension and a mask": ((Q[0, 0, 0], K, K), masks(20, 24)),
    "a key with one dimension": ((Q, K[0, 0, 0], K), {}),
    "a value with one dimension": ((Q, K, K[0, 0, 0]), {}),
    "two dimensions": ((Q[0, 0], K[0, 0], K[0, 0]), {}),
    "two dimensions and a mask of four": ((Q[0, 0], K[0, 0], K[0, 0]), masks(1, 1, 20, 24)),
    "a query with two dimensions": ((Q[0, 0], K, K), {}),
    "a query with two dimensions and a mask of four": ((Q[0, 0], K, K), masks(2, 4, 20, 24, dtype=torch.float32)),
    "a key with three dimensions and a mask of four": ((Q, K[0], K[0]), masks(2, 4, 20, 24)),
    "five dimensions": ((Q[None], K[None], K[None]), masks(1, 2, 4, 20, 24)),
    "five dimensions and a mask of six": ((Q[None], K[None], K[None]), masks(1, 1, 2, 4, 20, 24)),
    "a query in half": ((Q.half(), K, K), {}),
    "a key in half": ((Q, K.half(), K), {}),
    "a value in double": ((Q, K, K.double()), {}),
    "a key of integers": ((Q, K.int(), K), {}),
    "a query in half and a mask": ((Q.half(), K, K), {"attn_mask": ADDED}),
    "a key in bfloat16 and a mask": ((Q.half(), K.bfloat16(), K.half()), {"attn_mask": ADDED}),
    "integers": ((Q.int(), K.int(), K.int()), {}),
    "integers and a mask": ((Q.int(), K.int(), K.int()), {"attn_mask": ADDED}),
    "long integers and a mask that requires a gradient": (
        (Q.long(), K.long(), K.long()),
        {"attn_mask": ADDED.clone().requires_grad_()},
    ),
    "booleans": ((Q > 0, K > 0, K > 0), {}),
    "8-bit numbers and a mask": (tuple(t.to(torch.float8_e4m3fn) for t in (Q, K, K)), {"attn_mask": ADDED}),
    "complex numbers": ((Q.cfloat(), K.cfloat(), K.cfloat()), {}),
    "halves and a mask in bfloat16": (HALVES, {"attn_mask": ADDED.bfloat16()}),
    "halves and a mask in float32": (HALVES, {"attn_mask": ADDED}),
    "floats and a mask in half that requires a gradient": ((Q, K, K), {"attn_mask": ADDED.half().requires_grad_()}),
    "a mask with one dimension that requires a gradient": (
        (Q, K, K),
        {"attn_mask": torch.ones(25, requires_grad=True)},
    ),
    "a query without memory": ((Q.to("meta"), K, K), {}),
    "a key without memory": ((Q, K.to("meta"), K), {}),
    "a value without memory": ((Q, K, K.to("meta")), {}),
    "nothing with memory": ((Q.to("meta"), K.to("meta"), K.to("meta")), {}),
    "a sparse query": ((Q.to_sparse(), K, K), {}),
    "one batch entry of keys": ((Q, K[:1], K[:1]), {}),
    "another batch of keys": ((Q, K[:1].expand(3, -1, -1, -1), K), {}),
    "another batch of keys and values": ((Q, K.repeat(2, 1, 1, 1), K.repeat(2, 1, 1, 1)), masks(2, 1, 20, 24)),
    "other heads": ((Q, K[:, :3], K[:, :3]), {}),
    "one head of keys": ((Q, K[:, :1], K[:, :1]), {}),
    "grouped heads": ((Q, GROUPED, GROUPED), {}),
    "grouped heads with leave": ((Q, GROUPED, GROUPED), {"enable_gqa": True}),
    "heads that do not divide": ((Q, K[:, :3], K[:, :3]), {"enable_gqa": True}),
    "more heads of keys": ((Q[:, :2], K, K), {"enable_gqa": True}),
    "heads of values that are others": ((Q, GROUPED, K[:, :1]), {"enable_gqa": True}),
    "no heads of keys": ((Q, K[:, :0], K[:, :0]), {"enable_gqa": True}),
    "a mask of other heads for groups": ((Q, GROUPED, GROUPED), {"enable_gqa": True} | masks(1, 2, 20, 24)),
    "another length of values": ((Q, K, K[:, :, :20]), {}),
    "another dimension of keys": ((Q, K[..., :8], K), {}),
    "another dimension of values": ((Q, K, K[..., :8]), {}),
    "no queries": ((Q[:, :, :0], K, K), {}),
    "no keys": ((Q, K[:, :, :0], K[:, :, :0]), {}),
    "no batch": ((Q[:0], K[:0], K[:0]), {}),
}
"""Calls whose tensors are wrong or unusual."""
if TORCH < (2, 13):
    del TENSORS["no heads of keys"]  # PyTorch 2.11 divides by their number, which ends the process

CALLS: dict[str, Call] = {name: ((Q, K, K), options) for name, options in OPTIONS.items()} | TENSORS


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """The CPU as an H200 whose kernels serve masks and dropout, forward and backward."""
    kernels = FeatureForward(), FeatureBackward()
    monkeypatch.setattr(registry, "KERNELS", {kernel.name: kernel for kernel in kernels})
    for module in (obstacles, dispatch):
        monkeypatch.setattr(module, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: H200)
    return Dispatcher(ListSource())


def answer(attention: Callable[..., Tensor], call: Call, *, gradients: bool = False) -> Answer:
    """The output, or what is raised."""
    arguments, options = call
    if gradients:
        arguments = tuple(_recorded(argument) for argument in arguments)
    try:
        return attention(*arguments, **options)
    except Exception as error:
        return error


def theirs(name: str, *, gradients: bool = False) -> Answer:
    """PyTorch's answer. Its fused backend reads past the end of a value with fewer keys, its mathematics raise."""
    with sdpa_kernel(SDPBackend.MATH) if name == "another length of values" else nullcontext():
        return answer(pytorchs, CALLS[name], gradients=gradients)


def _recorded(argument: Any) -> Any:
    differentiable = isinstance(argument, Tensor) and (argument.is_floating_point() or argument.is_complex())
    return argument.detach().clone().requires_grad_() if differentiable else argument


def assert_same(ours: Answer, theirs: Answer) -> None:
    if isinstance(theirs, BaseException):
        assert isinstance(ours, type(theirs)), f"ours {ours!r:.300}; PyTorch {theirs!r:.300}"
        return
    assert isinstance(ours, Tensor), f"ours {ours!r:.300}; PyTorch computes it"
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    if not ours.is_meta:
        bound = 1e-5 if ours.dtype in (torch.float32, torch.float64) else 5e-3
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_on_the_cpu(name: str) -> None:
    assert_same(answer(Dispatcher(ListSource()), CALLS[name]), theirs(name))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_before_our_kernels(monkeypatch: pytest.MonkeyPatch, name: str, gradients: bool) -> None:
    ours = answer(pretend_gpu(monkeypatch), CALLS[name], gradients=gradients)
    assert_same(ours, theirs(name, gradients=gradients))


@pytest.mark.parametrize("name", CALLS)
def test_on_the_way_through_pytorchs_fused_backends(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch_attention, "FUSED_DEVICE", "cpu")
    assert_same(answer(Dispatcher(ListSource()), CALLS[name]), theirs(name))


@pytest.mark.few(20)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_with_plans_for_the_tensors(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """The short way to a plan compares the options: what equals a bool or is false like 0.0 must not take it."""
    dispatcher, call = pretend_gpu(monkeypatch), ((Q, K, K), options)
    for _ in range(3):
        for known in ({}, {"is_causal": True}, {"enable_gqa": True}):
            assert_same(dispatcher(Q, K, K, **known), pytorchs(Q, K, K, **known))
    assert_same(answer(dispatcher, call), answer(pytorchs, call))
    assert_same(dispatcher(Q, K, K, is_causal=True), pytorchs(Q, K, K, is_causal=True))


@pytest.mark.parametrize("wrong", [1, 0, np.bool_(True)])
def test_a_wrong_option_leaves_no_plan_that_a_right_one_would_miss(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    dispatcher = pretend_gpu(monkeypatch)
    dispatcher(Q, K, K, is_causal=bool(wrong))
    with pytest.raises(TypeError):
        dispatcher(Q, K, K, is_causal=wrong)
    dispatcher(Q, K, K, is_causal=bool(wrong))
    options = ("scaled_dot_product_attention", 3, 0.0, bool(wrong), None, False)
    assert dispatcher.resolver.fast_path.find(options, (Q, K, K)) is not None


def test_explaining_such_a_call_says_who_answers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = pretend_gpu(monkeypatch)
    for options, reason in (
        ({"attn_mask": SEEN, "is_causal": True}, "attn_mask and is_causal are given together"),
        ({"dropout_p": 1.0}, "all pairs are dropped"),
        ({"scale": torch.tensor(0.5)}, "another type than in PyTorch's signature"),
        ({"attn_mask": ADDED.to_sparse()}, "attn_mask has no strides"),
    ):
        explanation = dispatcher.explain(Q, K, K, **options)  # type: ignore[arg-type]
        assert (explanation.rung, reason in explanation.reason) == (Rung.SDPA, True)


def test_a_refusal_says_the_rule_the_value_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = pretend_gpu(monkeypatch)
    for options in ({"dropout_p": 1.5}, masks(24), masks(3, 1, 20, 24), masks(20, 24, dtype=torch.int32)):
        with pytest.raises(UsageError, match=r"must .*, but got .*\. [A-Z]\w+ .*\."):
            dispatcher(Q, K, K, **options)
