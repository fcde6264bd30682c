"""On a GPU: wrong and unusual calls end as PyTorch's do, and transforms of `attention` are PyTorch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.torch_attention import scaled_dot_product_attention as pytorchs
from tests.runtime.dispatch.wrong import test_transforms as transforms
from tests.runtime.dispatch.wrong import test_wrong_calls as calls

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAMES = sorted(calls.CALLS.keys() - {"a mask with no dimension", "no heads of keys"})
"""All but those with which PyTorch's fused backends end the CUDA context or the process."""


def moved(value: Any) -> Any:
    """A value with its tensors on the GPU; those without memory, and gradients that are wanted, stay as they are."""
    if isinstance(value, Tensor) and not value.is_meta:
        return value.detach().to(DEVICE).requires_grad_(value.requires_grad)
    if isinstance(value, tuple):
        return tuple(map(moved, value))
    if isinstance(value, dict):
        return {name: moved(each) for name, each in value.items()}
    return value


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[calls.Answer, calls.Answer]]:
    """Our answer and PyTorch's to a call on the GPU, by its name."""

    def both(name: str) -> tuple[calls.Answer, calls.Answer]:
        monkeypatch.setitem(calls.CALLS, name, moved(calls.CALLS[name]))
        return calls.answer(Dispatcher(), calls.CALLS[name]), calls.theirs(name)

    return both


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_call_ends_as_pytorchs_does(
    name: str, answers: Callable[[str], tuple[calls.Answer, calls.Answer]]
) -> None:
    on_cpu = calls.theirs(name)
    ours, theirs = answers(name)
    if isinstance(theirs, Tensor) and isinstance(on_cpu, BaseException) and not isinstance(ours, Tensor):
        theirs = on_cpu  # some of PyTorch's fused backends look at neither the shares to drop nor the mask's dimensions
    if isinstance(theirs, BaseException):
        assert isinstance(ours, type(theirs)), f"ours {ours!r:.300}; PyTorch {theirs!r:.300}"
        return
    assert isinstance(ours, Tensor), f"ours {ours!r:.300}; PyTorch computes it"
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented")
@pytest.mark.parametrize(("transformed", "arguments"), transforms.CASES)
def test_a_transform_is_pytorchs(
    monkeypatch: pytest.MonkeyPatch,
    transformed: Callable[[transforms.Attention], transforms.Transformed],
    arguments: tuple[Tensor, ...],
) -> None:
    for name in ("Q", "K", "SEEN", "ADDED", "KEYS"):
        monkeypatch.setattr(transforms, name, moved(getattr(transforms, name)))
    given = moved(arguments)
    ours = transformed(Dispatcher())(*given)
    with sdpa_kernel(SDPBackend.MATH):  # the fused backends lose the batch of a mask
        theirs = transformed(pytorchs)(*given)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("added", [False, True], ids=["boolean", "added"])
@pytest.mark.parametrize("heads_kv", [1, 3])
def test_a_mask_and_the_diagonal_are_refused_or_computed_as_by_pytorch(heads_kv: int, added: bool) -> None:
    """cuDNN, which is left out of masked calls, is alone in taking both with grouped heads."""
    query = torch.randn(2, 3, 17, 96, dtype=torch.bfloat16, device=DEVICE)
    key, value = torch.randn(2, 2, heads_kv, 40, 96, dtype=torch.bfloat16, device=DEVICE)
    seen = torch.rand(17, 40, device=DEVICE) > 0.5
    seen[:, 0] = True
    mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, float("-inf")) if added else seen
    options = {"attn_mask": mask, "is_causal": True, "enable_gqa": heads_kv == 1}
    theirs = calls.answer(pytorchs, ((query, key, value), options))
    ours = calls.answer(Dispatcher(), ((query, key, value), options))
    if isinstance(theirs, BaseException):
        assert isinstance(ours, type(theirs))
        return
    wide = [tensor.double().expand(2, 3, -1, -1) for tensor in (query, key, value)]
    wanted = pytorchs(*wide, attn_mask=seen & torch.ones_like(seen).tril())
    assert isinstance(ours, Tensor), f"ours {ours!r:.300}; PyTorch computes it"
    torch.testing.assert_close(ours.double(), wanted, rtol=3e-2, atol=3e-2)
