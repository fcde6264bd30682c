"""Caches of 8 bits in flash_attn_with_kvcache: against the same call over the numbers that they stand for, by PyTorch's
mathematics on the CPU and our kernels on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune import Dispatcher, flash_attn_with_kvcache
from blocktune.kernels.values.errors import UsageError, WrongTypeError
from blocktune.kernels.values.features import CacheType, Features
from blocktune.kernels.values.shape import Causal, Direction
from blocktune.kernels.values.short_numbers import BOUNDS, quantize
from blocktune.runtime.dispatch.call import Call
from tests.runtime.api.test_flash_api import DEVICES, assert_ours, no_plans, random

__all__ = ["no_plans"]  # a fixture of every test

CONVERSION = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
pytestmark = [pytest.mark.triton_free, pytest.mark.filterwarnings(CONVERSION)]

REFERENCE = Dispatcher()
"""BoundCall the calls in float64, by PyTorch: the plans of the dispatcher under test are to be ours alone."""

DTYPES = (torch.float8_e4m3fn, torch.int8)
SIZES: dict[str, tuple[int, ...]] = {"number": (), "heads": (2,), "batch": (3, 2)}


def integers(*values: Any, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def descale(kind: str, rows: tuple[int, ...], device: str) -> Tensor:
    """0.01 to 0.03, of one kind; rows: the first two sizes of the cache."""
    sizes = SIZES.get(kind, (*rows, 2))
    return (0.01 + 0.02 * torch.rand(sizes)).to(device)


def factor(scale: Tensor, entries: Tensor) -> Tensor:
    """What multiplies a cache [entries, rows, heads, dim]; entries: which batch entry each belongs to."""
    if scale.dim() == 3:
        return scale[..., None]
    return scale[entries][:, None, :, None] if scale.dim() == 2 else scale.reshape(1, 1, -1, 1)


def caches(*sizes: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    found = [40 * torch.randn(*sizes, 2, 64) for _ in range(2)]
    return [quantize(numbers, 1.0, dtype).to(device) for numbers in found]


def assert_same(found: Any, wanted: Any, device: str) -> None:
    """Of a GPU in bfloat16, of the CPU in float32, against float64."""
    tolerance = 5e-3 if device == "cuda" else 1e-5
    for own, right in zip(found, wanted, strict=True):
        own, right = own.double().cpu(), right.double().cpu()
        assert (own - right).norm() <= tolerance * right.norm()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (6, 0), "softcap": 3.0},
    {"causal": True, "num_splits": 4},
    {"s_aux": True, "alibi_slopes": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [*SIZES, "tokens"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_stands_for_its_numbers_times_a_scale(
    device: str, dtype: torch.dtype, kind: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    q, (k, v) = random(3, 2, 4, 64, device=device), caches(3, 40, dtype=dtype, device=device)
    scales = [descale(kind, (3, 40), device) for _ in range(2)]
    given = {"cache_seqlens": integers(40, 9, 20, device=device)} | options
    given |= {name: torch.rand(4, device=device) for name in ("s_aux", "alibi_slopes") if name in options}
    named = dict(zip(("k_descale", "v_descale"), scales, strict=True))
    for _ in range(3):  # the first call of a kind, one that is recorded, and one that is repeated
        found = flash_attn_with_kvcache(q, k, v, **given, **named, return_softmax_lse=True)
    entries = torch.arange(3, device=device)
    wide = [cache.double() * factor(scale.double(), entries) for cache, scale in zip((k, v), scales, strict=True)]
    given["alibi_slopes"] = given.get("alibi_slopes")
    wanted = flash_attn_with_kvcache(q.double(), *wide, **given, return_softmax_lse=True, dispatcher=REFERENCE)
    assert found[0].dtype is q.dtype
    assert_same(found, wanted, device)
    assert_ours(device)


@pytest.mark.parametrize("kind", ["heads", "tokens"])
@pytest.mark.parametrize(
    "where",
    [
        {"block_table": [[3, 0, 5], [1, 2, 4]]},
        {"cache_batch_idx": [4, 1]},
        {"cache_batch_idx": [2, 5], "cache_leftpad": [3, 0]},
    ],
)
@pytest.mark.parametrize("rows", [16, 24])
@pytest.mark.parametrize("device", DEVICES)
def test_scales_are_found_where_the_keys_are(device: str, rows: int, where: dict[str, Any], kind: str) -> None:
    torch.manual_seed(0)
    q, (k, v) = random(2, 1, 4, 64, device=device), caches(6, rows, dtype=torch.int8, device=device)
    scales = [descale(kind, (6, rows), device) for _ in range(2)]
    places = {name: torch.tensor(own, dtype=torch.int32, device=device) for name, own in where.items()}
    given = places | {"cache_seqlens": integers(rows, 9, device=device)}
    found = flash_attn_with_kvcache(q, k, v, **given, k_descale=scales[0], v_descale=scales[1])
    entries = torch.zeros(6, dtype=torch.long, device=device)
    wide = [cache.double() * factor(scale.double(), entries) for cache, scale in zip((k, v), scales, strict=True)]
    wanted = flash_attn_with_kvcache(q.double(), *wide, **given, dispatcher=REFERENCE)
    assert_same([found], [wanted], device)
    assert_ours(device)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_new_rows_are_divided_rounded_and_clamped(
    device: str, paged: bool, turned: bool, dtype: torch.dtype, kind: str
) -> None:
    torch.manual_seed(0)
    q, (k, v) = random(3, 2, 4, 64, device=device), caches(6 if paged else 3, 32, dtype=dtype, device=device)
    news = [random(3, 2, 2, 64, device=device) for _ in range(2)]
    news[1][0, 0, 0, :2] = torch.tensor([1e4, -1e4])  # beyond what the type holds
    scales = [descale(kind, (), device) for _ in range(2)]
    given: dict[str, Any] = {"cache_seqlens": integers(30, 4, 0, device=device), "causal": True}
    if paged:
        given["block_table"] = integers([3, 1], [0, 4], [5, 2], device=device)
    rotation = [torch.rand(64, 16, device=device).to(q.dtype) for _ in range(2)] if turned else [None, None]
    wide = [torch.zeros(cache.shape, dtype=q.dtype, device=device) for cache in (k, v)]
    flash_attn_with_kvcache(q, *wide, *news, *rotation, **given)  # leaves the rows as they are appended, turned
    before = [cache.clone() for cache in (k, v)]
    named = dict(zip(("k_descale", "v_descale"), scales, strict=True))
    out = flash_attn_with_kvcache(q, k, v, *news, *rotation, **given, **named)
    places = [(0, 30), (0, 31), (1, 4), (1, 5), (2, 0), (2, 1)]
    if paged:
        places = [((3, 0, 5)[entry], row) for entry, row in places]
    written = torch.zeros(k.shape[:2], dtype=torch.bool)
    for number, place in enumerate(places):
        written[place] = True
        for cache, rows, scale in zip((k, v), wide, scales, strict=True):
            own = factor(scale, torch.arange(3, device=device))[number // 2 if scale.dim() == 2 else 0, 0]
            least, most = BOUNDS[dtype]
            exact = (rows[place].float() / own).clamp(least, most)
            right = exact.round().to(dtype) if dtype is torch.int8 else exact.to(dtype)
            assert torch.equal(cache[place].float(), right.float())
    for cache, old in zip((k, v), before, strict=True):
        assert torch.equal(cache.view(torch.int8).cpu()[~written], old.view(torch.int8).cpu()[~written])
    again = dict(given, cache_seqlens=given["cache_seqlens"] + 2)
    if not turned:  # else the queries are turned in the call only
        assert torch.equal(out, flash_attn_with_kvcache(q, k, v, **again, **named))
    assert float(v.float().amax()) == BOUNDS[dtype][1]


@pytest.mark.parametrize("kind", [None, "heads", "batch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_decoder_appends_a_row_in_every_step(device: str, dtype: torch.dtype, kind: str | None) -> None:
    """On a GPU the first steps are recorded, and the others repeated."""
    torch.manual_seed(0)
    k, v = caches(3, 32, dtype=dtype, device=device)
    named: dict[str, Any] = {"k_descale": 0.02, "v_descale": 0.02} if kind is None and dtype is torch.int8 else {}
    if kind is not None:
        named = {name: descale(kind, (), device) for name in ("k_descale", "v_descale")}
    lengths, entries = integers(4, 9, 20, device=device), torch.arange(3, device=device)
    for _ in range(6):
        q, news = random(3, 1, 4, 64, device=device), [random(3, 1, 2, 64, device=device) for _ in range(2)]
        out = flash_attn_with_kvcache(q, k, v, *news, cache_seqlens=lengths, causal=True, **named)
        wide = []
        for cache, new, scale in zip(
            (k, v), news, (named.get("k_descale", 1.0), named.get("v_descale", 1.0)), strict=True
        ):
            own = factor(torch.as_tensor(scale, device=device), entries)
            assert torch.equal(cache[entries, lengths.long()].float(), quantize(new, own, dtype)[:, 0].float())
            wide.append(cache.double() * own.double())
        lengths = lengths + 1
        wanted = flash_attn_with_kvcache(q.double(), *wide, cache_seqlens=lengths, causal=True, dispatcher=REFERENCE)
        assert_same([out], [wanted], device)
    assert_ours(device)


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_and_their_absence(device: str) -> None:
    torch.manual_seed(0)
    q, (k, v) = random(3, 1, 4, 64, device=device), caches(3, 40, dtype=torch.float8_e4m3fn, device=device)
    bare = flash_attn_with_kvcache(q / 64, k, v)
    ones = flash_attn_with_kvcache(q / 64, k, v, k_descale=1, v_descale=torch.tensor(1.0, device=device))
    assert torch.equal(bare, ones)
    half = flash_attn_with_kvcache(q / 64, k, v, v_descale=0.5)
    assert_same([half], [bare * 0.5], device)
    assert_ours(device)


@pytest.mark.parametrize("device", DEVICES)
def test_under_autocast_the_cache_stays_as_it_is(device: str) -> None:
    torch.manual_seed(0)
    q, (k, v) = random(3, 1, 4, 64, device=device), caches(3, 40, dtype=torch.float8_e4m3fn, device=device)
    named = {"k_descale": torch.tensor([0.01, 0.02], device=device), "v_descale": 0.02}
    wanted = flash_attn_with_kvcache(q.bfloat16(), k, v, **named)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = flash_attn_with_kvcache(q.bfloat16().float(), k, v, **named)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["heads", "tokens"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_graph_takes_them(device: str, kind: str) -> None:
    torch.manual_seed(0)
    q, (k, v) = random(3, 1, 4, 64, device=device), caches(3, 40, dtype=torch.int8, device=device)
    scales = [descale(kind, (3, 40), device) for _ in range(2)]
    given = {"cache_seqlens": integers(40, 9, 20, device=device), "k_descale": scales[0], "v_descale": scales[1]}
    compiled = torch.compile(flash_attn_with_kvcache, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, **given), flash_attn_with_kvcache(q, k, v, **given))


def test_the_shape_of_a_call_says_its_cache() -> None:
    q, k = torch.zeros(2, 4, 1, 16).half(), torch.zeros(2, 2, 32, 16, dtype=torch.int8)
    asked: dict[str, Any] = {"causal": Causal.NONE, "scale": 1.0, "cache_seqlens": integers(3, 4, device="cpu")}
    asked["lengths"] = (2, 1, 32)
    scales = torch.ones(2, 2), torch.ones(2, 32, 2)
    for scale, of_tokens in zip(scales, (False, True), strict=True):
        call = Call.of(**asked, scale_k=scale, scale_v=scale)
        wanted = Features(cached=True, kv=CacheType.INT8, token_scales=of_tokens)
        assert call.shape(q, k, k, Direction.FORWARD).features == wanted
    plain = Call.of(**asked).shape(q, k.half(), k.half(), Direction.FORWARD)
    assert plain.features == Features(cached=True)


Q, INT8 = torch.zeros(2, 1, 4, 16), torch.zeros(2, 32, 2, 16, dtype=torch.int8)
E4M3, NEW, TOKENS = INT8.to(torch.float8_e4m3fn), torch.zeros(2, 1, 2, 16), torch.ones(2, 32, 2)
BOTH = {"k_descale": 1.0, "v_descale": 1.0}


@pytest.mark.parametrize(
    ("message", "caches", "given"),
    [
        ("An int8 cache needs `k_descale`", (INT8, INT8), {}),
        ("An int8 cache needs `v_descale`", (INT8, INT8), {"k_descale": 1.0}),
        ("`k_descale` must be a number, or a float32 tensor", (E4M3, E4M3), {"k_descale": torch.ones(3)}),
        ("`v_descale` must be a number, or a float32 tensor", (E4M3, E4M3), {"v_descale": torch.ones(2).half()}),
        ("must both have a scale per token", (E4M3, E4M3), {"v_descale": TOKENS}),
        ("only the caller knows", (E4M3, E4M3), {"k_descale": TOKENS, "v_descale": TOKENS, "k": NEW, "v": NEW}),
        ("`k` and `v` must have the type of q, torch.float32", (INT8, INT8), BOTH | {"k": NEW.half(), "v": NEW}),
        ("need a cache of torch.float8_e4m3fn or torch.int8", (E4M3.float(), E4M3.float()), {"k_descale": 1.0}),
        ("must have one type", (INT8, E4M3), BOTH),
        ("computes no gradients", (INT8, INT8), BOTH | {"q": Q.clone().requires_grad_()}),
        ("`num_heads % num_heads_kv == 0`", (INT8[:, :, :1].expand(2, 32, 3, 16),) * 2, BOTH),
        ("must agree in batch", (INT8[:1], INT8[:1]), BOTH),
    ],
)
def test_what_does_not_go_together_is_refused(message: str, caches: tuple[Tensor, Tensor], given: Any) -> None:
    given = {"q": Q, "cache_seqlens": 3} | given
    with pytest.raises(UsageError, match=message):
        flash_attn_with_kvcache(given.pop("q"), *caches, **given)


def test_a_scale_is_a_tensor_or_a_number() -> None:
    for wrong in ("1.0", [1.0], True):
        with pytest.raises(WrongTypeError, match="`k_descale` must be a float32 tensor or a number"):
            flash_attn_with_kvcache(Q, E4M3, E4M3, k_descale=wrong)  # type: ignore[arg-type]
