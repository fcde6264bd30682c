"""The source of the Hopper decoding kernel over 8-bit caches, run on the CPU by tests/support/gluon/tensors.py, against
a float64 reference of the numbers that the caches stand for.

test_flash_decode8_hopper.py compiles it, and compares results where a GPU is.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.decode import kernel as flash_decode_hopper
from blocktune.kernels.hopper.decode8.kernel import FlashDecode8Hopper
from blocktune.kernels.portable.sinks.results import with_sinks
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.kernels.values.short_numbers import as_factor
from tests.kernels.portable.decode.test_flash_decode import assert_close, expected
from tests.kernels.portable.decode8.test_flash_decode8 import (
    KINDS,
    SCALES,
    Short,
    in_pages,
    of_far_scores,
    short_of,
    words,
)
from tests.support.gluon import tensors as gluon_tensors

pytestmark = [pytest.mark.triton_free, pytest.mark.usefixtures("decodes_on_the_cpu")]

HOPPER = limits_for((9, 0))
KERNEL = FlashDecode8Hopper()


def shape_of(kind: str, features: str = "", **changes: Any) -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 1, "seqlen_k": 150, "head_dim": 64}
    sizes |= {"dtype": "float16", "features": Features.parse(f"cached kv={kind} {features}")} | changes
    return AttentionShape(**({"head_dim_v": sizes["head_dim"]} | sizes))


def config_of(block_n: int = 128, splits: int = 2, warps: int = 4, stream: int = 1) -> KernelConfig:
    return KernelConfig(KERNEL.name, 16, block_n, warps, 1, (("splits", splits), ("stream", stream)))


def run(config: KernelConfig, short: Short, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    def scratch(device: Any, count: int, floats: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((floats,), float("nan")), torch.zeros(count, dtype=torch.int32)

    monkeypatch.setattr(flash_decode_hopper, "scratch", scratch)
    case, shape = short.wide, short.wide.shape
    assert KERNEL.violations(config, shape, HOPPER) == ()
    assert KERNEL.layout_problem(case.q, short.k, short.v) is None
    out = torch.full((*case.q.shape[:3], shape.head_dim_v), float("nan"), dtype=case.q.dtype)
    lse = torch.full(case.q.shape[:3], float("nan"))
    bind: Any = KERNEL.bind if short.extras.sinks is None else KERNEL.bind_with_sinks
    launch = bind(config, shape)
    arguments = launch.arguments(case.q, short.k, short.v, out, lse, shape.head_dim**-0.5, short.extras)
    gluon_tensors.run(launch.function, launch.grid, arguments, config.num_warps)
    return out, lse


def check(config: KernelConfig, short: Short, monkeypatch: pytest.MonkeyPatch) -> None:
    right, sinks = expected(short.wide), short.extras.sinks
    right = right if sinks is None else with_sinks(*right, sinks)
    assert_close(run(config, short, monkeypatch), right, short.wide.shape.dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_all_kinds(kind: str, scales: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(kind, words(scales), batch=3, seqlen_q=2, causal=Causal.LOWER_RIGHT, dtype=dtype)
    check(config_of(), short_of(shape, (150, 0, 33), scales), monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize(("block_n", "warps"), [(64, 4), (256, 8)])
def test_blocks_and_head_dimensions(
    block_n: int, warps: int, head_dim: int, head_dim_v: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of(kind, head_dim=head_dim, head_dim_v=head_dim_v, num_heads=8, num_heads_kv=1, seqlen_k=300)
    check(config_of(block_n, 1, warps, stream=0), short_of(shape), monkeypatch)


@pytest.mark.parametrize("heads", [(2, 2), (7, 1), (16, 1)])
def test_groups_of_query_heads(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    check(config_of(), short_of(shape_of("e4m3", num_heads=heads[0], num_heads_kv=heads[1])), monkeypatch)


@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_paged_cache(page_size: int, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of("e4m3", f"page={page_size} {words(scales)}", batch=3, seqlen_q=2, causal=Causal.LOWER_RIGHT)
    check(config_of(), in_pages(short_of(shape, (0, 150, 77), scales)), monkeypatch)


def test_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of entries without keys."""
    sinks = torch.tensor((0.5, -2.0, float("-inf"), 200.0)).bfloat16()
    shape = shape_of("int8", batch=3, seqlen_q=2, causal=Causal.LOWER_RIGHT)
    check(config_of(), short_of(shape, (0, 150, 77), sinks=sinks), monkeypatch)


@pytest.mark.parametrize("factor", [1e6, 1e30, 1e-30])
def test_queries_that_float16_cannot_hold(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of keys bring the scores back."""
    short = short_of(shape_of("e4m3", dtype="bfloat16"))
    scale = short.extras.scale_k
    assert scale is not None
    truth = replace(short.wide, q=short.wide.q * factor, k=short.k.double() * as_factor(scale.double() / factor))
    extras = replace(short.extras, scale_k=scale / factor)
    check(config_of(), replace(short, extras=extras, wide=truth), monkeypatch)


@pytest.mark.parametrize("times", [1e-8, 1e8])
@pytest.mark.parametrize("scales", ["head", "token"])
def test_scales_of_values_far_from_one(scales: str, times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    short = short_of(shape_of("int8", words(scales), dtype="bfloat16"), None, scales)
    scale = short.extras.scale_v
    assert scale is not None
    extras = replace(short.extras, scale_v=scale * times)
    wide = replace(short.wide, v=short.wide.v * times)
    check(config_of(), replace(short, extras=extras, wide=wide), monkeypatch)


@pytest.mark.parametrize("exponent", [24, 25, 26, 27, 28])
def test_scores_that_float32_rounds_by_more_than_the_scales(exponent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    short = short_of(shape_of("int8", "token_scales", batch=1, dtype="float16"), None, "token")
    for magnitude in (-6, -5, 0):
        check(config_of(), of_far_scores(short, exponent, magnitude), monkeypatch)


def test_16_bits_are_left_to_others() -> None:
    shape = replace(shape_of("int8"), features=Features(cached=True))
    assert "reads caches of 8 bits, but got keys and values of float16" in (KERNEL.unsupported(shape, HOPPER) or "")
