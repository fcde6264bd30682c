"""The canary accepts what the portable kernels compute, in Triton's interpreter or on a GPU."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.runtime.selection import canary
from tests.support.attention.feature_cases import WORDS, extras_of, packed, shape_of, tensors
from tests.support.attention.masked_rows import masked_rows
from tests.support.triton_modes import DEVICE, runs

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
]
TILE = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 1}
SPLIT = {"dq_block_m": 64, "dq_block_n": 32, "dq_num_warps": 4, "dq_num_stages": 1}
FORWARD = KernelConfig.of("flash_fwd_general", TILE)
BACKWARD = [KernelConfig.of("flash_bwd_split", TILE | SPLIT), KernelConfig.of("flash_bwd_fused", TILE | {"reduce": 0})]


@pytest.fixture(autouse=True)
def _own_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def check(shape: AttentionShape, extras: Extras, qkv: list[torch.Tensor]) -> None:
    """Compare a forward and both backwards as their first uses are."""
    scale, q = shape.head_dim**-0.5, qkv[0]
    lse_sizes = q.shape[1:3] if shape.features.varlen else q.shape[:3]
    for config in (FORWARD, *BACKWARD):
        own = shape if config is FORWARD else replace(shape, direction=Direction.BACKWARD)
        out, lse = torch.zeros_like(q), torch.full(lse_sizes, -math.inf, device=DEVICE)
        given: tuple[Any, ...] = (*qkv, out, lse)
        if config is not FORWARD:
            given = *given, torch.zeros_like(q), *(torch.zeros_like(tensor) for tensor in qkv)
        rows = canary.sampled(own, extras, scale, given)
        bound: Any = get_kernel(config.kernel).bind(config, own)
        bound(*given, scale, extras)
        assert rows
        assert canary.problem_of(config, own, extras, scale, given, rows) is None, config


@runs
@pytest.mark.few(6)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT, Causal.LOWER_RIGHT])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("features", [*WORDS, "window=20:9 softcap alibi dropout"])
def test_features(features: str, size: float, dtype: str, causal: Causal) -> None:
    shape = shape_of(features, dtype=dtype, causal=causal)
    q, k, v = tensors(shape)
    check(shape, extras_of(shape), [q * size, k * size, v])


@runs
@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -1e9, -65504.0])
def test_rows_that_finite_numbers_hide(hidden: float) -> None:
    shape = shape_of("additive", dtype="float16")
    mask = masked_rows(70, 90, hidden, torch.float32, device=DEVICE)
    check(shape, Extras(mask=mask), tensors(shape))


@runs
@pytest.mark.parametrize(("dtype", "size"), [("float16", 1e4), ("float32", 1e5)])
def test_scores_that_are_much_less_than_what_they_add_up(dtype: str, size: float) -> None:
    """And masked rows next to whose -2^50 such scores count."""
    shape = shape_of("additive", dtype=dtype, causal=Causal.UPPER_LEFT)
    q, k, v = tensors(shape)
    mask = masked_rows(70, 90, torch.finfo(torch.float32).min, torch.float32, device=DEVICE)
    check(shape, Extras(mask=mask), [q * size, k * size, v])


@runs
def test_packed_sequences() -> None:
    shape = shape_of("varlen window=20:9", dtype="float16", batch=4, seqlen_q=40, seqlen_k=70)
    qkv, extras = packed(shape, (0, 40, 3, 17), (10, 70, 0, 33))
    check(shape, extras, qkv)


@runs
def test_infinite_keys_and_queries() -> None:
    shape = shape_of("softcap", dtype="float16")
    for place in range(2):
        qkv = tensors(shape)
        qkv[place][..., 3, 1] = math.inf
        check(shape, extras_of(shape), qkv)
