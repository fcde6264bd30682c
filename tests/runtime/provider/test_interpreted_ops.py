"""The portable kernels under PyTorch's ops, in Triton's interpreter, against float64: outputs, gradients, pages."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.dispatch import obstacles, resolver
from tests.support.attention.varlen_options import GROUPS, TAKES_GROUPS, takes_pages
from tests.support.fakes.provider_fakes import Standins, provided
from tests.support.triton_modes import INTERPRETED

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not INTERPRETED, reason="the kernels run in Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow encountered|invalid value|divide by zero):RuntimeWarning"),
]

BOUND = 3e-3
"""Relative Frobenius error of float16."""


@pytest.fixture(autouse=True)
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standins]:
    """PyTorch's kernels, none of which is called."""
    monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: device_named("h200"))
    made = Standins()
    with provided(made):
        yield made
    assert made.calls == []


def random(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float16)


def check(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, right in zip(found, wanted, strict=True):
        assert (one.detach().double() - right).norm() <= BOUND * right.norm()


def with_gradients(out: Tensor, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, tensors, grad.to(out.dtype))]


@pytest.mark.parametrize("op", ["flash", "cudnn"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_dense_ops(op: str, is_masked: bool) -> None:
    torch.manual_seed(0)
    tensors = [random(1, 40, heads, 32).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    mask, grad = random(1, 4, 40, 40) if is_masked else None, random(1, 4, 40, 32)
    if op == "flash":
        mask = None
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*tensors, 0.0, not is_masked)
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*tensors, mask, True, 0.0, not is_masked)
    bias = torch.zeros(40, 40).double() if mask is None else mask.double()
    if not is_masked:
        bias = bias.masked_fill(~torch.ones(40, 40).bool().tril(), float("-inf"))
    wanted = scaled_dot_product_attention(*doubles, bias, enable_gqa=True)
    check(with_gradients(out, tensors, grad), with_gradients(wanted, doubles, grad))
    scores = doubles[0] @ doubles[1].repeat_interleave(2, 1).mT * 32**-0.5 + bias
    torch.testing.assert_close(lse.flatten(2).double(), scores.logsumexp(-1), rtol=1e-3, atol=1e-3)


LENGTHS = (7, 1, 20)


def bounds(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def test_packed_sequences() -> None:
    torch.manual_seed(0)
    heads_kv = 2 if TAKES_GROUPS else 4
    tensors = [random(sum(LENGTHS), heads, 32).requires_grad_() for heads in (4, heads_kv, heads_kv)]
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    begins, grad = bounds(LENGTHS), random(sum(LENGTHS), 4, 32)
    out = varlen_attn(*tensors, begins, begins, 20, 20, window_size=(-1, 0), **GROUPS)
    parts = zip(*(tensor.split(LENGTHS) for tensor in doubles), strict=True)
    wanted = torch.cat([causal(*part) for part in parts])
    check(with_gradients(out, tensors, grad), with_gradients(wanted, doubles, grad))


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one sequence [length, heads, dim], causal from the lower right."""
    seen = torch.ones(len(query), len(key)).bool().tril(len(key) - len(query))
    turned = (one.transpose(0, 1)[None] for one in (query, key, value))
    return scaled_dot_product_attention(*turned, seen, enable_gqa=True)[0].transpose(0, 1)


@takes_pages
@pytest.mark.parametrize("queries", [(1, 3), (40, 2)])
def test_pages(queries: tuple[int, int]) -> None:
    torch.manual_seed(0)
    used, table = (50, 41), torch.randperm(8).int().view(2, 4)
    query, keys, values = random(sum(queries), 4, 32), random(8, 16, 2, 32), random(8, 16, 2, 32)
    out, lse = varlen_attn(
        query, keys, values, bounds(queries), None, max(queries), 64,
        window_size=(-1, 0), enable_gqa=True, seqused_k=torch.tensor(used, dtype=torch.int32), block_table=table,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    wanted = [
        causal(own, *(pages[row.long()].flatten(0, 1)[:count].double() for pages in (keys, values)))
        for own, row, count in zip(query.double().split(queries), table, used, strict=True)
    ]
    check([out], [torch.cat(wanted)])
    assert lse.shape == (4, sum(queries))
