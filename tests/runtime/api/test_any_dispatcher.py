"""Every entry point serves any dispatcher, eagerly and in compiled graphs."""

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune import (
    BlockMask,
    Dispatcher,
    UsageError,
    attention,
    block_sparse_attention,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    tree_attention,
    tree_words,
)
from blocktune.kernels import registry
from blocktune.runtime.api.hugging_face.attention import transformers_attention
from blocktune.runtime.dispatch import dispatcher as dispatch
from blocktune.runtime.dispatch import obstacles, resolver
from blocktune.runtime.dispatch.graphs.attend import attend
from tests.support.fakes.dispatch_fakes import H200, ListSource
from tests.support.fakes.feature_fakes import FeatureForward

pytestmark = pytest.mark.triton_free

LENGTH, HEADS, DIM = 32, 2, 16
LENGTHS = torch.tensor([0, LENGTH], dtype=torch.int32)


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FeatureForward]:
    forward = FeatureForward()
    monkeypatch.setattr(registry, "KERNELS", {forward.name: forward})
    monkeypatch.setattr(resolver, "current_device", lambda index: H200)
    for module in (dispatch, obstacles):
        monkeypatch.setattr(module, "KERNEL_DEVICE", "cpu")
    torch._dynamo.reset()
    attention.reload()
    yield forward
    attention.reload()


def rows() -> Tensor:
    return torch.randn(1, LENGTH, HEADS, DIM)


def heads() -> Tensor:
    return rows().transpose(1, 2)


def tokens() -> Tensor:
    return rows()[0]


def drafts(**options: Any) -> Tensor:
    mask, caches = tree_words([None] * 4)[None], (rows(), rows())
    return tree_attention(heads()[:, :, :4], *caches, mask, torch.tensor([LENGTH], dtype=torch.int32), **options)


CALLS: dict[str, Callable[..., Any]] = {
    "flash_attn_func": lambda **options: flash_attn_func(rows(), rows(), rows(), **options),
    "flash_attn_func, window": lambda **options: flash_attn_func(rows(), rows(), rows(), window_size=(8, 0), **options),
    "flash_attn_varlen_func": lambda **options: flash_attn_varlen_func(
        tokens(), tokens(), tokens(), LENGTHS, LENGTHS, LENGTH, LENGTH, **options
    ),
    "flash_attn_with_kvcache": lambda **options: flash_attn_with_kvcache(rows()[:, :1], rows(), rows(), **options),
    "tree_attention": drafts,
    "block_sparse_attention": lambda **options: block_sparse_attention(
        heads(), heads(), heads(), BlockMask(32, 32, torch.ones(1, 1, 1, 1, dtype=torch.bool)), **options
    ),
    "transformers_attention": lambda **options: transformers_attention(
        SimpleNamespace(), heads(), heads(), heads(), None, **options
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_entry_point_reads_the_configs_of_the_dispatcher_that_it_is_given(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ListSource()
    dispatcher = Dispatcher(source)
    monkeypatch.setattr(attention, "attend", None)
    monkeypatch.setattr(attention, "plan", None)
    with torch.no_grad():
        CALLS[name](dispatcher=dispatcher)
    assert source.reads == 1


@pytest.mark.parametrize("sizes", [(1, 1, LENGTH, 1), (1, HEADS, 1, 1), (LENGTH, 1), (1, LENGTH)])
def test_a_mask_of_transformers_may_be_shared_by_all_keys(kernel: FeatureForward, sizes: tuple[int, ...]) -> None:
    mask = torch.where(torch.rand(sizes) > 0.3, torch.randn(sizes), float("-inf"))
    query, key, value = heads(), heads(), heads()
    ranked = mask[(None,) * (4 - mask.dim())]
    scores = 2.0 * torch.tanh(query @ key.mT * DIM**-0.5 / 2.0) + ranked
    expected = (scores.softmax(-1).nan_to_num() @ value).transpose(1, 2)
    for _ in range(2):  # the second call comes by the fast path
        with torch.no_grad():
            found, _ = transformers_attention(SimpleNamespace(), query, key, value, mask, softcap=2.0)
        torch.testing.assert_close(found, expected)
    assert len(kernel.seen) >= 2


def test_a_mask_of_transformers_that_does_not_fit_is_refused(kernel: FeatureForward) -> None:
    for sizes in ((1, 1, LENGTH, LENGTH + 1), (1, 1, LENGTH, LENGTH - 1), (1, 1, 2, LENGTH), (3, 1, LENGTH, LENGTH)):
        with pytest.raises(UsageError, match="must broadcast to"):
            transformers_attention(SimpleNamespace(), heads(), heads(), heads(), torch.zeros(sizes), softcap=2.0)
    assert kernel.seen == []


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_func, window"])
def test_a_compiled_graph_keeps_to_its_dispatcher(name: str, kernel: FeatureForward) -> None:
    sources = ListSource(), ListSource()
    first, second = map(Dispatcher, sources)
    window = (8, 0) if "window" in name else (-1, -1)

    def both(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flash_attn_func(query, key, value, window_size=window, dispatcher=first)
        assert isinstance(out, Tensor)
        return out + second(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)

    query, key, value = rows(), rows(), rows()
    graph = torch.compile(both, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(graph(query, key, value), both(query, key, value))
    assert [source.reads for source in sources] == [1, 1]
    assert {shape.features.window is None for shape, _ in kernel.seen} == {True, window == (-1, -1)}


def test_a_graph_whose_dispatcher_is_gone_says_so() -> None:
    dispatcher = Dispatcher(ListSource())
    number = dispatcher._number
    graph = torch.compile(
        lambda *tensors: attend(*tensors, dispatcher=number, lse=False, causal="none", scale=1.0),
        backend="aot_eager",
    )
    graph(heads(), heads(), heads())
    del dispatcher
    gc.collect()
    with pytest.raises(UsageError, match=f"dispatcher {number} no longer exists"):
        graph(heads(), heads(), heads())


def test_graphs_of_the_default_dispatcher_have_the_same_number_in_every_process() -> None:
    assert attention._number == 0
