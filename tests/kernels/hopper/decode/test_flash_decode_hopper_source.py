"""The source of the Hopper decoding kernel, run on the CPU by tests/support/gluon/tensors.py, against a float64
reference.

What the compiler makes of it is not seen here; test_flash_decode_hopper.py reads the machine code, and compares results
where a GPU is.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.decode import kernel as flash_decode_hopper
from blocktune.kernels.hopper.decode.kernel import FlashDecodeHopper
from blocktune.kernels.portable.sinks.results import with_sinks
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.kernels.portable.decode.test_flash_decode import Case, assert_close, case_of, expected, paged
from tests.support.gluon import tensors as gluon_tensors

pytestmark = [pytest.mark.triton_free, pytest.mark.usefixtures("decodes_on_the_cpu")]

HOPPER = limits_for((9, 0))
KERNEL = FlashDecodeHopper()
CACHED = Features(cached=True)


def shape_of(features: Features | None = None, **changes: Any) -> AttentionShape:
    sizes = {"batch": 1, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 1, "seqlen_k": 150, "head_dim": 64}
    sizes |= {"dtype": "float16", "features": features or Features()} | changes
    return AttentionShape(**({"head_dim_v": sizes["head_dim"]} | sizes))


def config_of(block_n: int = 64, splits: int = 4, warps: int = 4, stream: int = 1) -> KernelConfig:
    return KernelConfig(KERNEL.name, 16, block_n, warps, 1, (("splits", splits), ("stream", stream)))


def run(config: KernelConfig, case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp; the workspace is NaN before, and the counters are zero before and after."""
    counters: list[torch.Tensor] = []

    def scratch(device: Any, count: int, floats: int) -> tuple[torch.Tensor, torch.Tensor]:
        counters.append(torch.zeros(count, dtype=torch.int32))
        return torch.full((floats,), float("nan")), counters[-1]

    monkeypatch.setattr(flash_decode_hopper, "scratch", scratch)
    shape = case.shape
    assert KERNEL.violations(config, shape, HOPPER) == ()
    assert KERNEL.layout_problem(case.q, case.k, case.v) is None
    out = torch.full((*case.q.shape[:3], shape.head_dim_v), float("nan"), dtype=case.q.dtype)
    lse = torch.full(case.q.shape[:3], float("nan"))
    sunk = case.extras.sinks is not None
    launch: Any = (KERNEL.bind_with_sinks if sunk else KERNEL.bind)(config, shape)
    given = (case.extras,) if shape.features or sunk else ()
    arguments = launch.arguments(case.q, case.k, case.v, out, lse, shape.head_dim**-0.5, *given)
    gluon_tensors.run(launch.function, launch.grid, arguments, config.num_warps)
    assert len(counters) == (config.parameters["splits"] > 1)
    assert not any(counter.any() for counter in counters)
    return out, lse


def check(config: KernelConfig, case: Case, monkeypatch: pytest.MonkeyPatch, reference: Case | None = None) -> None:
    right, sinks = expected(reference or case), case.extras.sinks
    right = right if sinks is None else with_sinks(*right, sinks)
    assert_close(run(config, case, monkeypatch), right, case.shape.dtype)


@pytest.mark.parametrize("splits", [1, 2, 8, 64])
def test_splits_and_more_than_tiles(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(config_of(splits=splits), case_of(shape_of()), monkeypatch)


@pytest.mark.parametrize("seqlen_k", [1, 63, 64, 65, 129])
def test_lengths_around_the_edges_of_tiles(seqlen_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(config_of(splits=2), case_of(shape_of(seqlen_k=seqlen_k)), monkeypatch)


@pytest.mark.parametrize(("block_n", "warps"), [(64, 4), (128, 4), (128, 8), (256, 8)])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 128), (128, 64)])
def test_blocks_and_head_dimensions(
    block_n: int, warps: int, head_dim: int, head_dim_v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of(num_heads=2, num_heads_kv=1, head_dim=head_dim, head_dim_v=head_dim_v, dtype="bfloat16")
    check(config_of(block_n, 1, warps, stream=0), case_of(shape), monkeypatch)


def in_wider_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as columns of a wider one, which has NaN next to them."""
    *outer, dim = tensor.shape
    wider = torch.full((*outer, dim + 16), float("nan"), dtype=tensor.dtype)
    wider[..., :dim] = tensor
    return wider[..., :dim]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 24), (40, 40), (56, 72), (72, 56), (96, 96), (120, 104)])
def test_columns_that_fill_no_tile(
    head_dim: int, head_dim_v: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies next to the columns of a head is neither read nor written."""
    case = case_of(shape_of(head_dim=head_dim, head_dim_v=head_dim_v))
    wide = replace(case, q=in_wider_rows(case.q), k=in_wider_rows(case.k), v=in_wider_rows(case.v))
    check(config_of(splits=splits), wide, monkeypatch, case)


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_of_columns_that_fill_no_tile(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    features = Features(cached=True, page_size=page_size)
    shape = shape_of(features, batch=3, seqlen_q=2, head_dim=88, head_dim_v=72, causal=Causal.LOWER_RIGHT)
    case = case_of(shape, (0, 150, 77))
    check(config_of(splits=2), paged(case, 80), monkeypatch, case)


@pytest.mark.parametrize("heads", [(2, 2), (7, 1), (16, 2), (16, 1)])
def test_groups_of_query_heads(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    check(config_of(), case_of(shape_of(num_heads=heads[0], num_heads_kv=heads[1])), monkeypatch)


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("seqlen_q", [2, 7])
def test_few_queries(seqlen_q: int, causal: Causal, monkeypatch: pytest.MonkeyPatch) -> None:
    check(config_of(), case_of(shape_of(seqlen_q=seqlen_q, seqlen_k=150, causal=causal)), monkeypatch)


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("seqlen_q", "splits"), [(1, 4), (4, 4), (4, 1)])
def test_cache_lengths(splits: int, causal: Causal, seqlen_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty, fuller and full entries, and one with fewer keys than queries; NaN behind all of them."""
    shape = shape_of(CACHED, batch=5, num_heads=2, num_heads_kv=1, seqlen_q=seqlen_q, causal=causal)
    check(config_of(splits=splits), case_of(shape, (0, 150, 133, 2, 64)), monkeypatch)


SINKS = (0.5, -2.0, float("-inf"), 200.0)
"""Of four heads: next to the last one nothing is left of the keys."""


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("heads_kv", "seqlen_q"), [(2, 1), (1, 3)])
def test_sinks(heads_kv: int, seqlen_q: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of entries without keys, and of the heads of a group; with features and without."""
    sinks = torch.tensor(SINKS).bfloat16()
    sizes = {"num_heads_kv": heads_kv, "seqlen_q": seqlen_q}
    check(config_of(splits=splits), case_of(shape_of(**sizes), sinks=sinks), monkeypatch)
    cached = shape_of(CACHED, batch=3, causal=Causal.LOWER_RIGHT, **sizes)
    check(config_of(splits=splits), case_of(cached, (0, 150, 77), sinks=sinks), monkeypatch)


@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_paged_cache(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    features = Features(cached=True, page_size=page_size)
    shape = shape_of(features, batch=3, seqlen_q=2, causal=Causal.LOWER_RIGHT)
    case = case_of(shape, (0, 150, 77))
    check(config_of(splits=2), paged(case, 80), monkeypatch, case)


def test_layouts_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(shape_of())
    q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (case.q, case.k, case.v))
    turned = Case(shape=case.shape, q=q, k=k, v=v, lengths=case.lengths, extras=case.extras)
    check(config_of(), turned, monkeypatch, case)
