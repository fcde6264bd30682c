"""Decoding over 8-bit caches against float64 of the numbers that they stand for: in Triton's interpreter on the CPU,
compiled where a GPU is."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from blocktune.kernels.portable.decode8.kernel import FlashDecode8
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.kernels.values.short_numbers import BOUNDS, CACHE_TYPES, as_factor, quantize
from tests.kernels.portable.decode.test_flash_decode import (
    HOPPER,
    NINE_TOKENS,
    Case,
    assert_close,
    case_of,
    expected,
    shape_of,
    words_of,
)
from tests.support.triton_modes import DEVICE, runs

# Triton's interpreter turns one-element arrays into numbers, which NumPy deprecates.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

KERNEL = FlashDecode8()
Tensor = torch.Tensor
KINDS = ("e4m3", "int8")
SCALES = ("tensor", "head", "batch", "token")
POISON = {torch.float8_e4m3fn: float("nan"), torch.int8: 100}
"""What stands where no key is."""


@dataclass(frozen=True, kw_only=True)
class Short:
    """A problem over an 8-bit cache, and the same over the numbers that it stands for."""

    k: Tensor
    v: Tensor
    extras: Extras
    wide: Case


def short_shape(kind: str, features: str = "", **changes: Any) -> AttentionShape:
    return shape_of(Features.parse(f"cached kv={kind} {features}"), **changes)


def config_of(
    block_m: int = 16, block_n: int = 32, splits: int = 4, warps: int = 4, stages: int = 2, overlap: int = 0
) -> KernelConfig:
    return KernelConfig(KERNEL.name, block_m, block_n, warps, stages, (("splits", splits), ("overlap", overlap)))


def short_of(
    shape: AttentionShape,
    lengths: tuple[int, ...] | None = None,
    scales: str = "head",
    times: float = 1.0,
    **extras: Any,
) -> Short:
    """Random numbers, rounded with scales of one kind, which are `times` as large as those that would fit."""
    case = case_of(
        replace(shape, features=replace(shape.features, kv="as_queries", token_scales=False)), lengths, **extras
    )
    dtype = next(dtype for dtype, kind in CACHE_TYPES.items() if kind is shape.features.kv)
    found = []
    for tensor in (case.k, case.v):
        numbers = tensor.float().nan_to_num(nan=0.0)
        scale = scale_of(numbers, scales, BOUNDS[dtype][1])
        short = quantize(numbers, as_factor(scale), dtype)
        scale = scale * times
        found.append((short, scale, (short.float() * as_factor(scale)).double()))
    (k, scale_k, wide_k), (v, scale_v, wide_v) = found
    for entry, length in enumerate(case.lengths):
        for tensor, scale in ((k, scale_k), (v, scale_v)):
            tensor[entry, :, length:] = POISON[dtype]
            if scales == "token":
                scale[entry, length:] = float("nan")
    extras_of = replace(case.extras, scale_k=scale_k, scale_v=scale_v)
    return Short(k=k, v=v, extras=extras_of, wide=replace(case, shape=shape, k=wide_k, v=wide_v))


def scale_of(numbers: Tensor, scales: str, most: float) -> Tensor:
    """Those of numbers [batch, heads, rows, dim], so that the largest of each part becomes the largest of the type."""
    if scales == "token":
        return numbers.abs().amax(-1).clamp_min(1e-3).transpose(1, 2).contiguous() / most
    sizes = {"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "batch": (2, 3)}[scales]
    found = numbers.abs().amax(sizes, keepdim=True).flatten(1)
    return found / most


def run(config: KernelConfig, short: Short) -> tuple[Tensor, Tensor]:
    case = short.wide
    assert not KERNEL.violations(config, case.shape, HOPPER)
    out = torch.full((*case.q.shape[:3], case.shape.head_dim_v), float("nan"), dtype=case.q.dtype, device=DEVICE)
    lse = torch.full(case.q.shape[:3], float("nan"), dtype=torch.float32, device=DEVICE)
    KERNEL.bind(config, case.shape)(case.q, short.k, short.v, out, lse, case.shape.head_dim**-0.5, short.extras)
    return out, lse


def check(config: KernelConfig, short: Short) -> None:
    assert_close(run(config, short), expected(short.wide), short.wide.shape.dtype)


def in_pages(short: Short, num_pages: int = 40) -> Short:
    """The same keys in shuffled pages, with poison in all others."""
    shape, size = short.wide.shape, short.wide.shape.features.page_size
    per_entry = -(-shape.seqlen_k // size)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))
    table = order[: shape.batch * per_entry].reshape(shape.batch, per_entry).to(torch.int32)

    def pages(cache: Tensor, poison: float) -> Tensor:
        """Of [batch, heads, rows, ..]."""
        result = torch.full((num_pages, cache.shape[1], size, *cache.shape[3:]), poison, dtype=torch.float32)
        for entry in range(shape.batch):
            for place, page in enumerate(table[entry].tolist()):
                rows = cache[entry, :, place * size : (place + 1) * size]
                result[page, :, : rows.shape[1]] = rows.float().cpu()
        return result.to(cache.dtype).to(DEVICE)

    extras = short.extras
    if shape.features.token_scales:
        k_scales, v_scales = (
            pages(scale.transpose(1, 2), float("nan")).transpose(1, 2).contiguous()
            for scale in (extras.scale_k, extras.scale_v)
            if scale is not None
        )
        extras = replace(extras, scale_k=k_scales, scale_v=v_scales)
    k, v = (pages(cache, POISON[cache.dtype]) for cache in (short.k, short.v))
    for entry, length in enumerate(short.wide.lengths):  # no kernel reads the numbers of pages that hold no key
        table[entry, -(-length // size) :] = 1 << 30
    return replace(short, k=k, v=v, extras=replace(extras, block_table=table.to(DEVICE)))


def words(scales: str) -> str:
    return "token_scales" if scales == "token" else ""


@runs
@pytest.mark.few(8)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_all_kinds(kind: str, scales: str, dtype: str, splits: int) -> None:
    shape = short_shape(kind, words(scales), batch=3, seqlen_q=2, causal=Causal.LOWER_RIGHT, dtype=dtype)
    check(config_of(splits=splits), short_of(shape, (90, 0, 33), scales))


@runs
@pytest.mark.parametrize("kind", KINDS)
def test_without_scales_the_numbers_are_what_they_are(kind: str) -> None:
    short = short_of(short_shape(kind), scales="tensor")
    bare = replace(
        short,
        extras=replace(short.extras, scale_k=None, scale_v=None),
        wide=replace(short.wide, q=short.wide.q / 64, k=short.k.double(), v=short.v.double()),
    )
    check(config_of(), bare)


@runs
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_the_type_is_exact(kind: str) -> None:
    """One key, whose value is the output; all 256 numbers but NaN in turns."""
    shape = short_shape(kind, batch=8, seqlen_k=1, head_dim=32, num_heads=2, num_heads_kv=1)
    bits = torch.arange(256, device=DEVICE).to(torch.uint8).reshape(8, 1, 1, 32)
    values = bits.view(torch.float8_e4m3fn if kind == "e4m3" else torch.int8)
    numbers = values.float().nan_to_num(nan=0.0)
    values = numbers.to(values.dtype)
    case = Case(
        shape=shape,
        q=torch.ones(8, 2, 1, 32, dtype=torch.float16, device=DEVICE),
        k=numbers.double(),
        v=numbers.double(),
        lengths=(1,) * 8,
        extras=Extras(cache_seqlens=torch.ones(8, dtype=torch.int32, device=DEVICE)),
    )
    out, lse = run(config_of(splits=1), Short(k=values, v=values, extras=case.extras, wide=case))
    assert torch.equal(out.float(), numbers.expand_as(out))
    torch.testing.assert_close(lse.double(), expected(case)[1])


@runs
@pytest.mark.few(4)
@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("page_size", "block_n"), [(1, 32), (16, 32), (64, 32), (256, 64)])
def test_paged_cache(page_size: int, block_n: int, kind: str, scales: str) -> None:
    shape = short_shape(kind, f"page={page_size} {words(scales)}", batch=3, seqlen_q=2, causal=Causal.LOWER_RIGHT)
    short = short_of(shape, (0, 90, 47), scales)
    check(config_of(splits=2, block_n=block_n), in_pages(short, 40 if page_size > 1 else 300))


@runs
@pytest.mark.few(3)
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (7, 1), (20, 1)])
@pytest.mark.parametrize(
    ("block_m", "head_dim", "head_dim_v"), [(16, 16, 32), (16, 64, 64), (32, 40, 24), (32, 64, 64), (64, 32, 72)]
)
def test_groups_blocks_and_head_dimensions(
    block_m: int, head_dim: int, head_dim_v: int, heads: tuple[int, int]
) -> None:
    sizes = {"num_heads": heads[0], "num_heads_kv": heads[1], "head_dim": head_dim, "head_dim_v": head_dim_v}
    check(config_of(block_m, splits=2), short_of(short_shape("e4m3", batch=1, seqlen_q=3, **sizes)))


@runs
@pytest.mark.few(3)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("window", ["window=20:-1", "window=0:0", "window=-1:3", "window=40:2"])
def test_windows(window: str, causal: Causal) -> None:
    check(config_of(splits=2), short_of(short_shape("int8", window, seqlen_q=3, causal=causal), (90, 34)))


@runs
@pytest.mark.parametrize("scales", ["head", "token"])
def test_soft_cap_and_alibi(scales: str) -> None:
    slopes = torch.tensor([[0.5, 0.25, 0.125, 0.0625]], device=DEVICE)
    shape = short_shape("int8", f"softcap alibi {words(scales)}", seqlen_q=3, causal=Causal.LOWER_RIGHT)
    check(config_of(splits=2), short_of(shape, None, scales, softcap=1.5, alibi_slopes=slopes))


@runs
def test_a_tree_of_drafts() -> None:
    shape = short_shape("e4m3", str(MaskKind.TREE), seqlen_q=9, seqlen_k=60)
    check(config_of(splits=4), short_of(shape, (60, 41), tree_mask=words_of([NINE_TOKENS] * 2)))


@runs
@pytest.mark.parametrize("scales", ["tensor", "token"])
@pytest.mark.parametrize("factor", [1e6, 1e30, 1e-30])
def test_queries_that_float16_cannot_hold(factor: float, scales: str) -> None:
    """The scales of keys bring the scores back."""
    shape = short_shape("e4m3", words(scales), dtype="bfloat16")
    short = short_of(shape, None, scales)
    wide, scale = short.wide, short.extras.scale_k
    assert scale is not None
    queries = wide.q * factor
    keys = replace(short.extras, scale_k=scale / factor)
    truth = replace(wide, q=queries, k=(short.k.double() * as_factor(scale.double() / factor)))
    check(config_of(splits=2), replace(short, extras=keys, wide=truth))


@runs
@pytest.mark.parametrize("times", [1e-8, 1e8])
@pytest.mark.parametrize("scales", ["head", "token"])
def test_scales_of_values_far_from_one(scales: str, times: float) -> None:
    shape = short_shape("int8", words(scales), dtype="bfloat16")
    short = short_of(shape, None, scales)
    scale = short.extras.scale_v
    assert scale is not None
    values = replace(short.extras, scale_v=scale * times)
    check(config_of(splits=2), replace(short, extras=values, wide=replace(short.wide, v=short.wide.v * times)))


@runs
def test_scales_of_tokens_next_to_each_other_may_differ_by_millions() -> None:
    """All weight is on keys with the smallest scales, in a tile with the largest."""
    sizes = {"batch": 1, "num_heads": 2, "num_heads_kv": 1, "seqlen_k": 32, "dtype": "bfloat16"}
    shape = short_shape("int8", "token_scales", **sizes)
    short = short_of(shape, None, "token")
    scale = short.extras.scale_v
    assert scale is not None
    changed = scale.clone()
    changed[:, ::2] *= 1e-7
    keys = short.wide.k.clone()
    keys[:, :, 1::2], keys[:, :, ::2] = -100.0, 100.0  # a difference of 800 in the exponent
    k_scale = torch.full_like(scale, 1.0)
    short = replace(
        short,
        k=keys.to(torch.int8),
        extras=replace(short.extras, scale_k=k_scale, scale_v=changed),
        wide=replace(
            short.wide, q=torch.ones_like(short.wide.q), k=keys, v=short.v.double() * as_factor(changed.double())
        ),
    )
    check(config_of(splits=1), short)


def of_far_scores(short: Short, exponent: int, magnitude: int) -> Short:
    """Return a case in which each query sees one key far above the others, with a score of about 2 to the exponent, and
    scales of values of 2 to the magnitude."""
    wide, scale = short.wide, short.extras.scale_v
    assert scale is not None
    keys = torch.randint(-100, 100, wide.k.shape, device=wide.k.device).double()
    keys[:, :, 5] = 127.0
    score = wide.q.shape[3] * 127.0 * wide.q.shape[3] ** -0.5 / math.log(2.0)  # of ones, in base 2
    factor, step = 2.0**exponent * 1.3 / score, 2.0**magnitude
    extras = replace(short.extras, scale_k=torch.full_like(scale, factor), scale_v=torch.full_like(scale, step))
    factor = torch.tensor(factor).float().double()
    truth = replace(wide, q=torch.ones_like(wide.q), k=keys * factor, v=short.v.double() * step)
    return replace(short, k=keys.to(torch.int8), extras=extras, wide=truth)


@runs
@pytest.mark.parametrize("exponent", [20, 24, 25, 26, 27, 28, 30])
@pytest.mark.parametrize("magnitude", [-6, -5, -3, 0])
def test_scores_that_float32_rounds_by_more_than_the_scales(exponent: int, magnitude: int) -> None:
    sizes = {"batch": 1, "num_heads": 2, "num_heads_kv": 1, "seqlen_k": 32, "dtype": "float16"}
    short = short_of(short_shape("int8", "token_scales", **sizes), None, "token")
    check(config_of(splits=1), of_far_scores(short, exponent, magnitude))


@runs
def test_many_keys_of_little_weight_count() -> None:
    """Their probabilities are below what float16 holds: together they are a quarter of the output."""
    shape = short_shape("int8", batch=1, num_heads=1, num_heads_kv=1, seqlen_k=4096, head_dim=16)
    case = case_of(shape_of(Features(cached=True), batch=1, num_heads=1, num_heads_kv=1, seqlen_k=4096))
    keys = torch.zeros(1, 1, 4096, 16, dtype=torch.int8, device=DEVICE)
    keys[:, :, 0, 0] = 38  # exp(9.5) = 13,360 times the weight of a key
    values = torch.full_like(keys, 100)
    values[:, :, 0] = 0
    queries = torch.ones_like(case.q)
    wide = replace(case, shape=shape, q=queries, k=keys.double(), v=values.double())
    out, _ = run(config_of(splits=1, block_n=256), Short(k=keys, v=values, extras=case.extras, wide=wide))
    wanted, _ = expected(wide)
    assert (out.double() - wanted).norm() <= 6e-4 * wanted.norm()


@pytest.mark.gpu
@runs
def test_nan_in_a_cache_is_not_lost() -> None:
    """The interpreter reads the NaN of e4m3 as 480."""
    short = short_of(short_shape("e4m3"))
    for cache in (short.k, short.v):
        other = cache.clone()
        other.view(torch.uint8)[0, 0, 3, 5] = 0x7F
        caches = {"k": other} if cache is short.k else {"v": other}
        out, _ = run(config_of(), replace(short, **caches))
        group = out[0, :2]
        assert bool(torch.isnan(group if cache is short.k else group[..., 5]).all())
        assert not bool(torch.isnan(out[0, 2:]).any() | torch.isnan(out[1]).any())


@runs
def test_layouts_are_free() -> None:
    short = short_of(short_shape("e4m3", dtype="bfloat16"))
    wanted, _ = expected(short.wide)
    q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (short.wide.q, short.k, short.v))
    out = torch.full_like(q, float("nan"))
    KERNEL.bind(config_of(), short.wide.shape)(q, k, v, out, None, 0.25, short.extras)
    assert (out.double() - wanted).norm() <= 4e-3 * wanted.norm()
    odd = torch.zeros(*v.shape[:3], 17, dtype=v.dtype)[..., :16]
    assert "rows of the values must begin at even addresses" in (KERNEL.layout_problem(q, k, odd) or "")
    assert "rows of the keys must begin at even addresses" in (KERNEL.layout_problem(q, odd, v) or "")
    far = torch.empty_strided((1, 1, 1, 16), (1 << 24, 1 << 24, 1 << 23, 1), dtype=v.dtype, device="meta")
    assert "less than 8388608 elements apart" in (KERNEL.layout_problem(q, far, v) or "")
    assert KERNEL.layout_problem(q, k, v) is None
