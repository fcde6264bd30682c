"""Calls that ask for something wrong, at every entry point: a `UsageError` that says the rule, what came and the way
out, before any kernel is launched."""

import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from blocktune.kernels import registry
from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.errors import NoDeviceError, UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.api import block_sparse, flash_attn, kv_cache
from blocktune.runtime.dispatch import dispatcher, obstacles, resolver
from blocktune.runtime.dispatch.call_checks import check_mask
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.selection.ladder import Rung
from tests.support.fakes.dispatch_fakes import H200, ListSource
from tests.support.fakes.feature_fakes import SERVED, FeatureBackward, FeatureForward

pytestmark = pytest.mark.triton_free

Q, KV = torch.ones(2, 4, 20, 16), torch.ones(2, 2, 24, 16)
PACKED, PACKED_KV = torch.ones(10, 4, 16), torch.ones(10, 2, 16)
CACHE = torch.ones(2, 32, 2, 16)
ONE = torch.ones(2, 1, 4, 16)
"""A query of each entry, as `flash_attn_with_kvcache` takes them."""


class Everything(FeatureForward):
    """BoundCall caches and trees too, so that nothing but the check stands between a bad call and a launch."""

    features: ClassVar[frozenset[str]] = SERVED | {"cached", "paged", "tree"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """The CPU as an H200 whose kernels serve everything, behind all entry points; what they were launched with."""
    forward, backward = Everything(), FeatureBackward()
    monkeypatch.setattr(registry, "KERNELS", {kernel.name: kernel for kernel in (forward, backward)})
    for module in (obstacles, dispatcher):
        monkeypatch.setattr(module, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: H200)
    monkeypatch.setattr(dispatcher, "attention", Dispatcher(ListSource()))
    return lambda: [*forward.launched, *backward.launched]


def attend(**changes: Any) -> None:
    dispatcher.attention(Q.clone().requires_grad_(), KV, KV, enable_gqa=True, **changes)


def varlen(**changes: Any) -> None:
    given: dict[str, Any] = {"cu_seqlens_q": integers(0, 4, 10), "cu_seqlens_k": integers(0, 4, 10)}
    given |= {"max_seqlen_q": 6, "max_seqlen_k": 6} | changes
    flash_attn.flash_attn_varlen_func(PACKED, PACKED_KV, PACKED_KV, **given, dispatcher=dispatcher.attention)


def func(**changes: Any) -> None:
    flash_attn.flash_attn_func(ONE, CACHE, CACHE, **changes, dispatcher=dispatcher.attention)


def cache(**changes: Any) -> None:
    kv_cache.flash_attn_with_kvcache(ONE, CACHE, CACHE, **changes, dispatcher=dispatcher.attention)


def tree(**changes: Any) -> None:
    given = {"tree_mask": torch.ones(2, 1, 1, dtype=torch.int32), "cache_seqlens": integers(9, 20)} | changes
    kv_cache.tree_attention(ONE.transpose(1, 2), CACHE, CACHE, **given, dispatcher=dispatcher.attention)


def sparse(block_mask: Any) -> None:
    block_sparse.block_sparse_attention(Q, KV, KV, block_mask, dispatcher=dispatcher.attention)


def integers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def blocks(*sizes: int) -> BlockMask:
    return BlockMask(16, 16, torch.ones(sizes, dtype=torch.bool))


PAGES = torch.zeros(2, 2, dtype=torch.int32)
BAD: list[tuple[str, Callable[..., None], dict[str, Any]]] = [
    ("a mask of other lengths", attend, {"attn_mask": torch.ones(20, 25, dtype=torch.bool)}),
    ("a mask of another batch", attend, {"attn_mask": torch.ones(3, 1, 20, 24)}),
    ("a mask of integers", attend, {"attn_mask": torch.ones(20, 24, dtype=torch.int32)}),
    ("a mask in half", attend, {"attn_mask": torch.ones(20, 24, dtype=torch.float16)}),
    ("a negative share dropped", attend, {"dropout_p": -0.5}),
    ("no number dropped", attend, {"dropout_p": float("nan")}),
    ("more than all dropped", func, {"dropout_p": 1.5}),
    ("all packed pairs dropped", varlen, {"dropout_p": 1.0}),
    ("bounds that begin late", varlen, {"cu_seqlens_q": integers(1, 4, 10)}),
    ("queries that descend", varlen, {"cu_seqlens_q": integers(0, 12, 10)}),
    ("keys that descend", varlen, {"cu_seqlens_k": integers(0, 6, 4)}),
    ("queries beyond the tokens", varlen, {"cu_seqlens_q": integers(0, 4, 11), "max_seqlen_q": 7}),
    ("keys beyond the tokens", varlen, {"cu_seqlens_k": integers(0, 4, 11), "max_seqlen_k": 7}),
    ("a sequence longer than said", varlen, {"max_seqlen_q": 5}),
    ("bounds of 64 bits", varlen, {"cu_seqlens_k": integers(0, 4, 10, dtype=torch.int64)}),
    ("bounds of other sequences", varlen, {"cu_seqlens_k": integers(0, 10)}),
    ("a page that is not there", cache, {"block_table": PAGES + 2}),
    ("a negative page", cache, {"block_table": PAGES - 1}),
    ("pages of 64 bits", cache, {"block_table": PAGES.long()}),
    ("pages of another batch", cache, {"block_table": PAGES[:1]}),
    ("more keys than the cache holds", cache, {"cache_seqlens": integers(1, 33)}),
    ("more keys than the pages hold", cache, {"cache_seqlens": integers(1, 65), "block_table": PAGES}),
    ("a negative number of keys", cache, {"cache_seqlens": -1}),
    ("keys appended beyond the cache", cache, {"cache_seqlens": 32, "k": CACHE[:, :1], "v": CACHE[:, :1]}),
    ("a tree of other drafts", tree, {"tree_mask": torch.ones(2, 2, 1, dtype=torch.int32)}),
    ("a tree of 64-bit words", tree, {"tree_mask": torch.ones(2, 1, 1, dtype=torch.int64)}),
    ("a tree beyond the pages", tree, {"block_table": PAGES + 5}),
    ("a dense mask for blocks", sparse, {"block_mask": torch.ones(2, 2, dtype=torch.bool)}),
    ("blocks of other lengths", sparse, {"block_mask": blocks(1, 1, 2, 3)}),
    ("blocks of other heads", sparse, {"block_mask": blocks(1, 3, 2, 2)}),
]


@pytest.mark.parametrize(("entry", "given"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_call_is_refused_before_any_launch(
    launched: Callable[[], list[Any]], entry: Callable[..., None], given: dict[str, Any]
) -> None:
    with pytest.raises(UsageError) as refused:
        entry(**given)
    assert refused.type is UsageError
    assert "but got" in str(refused.value)
    assert str(refused.value).rstrip(".").count(". ") >= 1, "rule and values, then the way out"
    assert launched() == []


@pytest.mark.parametrize(
    ("entry", "given"),
    [(attend, {"attn_mask": torch.ones(20, 24)}), (attend, {"dropout_p": 0.0}), (varlen, {})],
)
def test_the_same_calls_are_launched_where_nothing_is_wrong(
    launched: Callable[[], list[Any]], entry: Callable[..., None], given: dict[str, Any]
) -> None:
    entry(**given)
    assert launched()


def test_a_mask_with_a_row_of_no_blocks_gives_zeros_and_no_nan(launched: Callable[[], list[Any]]) -> None:
    shown = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    shown[..., 0, :] = False
    leaves = [tensor.clone().requires_grad_() for tensor in (Q, KV, KV)]
    out = block_sparse.block_sparse_attention(*leaves, BlockMask(16, 16, shown), dispatcher=dispatcher.attention)
    assert not bool(out[:, :, :16].any())
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert bool(gradient.isfinite().all())
    assert launched()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((Q.numpy(), KV, KV), "'query' (position 1) must be Tensor, not numpy.ndarray"),
        ((Q, None, KV), "'key' (position 2) must be Tensor, not NoneType"),
        ((Q, KV, 3.0), "'value' (position 3) must be Tensor, not float"),
        ((Q, KV, KV, [True]), "'attn_mask' (position 4) must be Tensor, not list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_tensor_is_refused_in_the_words_of_pytorch(
    launched: Callable[[], list[Any]], arguments: tuple[Any, ...], name: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(name)):
        dispatcher.attention(*arguments, enable_gqa=True)
    assert launched() == []


def test_explaining_a_call_without_tensors_says_so(launched: Callable[[], list[Any]]) -> None:
    explanation = dispatcher.attention.explain(Q.numpy(), KV, KV)  # type: ignore[arg-type]
    assert (explanation.rung, explanation.reason) == (
        Rung.SDPA,
        "an argument is of another type than in PyTorch's signature (ndarray, Tensor, Tensor, NoneType, float, bool, "
        "NoneType, bool), which PyTorch refuses or converts",
    )


@pytest.mark.parametrize(
    ("dtype", "added"), [(torch.float32, "torch.float32"), (torch.float16, "torch.float16 or torch.float32")]
)
def test_the_data_types_of_a_mask_are_named_once(dtype: torch.dtype, added: str) -> None:
    mask = torch.ones(20, 24, dtype=torch.int32)
    with pytest.raises(
        UsageError, match=rf"query sees the key\) or {added} \(added to the scores\), but got torch.int32"
    ):
        check_mask(mask, Q.to(dtype), KV.to(dtype))


def test_warming_up_without_a_gpu_says_that_it_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shape = AttentionShape(batch=1, num_heads=1, num_heads_kv=1, seqlen_q=64, seqlen_k=64, head_dim=64, head_dim_v=64)
    with pytest.raises(NoDeviceError, match=r"Warming up .* PyTorch sees none here\. .*`explain"):
        Dispatcher(ListSource()).warmup([shape])
