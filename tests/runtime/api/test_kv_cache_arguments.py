"""What flash_attn_with_kvcache takes besides a cache: entries that an index picks, paddings, rotations and splits,
against their definition in float64: PyTorch's mathematics on the CPU, our kernels on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blocktune import flash_attn_with_kvcache
from blocktune.kernels.values.errors import UsageError, WrongTypeError
from tests.runtime.api.test_flash_api import DEVICES, assert_ours, assert_right, defined, no_plans, random

__all__ = ["no_plans"]  # a fixture of every test

CONVERSION = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
pytestmark = [pytest.mark.triton_free, pytest.mark.filterwarnings(CONVERSION)]


def integers(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def turned(rows: Tensor, angles: Tensor, positions: list[int], *, interleaved: bool) -> Tensor:
    """rows [rows, heads, dim] in float64: pairs are complex numbers, multiplied by those of their positions' angles."""
    width = 2 * angles.shape[1]
    head = rows[..., :width]
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).mT
    unit = torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    found = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * unit)
    found = found.flatten(-2) if interleaved else found.mT.flatten(-2)
    return torch.cat((found, rows[..., width:]), -1)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (6, 0)}, {"causal": True, "softcap": 3.0}])
@pytest.mark.parametrize("rows", [64, 48, 33])
@pytest.mark.parametrize("index", [None, (2, 0, 3)])
@pytest.mark.parametrize("device", DEVICES)
def test_an_index_and_a_padding_say_where_keys_are(
    device: str, index: tuple[int, ...] | None, rows: int, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    q, (k, v) = random(3, 2, 4, 64, device=device), (random(4, rows, 2, 64, device=device) for _ in range(2))
    lengths, paddings = (rows, 9, 20), (0, 7, 19)
    given = {"cache_seqlens": integers(*lengths, device=device)} | options
    entries = (0, 1, 2) if index is None else index
    if index is not None:
        given["cache_batch_idx"] = integers(*index, device=device)
    caches = (k[:3], v[:3]) if index is None else (k, v)
    bare = flash_attn_with_kvcache(q, *caches, **given)
    padded, sums = flash_attn_with_kvcache(
        q, *caches, **given, cache_leftpad=integers(*paddings, device=device), return_softmax_lse=True
    )
    for number, (entry, length, padding) in enumerate(zip(entries, lengths, paddings, strict=True)):
        for out, first in ((bare, 0), (padded, padding)):
            keys = (cache[entry, first:length].double().cpu() for cache in (k, v))
            right, lse = defined(q[number].double().cpu(), *keys, **options)
            assert_right(out[number], right, device)
            if first or padding == 0:
                torch.testing.assert_close(sums[number].double().cpu(), lse, atol=2e-2, rtol=1e-2)
    assert_ours(device)


@pytest.mark.parametrize(
    "where",
    [
        lambda device: {"cache_batch_idx": integers(1, 0, device=device)},
        lambda device: {"cache_leftpad": integers(3, 0, device=device)},
        lambda device: {"block_table": integers(1, 0, device=device).view(2, 1)},
    ],
    ids=["index", "padding", "pages of another size"],
)
@pytest.mark.parametrize("device", DEVICES)
def test_new_rows_are_seen_in_a_cache_whose_entries_are_apart(device: str, where: Callable[[str], Any]) -> None:
    torch.manual_seed(0)
    q, new = random(2, 1, 4, 64, device=device), [random(2, 1, 2, 64, device=device) for _ in range(2)]
    whole = [random(2, 64, 2, 64, device=device) for _ in range(2)]
    lengths, given = integers(20, 47, device=device), where(device)
    sliced = [cache.clone()[:, :48] for cache in whole]  # a view whose pages cannot be a view
    dense = [cache[:, :48].contiguous() for cache in whole]
    found, wanted = (
        flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths, **given) for caches in (sliced, dense)
    )
    torch.testing.assert_close(found, wanted)
    after = flash_attn_with_kvcache(q, *sliced, cache_seqlens=lengths + 1, **given)
    torch.testing.assert_close(found, after)


def spread(tensor: Tensor) -> Tensor:
    """The tensor with other numbers between its own."""
    return torch.stack((tensor, tensor - 1), -1)[..., 0]


@pytest.mark.parametrize("new", [0, 40])
@pytest.mark.parametrize("device", DEVICES)
def test_lengths_tables_and_slopes_with_numbers_between_theirs(device: str, new: int) -> None:
    torch.manual_seed(0)
    q, pages = random(2, 3, 4, 64, device=device), [random(8, 64, 2, 64, device=device) for _ in range(2)]
    rows = [random(2, new, 2, 64, device=device) for _ in range(2)] if new else [None, None]
    tensors = [
        integers(70, 100, device=device),
        torch.arange(8, device=device).int().view(2, 4),
        torch.rand(4, device=device),
    ]

    def attend(make: Callable[[Tensor], Tensor]) -> Tensor:
        lengths, table, slopes = map(make, tensors)
        caches = [page.clone() for page in pages]
        out: Tensor
        for _ in range(3):  # the later ones come the short way
            for cache, page in zip(caches, pages, strict=True):
                cache.copy_(page)
            out = flash_attn_with_kvcache(
                q, *caches, *rows, cache_seqlens=lengths, block_table=table, alibi_slopes=slopes, causal=True
            )
        return out

    torch.testing.assert_close(attend(spread), attend(lambda tensor: tensor))


@pytest.mark.parametrize("size", [48, 512])
@pytest.mark.parametrize("device", DEVICES)
def test_pages_of_any_size_are_served(device: str, size: int) -> None:
    torch.manual_seed(0)
    q, (k, v) = random(2, 1, 4, 64, device=device), (random(5, size, 2, 64, device=device) for _ in range(2))
    table, lengths = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32, device=device), (size + 5, 2 * size)
    out = flash_attn_with_kvcache(q, k, v, block_table=table, cache_seqlens=integers(*lengths, device=device))
    for entry, length in enumerate(lengths):
        keys = (cache[table[entry].long()].flatten(0, 1)[:length].double().cpu() for cache in (k, v))
        assert_right(out[entry], defined(q[entry].double().cpu(), *keys)[0], device)
    assert_ours(device)


WHERE: list[dict[str, Any]] = [
    {},
    {"cache_batch_idx": (3, 0)},
    {"cache_batch_idx": (1, 2), "cache_leftpad": (4, 0)},
    {"block_table": ((2, 0), (3, 1))},
]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("interleaved", "width"), [(True, 64), (False, 64), (True, 32), (False, 16)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_rotations_turn_queries_and_the_keys_that_are_appended(
    device: str, causal: bool, interleaved: bool, width: int, where: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    q, news = random(2, 3, 4, 64, device=device), [random(2, 3, 2, 64, device=device) for _ in range(2)]
    pages = "block_table" in where
    caches = [random(4, 32 if pages else 64, 2, 64, device=device) for _ in range(2)]
    if not where:
        caches = [cache[:2] for cache in caches]
    angles = torch.rand(70, width // 2, dtype=torch.float64) * 6.0
    cos, sin = (part.to(q.dtype).to(device) for part in (angles.cos(), angles.sin()))
    angles = torch.atan2(sin.double().cpu(), cos.double().cpu())  # of the rounded ones, but for their length
    before, lengths = [cache.clone() for cache in caches], (5, 40)
    given = {name: torch.tensor(own, dtype=torch.int32, device=device) for name, own in where.items()}
    out = flash_attn_with_kvcache(
        q, *caches, *news, cos, sin, integers(*lengths, device=device), causal=causal, rotary_interleaved=interleaved,
        **given,
    )  # fmt: skip
    changed = torch.zeros(caches[0].shape[:2], dtype=torch.bool)
    for entry, length in enumerate(lengths):
        places = rows_of(entry, where, caches[0].shape[1])
        written = places[length : length + 3]
        changed[tuple(zip(*written, strict=True))] = True
        positions = list(range(length, length + 3))
        keys = turned(news[0][entry].double().cpu(), angles, positions, interleaved=interleaved)
        for cache, right in ((caches[0], keys), (caches[1], news[1][entry].double().cpu())):
            assert_right(torch.stack([cache[place] for place in written]), right, device)
        query = q[entry].double().cpu()
        query = turned(query, angles, positions if causal else [length] * 3, interleaved=interleaved)
        first = where.get("cache_leftpad", (0, 0))[entry]
        found = [torch.stack([cache[place] for place in places[first : length + 3]]).double().cpu() for cache in caches]
        assert_right(out[entry], defined(query, *found, causal=causal)[0], device)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.cpu()[~changed], old.cpu()[~changed])
    assert_ours(device)


def rows_of(entry: int, where: dict[str, Any], size: int) -> list[tuple[int, int]]:
    """(first, second) index of every row of an entry in its cache."""
    if "block_table" in where:
        return [(page, row) for page in where["block_table"][entry] for row in range(size)]
    own = where.get("cache_batch_idx", (0, 1))[entry]
    return [(own, row) for row in range(size)]


@pytest.mark.parametrize("window", [(5, 3), torch.tensor([5, 3]), np.array([5, 3]), [np.int64(5), torch.tensor(3)]])
@pytest.mark.parametrize("device", DEVICES)
def test_numbers_come_as_tensors_and_arrays(device: str, window: Any) -> None:
    torch.manual_seed(0)
    q, (k, v) = random(1, 2, 4, 64, device=device), (random(1, 40, 2, 64, device=device) for _ in range(2))
    numbers = {"softmax_scale": torch.tensor(0.3), "softcap": np.float32(2.0), "num_splits": np.int64(2)}
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=np.int32(30), window_size=window, **numbers)
    sequence = (q[0], k[0, :30], v[0, :30])
    right, _ = defined(*(own.double().cpu() for own in sequence), window_size=(5, 3), softmax_scale=0.3, softcap=2.0)
    assert_right(out[0], right, device)


@pytest.mark.parametrize("splits", [1, 3, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_fixed_splits_are_right(device: str, splits: int) -> None:
    torch.manual_seed(0)
    q, (k, v) = random(2, 1, 8, 64, device=device), (random(2, 500, 2, 64, device=device) for _ in range(2))
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=integers(500, 77, device=device), num_splits=splits)
    for entry, length in enumerate((500, 77)):
        keys = (cache[entry, :length].double().cpu() for cache in (k, v))
        assert_right(out[entry], defined(q[entry].double().cpu(), *keys)[0], device)
    assert_ours(device)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("page", [0, 64])
def test_with_fixed_splits_a_row_does_not_depend_on_its_batch(page: int, queries: int, splits: int) -> None:
    torch.manual_seed(0)
    batch, rows, device = 160, 4096, "cuda"
    q = random(batch, queries, 32, 128, device=device)
    k, v = (random(batch, rows, 8, 128, device=device) for _ in range(2))
    lengths = torch.randint(1, rows, (batch,), device=device, dtype=torch.int32)

    def attended(chosen: slice) -> tuple[Tensor, Tensor]:
        """The batch entries of a slice, alone."""
        own = [tensor[chosen] for tensor in (k, v)]
        given: dict[str, Any] = {"cache_seqlens": lengths[chosen], "causal": True, "num_splits": splits}
        if page:
            own = [tensor.unflatten(1, (-1, page)).flatten(0, 1) for tensor in own]
            count = rows // page
            given["block_table"] = torch.arange(q[chosen].shape[0] * count, device=device).view(-1, count).int()
        out, lse = flash_attn_with_kvcache(q[chosen], *own, **given, return_softmax_lse=True)
        return out, lse

    whole = attended(slice(0, batch))
    for chosen in (slice(0, 1), slice(7, 9), slice(3, 70)):
        for alone, among in zip(attended(chosen), whole, strict=True):
            assert torch.equal(alone, among[chosen])
    assert_ours(device)


Q, CACHE = torch.zeros(2, 1, 4, 16), torch.zeros(2, 32, 2, 16)
NEW, ANGLES = CACHE[:, :1], torch.zeros(32, 8)


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("`cache_batch_idx` must be int32", {"cache_batch_idx": torch.zeros(2)}),
        ("`cache_batch_idx` must be int32", {"cache_batch_idx": integers(0, 1, 0)}),
        ("`cache_leftpad` must be int32", {"cache_leftpad": integers(0).long()}),
        ("page < 2", {"cache_batch_idx": integers(0, 2)}),
        ("page < 2", {"cache_batch_idx": integers(-1, 0)}),
        ("cache_seqlens <= 32", {"cache_leftpad": integers(0, 9), "cache_seqlens": integers(3, 8)}),
        ("cache_seqlens <= 32", {"cache_leftpad": integers(9, 9), "cache_seqlens": 33}),
        ("exclude each other", {"cache_leftpad": integers(0, 9), "block_table": torch.zeros(2, 1).int()}),
        ("exclude each other", {"cache_batch_idx": integers(0, 1), "block_table": torch.zeros(2, 1).int()}),
        ("given together", {"rotary_cos": ANGLES, "k": NEW, "v": NEW}),
        ("got no new keys", {"rotary_cos": ANGLES, "rotary_sin": ANGLES}),
        ("a row for every position", {"rotary_cos": ANGLES[:31], "rotary_sin": ANGLES[:31], "k": NEW, "v": NEW}),
        ("width <= head_dim", {"rotary_cos": ANGLES, "rotary_sin": ANGLES[:, :4], "k": NEW, "v": NEW}),
        ("must be torch.float32", {"rotary_cos": ANGLES.half(), "rotary_sin": ANGLES, "k": NEW, "v": NEW}),
        ("heads and dim of its cache", {"k": NEW[..., :8], "v": NEW, "cache_seqlens": 3}),
        ("num_splits <= 128", {"num_splits": 129}),
        ("num_splits <= 128", {"num_splits": -1}),
    ],
)
def test_bad_arguments_are_refused_before_any_launch(message: str, given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=message):
        flash_attn_with_kvcache(Q, CACHE, CACHE, **given)


def test_splits_are_a_whole_number() -> None:
    with pytest.raises(WrongTypeError, match="num_splits"):
        flash_attn_with_kvcache(Q, CACHE, CACHE, num_splits=1.5)  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_graph_takes_them(device: str, where: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q, news = random(2, 3, 4, 64, device=device), [random(2, 3, 2, 64, device=device) for _ in range(2)]
    caches = [random(4, 32 if "block_table" in where else 64, 2, 64, device=device) for _ in range(2)]
    if not where:
        caches = [cache[:2] for cache in caches]
    angles = [torch.rand(70, 16, device=device).to(q.dtype) for _ in range(2)]
    given: dict[str, Any] = {name: torch.tensor(own, dtype=torch.int32, device=device) for name, own in where.items()}
    given |= {"cache_seqlens": integers(5, 40, device=device), "causal": True, "num_splits": 2}
    results = []
    for function in (flash_attn_with_kvcache, torch.compile(flash_attn_with_kvcache, backend="eager", fullgraph=True)):
        own = [cache.clone() for cache in caches]
        results.append([function(q, *own, *news, *angles, **given), *own])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_a_bias_by_distances_is_as_exact_as_the_tensors() -> None:
    """The slopes are float32, and products of a slope and a distance have more digits than that."""
    q, cache = torch.randn(1, 2, 2, 8, dtype=torch.float64), torch.randn(1, 90, 2, 8, dtype=torch.float64)
    slopes = torch.tensor([1 / 3, 1 / 7])
    out = flash_attn_with_kvcache(q, cache, cache, alibi_slopes=slopes)
    distance = torch.arange(90)[None] - (torch.arange(2)[:, None] + 88)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, cache) * 8**-0.5 - slopes.double()[:, None, None] * distance.abs()
    right = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), cache)
    torch.testing.assert_close(out, right, atol=1e-13, rtol=1e-13)
