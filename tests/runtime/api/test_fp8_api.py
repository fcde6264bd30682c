"""attention_fp8 where no kernel takes 8 bits, and what it refuses."""

from typing import Any

import pytest
import torch

from blocktune import attention, attention_fp8
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal
from blocktune.runtime.dispatch.dispatcher import Dispatcher

pytestmark = pytest.mark.triton_free

TOLERANCE = 1e-2


def tensors(heads: int = 4, heads_kv: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = ((heads, 60), (heads_kv, 60), (heads_kv, 60))
    return [torch.randn(2, *size, 64).to(torch.float8_e4m3fn) for size in sizes]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", [(None, None, None), ((), (), ()), ((4,), (2,), (2, 2)), ((2, 4), None, (2,))])
def test_numbers_times_their_scales(shapes: tuple[Any, ...], is_causal: bool) -> None:
    qkv = tensors()
    scales = [None if size is None else torch.rand(size) + 0.5 for size in shapes]
    names = ("scale_q", "scale_k", "scale_v")
    found = attention_fp8(*qkv, is_causal=is_causal, **dict(zip(names, scales, strict=True)))
    assert found.dtype is torch.bfloat16
    numbers = []
    for tensor, scale in zip(qkv, scales, strict=True):
        by_head = torch.ones(1, 1) if scale is None else scale.expand(2, tensor.shape[1])
        numbers.append(tensor.float() * by_head[..., None, None])
    expected, _ = attention_reference(*numbers, causal=Causal.UPPER_LEFT if is_causal else Causal.NONE)
    assert (found - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"query": torch.zeros(2, 4, 60, 64)}, "must have one data type"),
        ({"scale_q": torch.ones(3)}, r"`scale_q` must be float32 \[\], \[heads\] or \[batch, heads\].*\(3,\)"),
        ({"scale_k": torch.ones(2, dtype=torch.float64)}, "`scale_k` must be float32 .* torch.float64"),
        ({"scale_v": torch.ones(2, device="meta")}, "`scale_v` must be on the query's device"),
    ],
)
def test_what_it_refuses(change: dict[str, torch.Tensor], reason: str) -> None:
    arguments = dict(zip(("query", "key", "value"), tensors(), strict=True))
    with pytest.raises(UsageError, match=reason):
        attention_fp8(**arguments | change)


def test_other_types_are_told_where_to_go() -> None:
    with pytest.raises(UsageError, match="call `attention`"):
        attention_fp8(*(tensor.bfloat16() for tensor in tensors()))
    query, key, value = tensors(4, 4)
    assert "attention_fp8" in attention.explain(query, key, value).reason
    shape = AttentionShape(
        batch=1, num_heads=1, num_heads_kv=1, seqlen_q=1, seqlen_k=1, head_dim=64, head_dim_v=64, dtype=FP8
    )
    with pytest.raises(UsageError, match="takes no 8-bit tensors"):
        Dispatcher().warmup([shape])
