"""Block-sparse attention, decoding over a cache and trees of drafts, as a caller asks for them: by PyTorch's maths on
the CPU, by our kernels on a GPU, and against a loop over queries either way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune import (
    BlockMask,
    block_sparse_attention,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    tree_attention,
    tree_words,
)
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.dispatch.dispatcher import attention
from blocktune.runtime.dispatch.launches.plans import TorchPlan

pytestmark = pytest.mark.triton_free

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS, HEADS_KV, DIM = 8, 2, 64


@pytest.fixture(autouse=True)
def no_plans() -> None:
    """Plans are made by the test alone, and not made again when a file has been read."""
    attention.reload()
    if torch.cuda.is_available():
        attention._settle(None)


def by_loop(q: Tensor, k: Tensor, v: Tensor, sees: Callable[[int], Any]) -> Tensor:
    """Attention of one entry, a query after the other: q [heads, rows, dim], k and v [heads_kv, keys, dim]; sees(row)
    selects keys."""
    group, out = q.shape[0] // k.shape[0], torch.zeros(*q.shape[:2], v.shape[-1])
    for head in range(q.shape[0]):
        for row in range(q.shape[1]):
            keys, values = (tensor[head // group][sees(row)].float().cpu() for tensor in (k, v))
            if len(keys):
                scores = keys @ q[head, row].float().cpu() / q.shape[-1] ** 0.5
                out[head, row] = torch.softmax(scores, 0) @ values
    return out


def random(*sizes: int, device: str) -> Tensor:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(*sizes, dtype=dtype, device=device)


def assert_right(out: Tensor, right: Tensor) -> None:
    bound = 1e-2 if out.is_cuda else 1e-5
    assert (out.float().cpu() - right).norm() <= bound * right.norm()
    if out.is_cuda:
        assert_ours()


def assert_ours() -> None:
    """Nothing since the test began went to PyTorch."""
    plans = attention._resolver.plans
    assert plans
    assert not any(isinstance(plan, TorchPlan) for plan in plans.values())


def paged(cache: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """A contiguous cache [batch, rows, heads, dim] as shuffled pages and their table."""
    batch, pages = cache.shape[0], cache.shape[1] // page_size
    order = torch.randperm(batch * pages, device=cache.device)
    store = torch.empty(batch * pages, page_size, *cache.shape[2:], dtype=cache.dtype, device=cache.device)
    store[order] = cache.unflatten(1, (pages, page_size)).flatten(0, 1)
    return store, order.view(batch, pages).to(torch.int32)


@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize(("rows", "causal"), [(1, False), (4, True)])
@pytest.mark.parametrize("device", DEVICES)
def test_decoding_sees_each_entrys_own_keys(device: str, rows: int, causal: bool, page_size: int) -> None:
    q = random(3, rows, HEADS, DIM, device=device)
    k, v = (random(3, 192, HEADS_KV, DIM, device=device) for _ in range(2))
    lengths = torch.tensor([5, 0, 192], dtype=torch.int32, device=device)
    for cache in (k, v):
        cache[0, 5:] = float("nan")  # what lies behind the length must not count
        cache[1] = float("nan")
    k_cache, v_cache, table = k, v, None
    if page_size:
        torch.manual_seed(1)
        k_cache, table = paged(k, page_size)
        torch.manual_seed(1)
        v_cache, _ = paged(v, page_size)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=causal, return_softmax_lse=True
    )
    for entry, length in enumerate(lengths.tolist()):

        def sees(row: int, length: int = length) -> slice:
            return slice(max(0, length - rows + row + 1 if causal else length))

        right = by_loop(*(tensor[entry].transpose(0, 1) for tensor in (q, k, v)), sees)
        torch.testing.assert_close(out[entry].float().cpu().transpose(0, 1), right, atol=2e-2, rtol=2e-2)
    assert bool(lse[1].isneginf().all())
    if device == "cuda":
        assert_ours()


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_new_keys_are_appended_in_place(device: str, page_size: int) -> None:
    q, new_k, new_v = (
        random(2, 1, HEADS, DIM, device=device),
        *(random(2, 1, HEADS_KV, DIM, device=device) for _ in "kv"),
    )
    k, v = (random(2, 64, HEADS_KV, DIM, device=device) for _ in range(2))
    lengths, table = torch.tensor([3, 40], dtype=torch.int32, device=device), None
    expected_k, expected_v = k.clone(), v.clone()
    for entry, length in enumerate(lengths.tolist()):
        expected_k[entry, length], expected_v[entry, length] = new_k[entry, 0], new_v[entry, 0]
    if page_size:
        torch.manual_seed(2)
        k, table = paged(k, page_size)
        torch.manual_seed(2)
        v, _ = paged(v, page_size)
    out = flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=lengths, block_table=table, causal=True)
    right = flash_attn_with_kvcache(q, expected_k, expected_v, cache_seqlens=lengths + 1)
    torch.testing.assert_close(out, right, atol=2e-2, rtol=2e-2)
    seen = k if table is None else k[table.long()].flatten(1, 2)
    torch.testing.assert_close(seen, expected_k)


@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_sees_the_cache_and_its_ancestors(device: str) -> None:
    parents = [None, 0, 0, 1, 1, 2, 3, 3, 5]
    drafts, lengths = len(parents), [9, 70]
    q = random(2, HEADS, drafts, DIM, device=device)
    k, v = (random(2, 96, HEADS_KV, DIM, device=device) for _ in range(2))
    words = torch.stack([tree_words(parents)] * 2).to(device)
    out = tree_attention(q, k, v, words, torch.tensor(lengths, dtype=torch.int32, device=device))
    for entry, length in enumerate(lengths):

        def sees(row: int, first: int = length - drafts) -> list[int]:
            ancestors, draft = [], row
            while draft is not None:
                ancestors.append(first + draft)
                draft = parents[draft]  # type: ignore[assignment]
            return [*range(first), *ancestors]

        assert_right(out[entry], by_loop(q[entry], k[entry].transpose(0, 1), v[entry].transpose(0, 1), sees))


@pytest.mark.few(1)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_only_active_blocks_take_part(device: str, is_causal: bool) -> None:
    q = random(1, HEADS, 200, DIM, device=device)
    k, v = (random(1, HEADS_KV, 200, DIM, device=device) for _ in range(2))
    blocks = torch.rand(1, 1, 4, 4, device=device) < 0.4
    blocks[..., 1, :] = False  # a row of blocks that sees nothing gives zeros
    out = block_sparse_attention(q, k, v, BlockMask(64, 64, blocks), is_causal=is_causal)
    active = blocks[0, 0].tolist()

    def sees(row: int) -> list[int]:
        return [key for key in range(200) if active[row // 64][key // 64] and not (is_causal and key > row)]

    assert_right(out[0], by_loop(q[0], k[0], v[0], sees))
    assert not bool(out[0, :, 64:128].any())


@pytest.mark.gpu
def test_a_decode_step_is_captured_and_replayed() -> None:
    q = random(2, 1, HEADS, DIM, device="cuda")
    k, v = (random(2, 256, HEADS_KV, DIM, device="cuda") for _ in range(2))
    lengths = torch.tensor([100, 17], dtype=torch.int32, device="cuda")
    flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    lengths.fill_(200)
    graph.replay()
    torch.testing.assert_close(out, flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths))


Q, CACHE = torch.zeros(2, 1, HEADS, DIM), torch.zeros(2, 32, HEADS_KV, DIM)
TABLE = torch.zeros(2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("`cache_seqlens` must be int32", {"cache_seqlens": torch.zeros(2)}),
        ("`cache_seqlens` must be int32", {"cache_seqlens": torch.zeros(3, dtype=torch.int32)}),
        ("cache_seqlens <= 32", {"cache_seqlens": torch.tensor([1, 33], dtype=torch.int32)}),
        ("cache_seqlens <= 32", {"cache_seqlens": torch.tensor([-1, 3], dtype=torch.int32)}),
        ("`block_table` must be int32", {"block_table": TABLE.long()}),
        ("page < 2", {"block_table": TABLE + 2}),
        ("page < 2", {"block_table": TABLE - 1}),
        ("only one is given", {"k": CACHE[:, :1]}),
    ],
)
def test_bad_arguments_of_a_cache_are_refused_before_any_launch(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=message):
        flash_attn_with_kvcache(Q, CACHE, CACHE, **arguments)


def test_gradients_of_these_calls_are_refused() -> None:
    with pytest.raises(UsageError, match="no gradients"):
        flash_attn_with_kvcache(Q.clone().requires_grad_(), CACHE, CACHE)


def test_masks_that_do_not_fit_are_refused() -> None:
    q = torch.zeros(1, HEADS, 100, DIM)
    with pytest.raises(UsageError, match="must be a BlockMask"):
        block_sparse_attention(q, q, q, torch.ones(2, 2))  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        block_sparse_attention(q, q, q, BlockMask(64, 64, torch.ones(1, 1, 3, 2, dtype=torch.bool)))
    with pytest.raises(UsageError, match="`tree_mask` must be int32"):
        tree_attention(q[:, :, :4], CACHE[:1], CACHE[:1], torch.zeros(1, 4, 1), torch.ones(1, dtype=torch.int32))


BEHIND = (-1, 1 << 30)
"""What places of a block table hold that no key needs."""


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize(("page_size", "new"), [(16, 0), (64, 0), (24, 0), (16, 3)])
@pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_places_of_a_table_behind_the_keys_hold_anything(
    device: str, dtype: torch.dtype | None, page_size: int, new: int, behind: int
) -> None:
    q, lengths = random(3, 1, HEADS, DIM, device=device), (5, 0, 100)
    k, v = (random(21, page_size, HEADS_KV, DIM, device=device) for _ in range(2))
    news = [random(3, new, HEADS_KV, DIM, device=device) for _ in range(2)] if new else [None, None]
    scales: dict[str, Any] = {}
    if dtype is not None:
        k, v, scales = (20 * k).to(dtype), (20 * v).to(dtype), {"k_descale": 0.05, "v_descale": 0.05}
    filled = torch.randperm(21)[:21].view(3, 7).int()
    used = torch.arange(7) * page_size < torch.tensor(lengths)[:, None] + new
    options = scales | {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device)}
    for _ in range(3):  # the first call of a kind, one that is recorded, and one that is repeated
        found, right = (
            flash_attn_with_kvcache(q, k.clone(), v.clone(), *news, **options, block_table=table.to(device))
            for table in (filled.where(used, behind), filled)
        )
        assert torch.equal(found, right)


@pytest.mark.parametrize("table", [[[0, -1]], [[0, 6]]])
def test_a_table_that_names_no_page_for_a_key_is_refused(table: list[list[int]]) -> None:
    pages = torch.zeros(6, 16, HEADS_KV, DIM)
    options: dict[str, Any] = {"block_table": torch.tensor(table, dtype=torch.int32)}
    with pytest.raises(UsageError, match="page < 6"):
        flash_attn_with_kvcache(Q[:1], pages, pages, **options, cache_seqlens=17)
    flash_attn_with_kvcache(Q[:1], pages, pages, **options, cache_seqlens=16)
    with pytest.raises(UsageError, match="a row of block_table"):
        flash_attn_with_kvcache(Q[:1], pages, pages, **options, cache_seqlens=33)


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("longest", [4, 100])
@pytest.mark.parametrize("device", DEVICES)
def test_packed_queries_read_no_place_behind_the_keys(device: str, longest: int, behind: int) -> None:
    q, k, v = (random(*sizes, device=device) for sizes in ((4, 4, 64), (8, 16, 2, 64), (8, 16, 2, 64)))
    bounds, bounds_k = (torch.tensor(one, dtype=torch.int32, device=device) for one in ((0, 1, 4), (0, 17, 20)))
    filled = torch.tensor([[5, 2, 0, 1], [7, 3, 4, 6]], dtype=torch.int32)
    used = torch.tensor([[True, True, False, False], [True, False, False, False]])
    found, right = (
        flash_attn_varlen_func(q, k, v, bounds, bounds_k, longest, 40, block_table=table.to(device), causal=True)
        for table in (filled.where(used, behind), filled)
    )
    assert torch.equal(found, right)
