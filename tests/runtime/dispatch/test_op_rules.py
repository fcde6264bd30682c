"""Our ops as PyTorch checks them: their schemas, fakes and formulas of autograd, and the sizes of what they return."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.nn.functional import scaled_dot_product_attention as sdpa

from blocktune import attention
from blocktune.runtime.dispatch.graphs.graph_call import TENSORS, GraphCall
from tests.runtime.dispatch.test_ops import BACKWARD, CALL, DROPOUT, FORWARD, SDPA, inputs, kernels, traced_on_the_cpu

pytestmark = pytest.mark.triton_free

__all__ = ["kernels", "traced_on_the_cpu"]  # fixtures

OPTIONS: dict[str, Any] = {
    "causal": "none", "scale": 0.25, "window": (-1, -1), "softcap": 0.0, "dropout_p": 0.0, "deterministic": False,
    "page_size": 0, "block_sizes": (0, 0), "num_splits": 0,
}  # fmt: skip


def asked(**changes: Any) -> list[Any]:
    """The arguments of an op behind query, key and value, or behind the results."""
    tensors = {name: changes[name] for name in TENSORS if name in changes}
    options = OPTIONS | {name: value for name, value in changes.items() if name not in TENSORS}
    call = GraphCall(dispatcher=attention._number, lse=True, tensors=tuple(tensors), **options)
    return [list(tensors.values()), None, call.text]


def asked_of_a_call(**changes: Any) -> list[Any]:
    """The arguments of `attention_call` behind query, key and value."""
    given = OPTIONS | dict.fromkeys(TENSORS[:-1]) | {name: changes[name] for name in changes if name != "drawn"}
    return [True, attention._number, None, *given.values()]


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("bhsd", {}),
    ("bshd", {"causal": "upper_left"}),
    ("bshd", {"mask": torch.rand(1, 1, 20, 24) > 0.2}),
    ("bhsd", {"dropout_p": 0.3, "drawn": torch.tensor([5, 6])}),
    ("bshd", {"window": [4, 3], "softcap": 2.0, "alibi_slopes": torch.rand(1, 4)}),
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck's own, in torch 2.15
@pytest.mark.few(2)
@pytest.mark.parametrize(("layout", "changes"), [*CALLS, ("bshd", {"sinks": torch.rand(4)})])
def test_the_ops_keep_the_rules(layout: str, changes: dict[str, Any]) -> None:
    leaves = inputs(layout=layout, dim_v=8)
    tensors, arguments = [leaf.detach() for leaf in leaves], asked(**changes)
    forward, backward = DROPOUT if "drawn" in changes else (FORWARD, BACKWARD)
    opcheck(forward, (*tensors, *arguments))
    out, lse = forward(*tensors, *arguments)
    opcheck(backward, (*tensors, out, lse, torch.randn_like(out), None, *arguments))
    opcheck(backward, (*tensors, out, lse, torch.zeros_like(out), lse, *arguments))
    if "drawn" not in changes:  # else each call draws its own pairs
        opcheck(CALL, (*leaves, *asked_of_a_call(**changes)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck's own, in torch 2.15
@pytest.mark.parametrize("options", [(None, 0.0, True), (torch.rand(20, 24) > 0.2, 0.0, False)], ids=["plain", "mask"])
def test_pytorchs_signature_keeps_the_rules(options: tuple[Any, ...]) -> None:
    arguments = *options, None, True, attention._number
    for leaves in (inputs(), [leaf.detach() for leaf in inputs()]):
        opcheck(SDPA, (*leaves, *arguments))
        torch.testing.assert_close(SDPA(*leaves, *arguments), sdpa(*leaves, *options, enable_gqa=True))


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize(("layout", "changes"), CALLS)
def test_fakes_have_the_sizes_and_strides_of_results(
    layout: str, changes: dict[str, Any], served: bool, request: pytest.FixtureRequest
) -> None:
    if served:
        request.getfixturevalue("kernels")
    leaves, arguments = [leaf.detach() for leaf in inputs(layout=layout, dim_v=8)], asked(**changes)
    real = FORWARD(*leaves, *arguments)
    gradients = BACKWARD(*leaves, *real, torch.randn_like(real[0]), None, *arguments)
    mode = FakeTensorMode()
    with mode:
        fake_leaves = [mode.from_tensor(leaf) for leaf in leaves]
        given = [[mode.from_tensor(tensor) for tensor in arguments[0]], *arguments[1:]]
        fakes = FORWARD(*fake_leaves, *given)
        fake_gradients = BACKWARD(*fake_leaves, *fakes, fakes[0], None, *given)
    for fake, result in zip((*fakes, *fake_gradients), (*real, *gradients), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (result.shape, result.stride(), result.dtype)
