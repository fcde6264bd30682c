"""The source of the ring, decoding over 8-bit caches with many rows, run on the CPU by tests/support/gluon/tensors.py,
against a float64 reference of the numbers that the caches stand for.

test_flash_decode8_ring.py compiles it, and compares results where a GPU is.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.decode8.ring.kernel import FlashDecode8Ring
from blocktune.kernels.portable.decode.launch import WORK
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.kernels.values.short_numbers import as_factor
from tests.kernels.portable.decode.test_flash_decode import assert_close, expected
from tests.kernels.portable.decode8.test_flash_decode8 import KINDS, SCALES, Short, in_pages, short_of, words
from tests.support.gluon import tensors as gluon_tensors

pytestmark = [pytest.mark.triton_free, pytest.mark.usefixtures("decodes_on_the_cpu")]

HOPPER = limits_for((9, 0))
KERNEL = FlashDecode8Ring()


def shape_of(kind: str, features: str = "", **changes: Any) -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 8, "num_heads_kv": 2, "seqlen_q": 5, "seqlen_k": 500, "head_dim": 128}
    sizes |= {"dtype": "float16", "features": Features.parse(f"cached kv={kind} {features}")} | changes
    return AttentionShape(**sizes)


def config_of(shape: AttentionShape, splits: int = 2, stages: int = 3) -> KernelConfig:
    rows = shape.group_size * shape.seqlen_q
    block_m = next(block for block in KERNEL.parameters["block_m"] if rows <= block)
    return KernelConfig(KERNEL.name, block_m, 64, 4, stages, (("splits", splits), ("overlap", int(splits > 1))))


def merged(work: torch.Tensor, splits: int, shape: AttentionShape) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and log-sum-exp of the shares in a workspace, as `merge_splits_kernel` merges them."""
    rows, width = (shape.batch, shape.num_heads, shape.seqlen_q), shape.head_dim_v
    o, m, l = work.double().split([work.numel() // (width + 2) * size for size in (width, 1, 1)])
    m, l = m.view(splits, *rows), l.view(splits, *rows)
    best = m.amax(0)
    weights = torch.exp2(m - best.nan_to_num(neginf=0.0))
    total = (weights * l).sum(0)
    out = (weights[..., None] * o.view(splits, *rows, width)).sum(0)
    lse = (best + total.log2()) * torch.log(torch.tensor(2.0))
    return out / total.where(total > 0, 1.0)[..., None], lse.nan_to_num(nan=-torch.inf)


def run(config: KernelConfig, short: Short) -> tuple[torch.Tensor, torch.Tensor]:
    case, shape = short.wide, short.wide.shape
    assert KERNEL.violations(config, shape, HOPPER) == ()
    assert KERNEL.layout_problem(case.q, short.k, short.v) is None
    out = torch.full((*case.q.shape[:3], shape.head_dim_v), float("nan"), dtype=case.q.dtype)
    lse = torch.full(case.q.shape[:3], float("nan"))
    launch = KERNEL.bind(config, shape)
    leading = launch.leading(case.q, short.k, short.v, out, lse, shape.head_dim**-0.5, short.extras)
    arguments = (*leading, *launch.trailing(case.q, short.k, short.v, out))
    gluon_tensors.run(launch.function, launch.grid, arguments, config.num_warps)
    splits = config.parameters["splits"]
    if splits > 1:
        found, lse = merged(arguments[WORK], splits, shape)
        out = found.to(out.dtype)
    return out, lse.float()


def check(config: KernelConfig, short: Short) -> None:
    assert_close(run(config, short), expected(short.wide), short.wide.shape.dtype)


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_all_kinds(kind: str, scales: str, dtype: str) -> None:
    shape = shape_of(kind, words(scales), batch=3, causal=Causal.LOWER_RIGHT, dtype=dtype)
    check(config_of(shape), short_of(shape, (500, 0, 33), scales))


@pytest.mark.few(4)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("stages", [3, 5])
@pytest.mark.parametrize("seqlen_q", [1, 4, 7, 16])
def test_rows_and_places_of_the_ring(seqlen_q: int, stages: int, splits: int) -> None:
    shape = shape_of("int8", seqlen_q=seqlen_q, seqlen_k=1000)
    check(config_of(shape, splits, stages), short_of(shape, (1000, 64)))


@pytest.mark.parametrize("causal", list(Causal))
def test_what_every_query_sees(causal: Causal) -> None:
    shape = shape_of("e4m3", seqlen_q=16, causal=causal)
    check(config_of(shape), short_of(shape, (500, 7)))


@pytest.mark.few(3)
@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_paged_cache(page_size: int, scales: str) -> None:
    shape = shape_of("e4m3", f"page={page_size} {words(scales)}", batch=3, causal=Causal.LOWER_RIGHT)
    check(config_of(shape), in_pages(short_of(shape, (0, 500, 77), scales), 120))


@pytest.mark.parametrize("factor", [1e6, 1e30, 1e-30])
def test_queries_that_float16_cannot_hold(factor: float) -> None:
    """The scales of keys bring the scores back."""
    short = short_of(shape_of("e4m3", dtype="bfloat16"))
    scale = short.extras.scale_k
    assert scale is not None
    truth = replace(short.wide, q=short.wide.q * factor, k=short.k.double() * as_factor(scale.double() / factor))
    check(config_of(truth.shape), replace(short, extras=replace(short.extras, scale_k=scale / factor), wide=truth))


@pytest.mark.parametrize("times", [1e-8, 1e8])
@pytest.mark.parametrize("scales", ["head", "token"])
def test_scales_of_values_far_from_one(scales: str, times: float) -> None:
    short = short_of(shape_of("int8", words(scales), dtype="bfloat16"), None, scales)
    scale = short.extras.scale_v
    assert scale is not None
    extras = replace(short.extras, scale_v=scale * times)
    check(config_of(short.wide.shape), replace(short, extras=extras, wide=replace(short.wide, v=short.wide.v * times)))
