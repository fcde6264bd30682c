"""Batches of `generate_batch` by the portable kernels, in Triton's interpreter, against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.api.hugging_face.packed_batches import PackedBatch, attend_batch
from blocktune.runtime.dispatch import obstacles, resolver, torch_math
from blocktune.runtime.dispatch.dispatcher import attention
from tests.support.triton_modes import INTERPRETED

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not INTERPRETED, reason="the kernels run in Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow encountered|invalid value|divide by zero):RuntimeWarning"),
]

HEADS, HEADS_KV, DIM, PAGE = 4, 2, 32, 16
SINKS = torch.tensor([-1.0, 0.5, 2.0, 0.0])


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch computes nothing; the kernels for Hopper leave all to portable ones in the interpreter."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        pytest.fail("no kernel served the call")

    monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: device_named("h200"))
    for name in ("_attend_cache", "_attend_dense", "_attend_packed"):
        monkeypatch.setattr(torch_math, name, refuse)


def random(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float16)


def bounds(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def expected(q: Tensor, k: Tensor, v: Tensor, left: int, softcap: float, sinks: Tensor | None) -> Tensor:
    """Attention of one sequence [tokens, heads, dim], whose last query sees its last key."""
    keys, values = (each.double().repeat_interleave(HEADS // HEADS_KV, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * DIM**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    unseen = (distance < 0) | (distance > (left if left >= 0 else len(k)))
    scores = scores.masked_fill(unseen, float("-inf"))
    logits = torch.zeros(HEADS, 0) if sinks is None else sinks[:, None]
    scores = torch.cat([scores, logits[:, None].expand(-1, len(q), -1).double()], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], values)


def attended(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, **features: Any) -> Tensor:
    """Tensors of tokens [tokens, heads, dim]; the second call comes by the fast path."""
    rows = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    with torch.no_grad():
        for _ in range(2):
            out = attend_batch(*rows, batch, causal=True, scaling=None, dropout=0.0, dispatcher=attention, **features)
    return out[0]


@pytest.mark.few(2)
@pytest.mark.parametrize("left", [-1, 6])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, None), (2.0, None), (0.0, SINKS)])
def test_prompts_with_the_keys_before_them(left: int, softcap: float, sinks: Tensor | None) -> None:
    torch.manual_seed(0)
    lengths_q, lengths_k = (5, 1, 12), (9, 21, 12)
    q, k, v = random(20, HEADS, DIM), random(50, HEADS_KV, DIM), random(50, HEADS_KV, DIM)  # padded at their ends
    batch = PackedBatch(bounds(*lengths_q), bounds(*lengths_k), (12, 21), None)
    out = attended(q, k, v, batch, left=left, softcap=softcap, sinks=sinks)
    parts = [each[:18].split(lengths_q) for each in (q, out)] + [each[:42].split(lengths_k) for each in (k, v)]
    for query, found, keys, values in zip(*parts, strict=True):
        wanted = expected(query, keys, values, left, softcap, sinks)
        torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, None), (2.0, SINKS)])
def test_single_tokens_over_pages(softcap: float, sinks: Tensor | None) -> None:
    """The last sequence is padding, with a table of -1; no sequence has page 0."""
    torch.manual_seed(0)
    lengths, pages = (18, 6, 40), ((3, 5), (7,), (2, 9, 11))
    k_pages, v_pages = random(12, PAGE, HEADS_KV, DIM), random(12, PAGE, HEADS_KV, DIM)
    table = torch.full((4, 4), -1, dtype=torch.int32)
    for row, numbers in zip(table, pages, strict=False):
        row[: len(numbers)] = torch.tensor(numbers)
    q, k, v = random(4, HEADS, DIM), random(4, HEADS_KV, DIM), random(4, HEADS_KV, DIM)
    before = k_pages[1:].clone()
    batch = PackedBatch(bounds(1, 1, 1, 1), bounds(*lengths, 0), (1, 1), (k_pages, v_pages, table))
    out = attended(q, k, v, batch, left=-1, softcap=softcap, sinks=sinks)
    for place, (length, numbers) in enumerate(zip(lengths, pages, strict=True)):
        keys, values = (each[list(numbers)].flatten(0, 1)[:length] for each in (k_pages, v_pages))
        assert torch.equal(keys[-1], k[place])
        before[numbers[-1] - 1, (length - 1) % PAGE] = k[place]
        wanted = expected(q[place, None], keys, values, -1, softcap, sinks)
        torch.testing.assert_close(out[place, None].double(), wanted, rtol=2e-3, atol=2e-3)
    assert torch.equal(k_pages[1:], before)  # nothing else was written
