"""The Hopper decoding kernel over 8-bit caches: its default, its machine code compiled without a GPU, and its results
where there is one.

What its source computes is tested in test_flash_decode8_hopper_source.py.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.decode8.kernel import FlashDecode8Hopper
from blocktune.kernels.registry import default_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.kernels.values.short_numbers import as_factor
from blocktune.tuner.candidates.space import configs_of
from tests.kernels.portable.decode.test_flash_decode import assert_close, expected
from tests.kernels.portable.decode8.test_flash_decode8 import KINDS, SCALES, Short, in_pages, short_of, words
from tests.support.compiles.measures import compile_resources
from tests.support.hopper_gpu import skip_elsewhere
from tests.support.machine_code.kernels import machine_code, mnemonic
from tests.support.triton_modes import compiled_here

HOPPER = limits_for((9, 0))
KERNEL = FlashDecode8Hopper()


def shape_of(features: str = "kv=e4m3", **changes: Any) -> AttentionShape:
    sizes = {"batch": 8, "num_heads": 32, "num_heads_kv": 8, "seqlen_q": 1, "seqlen_k": 8192, "head_dim": 128}
    sizes |= {"dtype": "bfloat16", "features": Features.parse(f"cached {features}")} | changes
    return AttentionShape(**({"head_dim_v": sizes["head_dim"]} | sizes))


def config_of(block_n: int = 128, splits: int = 4, warps: int = 8, stream: int = 1) -> KernelConfig:
    return KernelConfig(KERNEL.name, 16, block_n, warps, 1, (("splits", splits), ("stream", stream)))


# ---- rules


def test_it_is_the_default_up_to_16_rows() -> None:
    found = {rows: default_kernel(shape_of(num_heads=8 * rows), HOPPER) for rows in (1, 16, 32, 128)}
    assert {rows: kernel and kernel.name for rows, kernel in found.items()} == {
        1: KERNEL.name,
        16: KERNEL.name,
        32: "flash_decode8_ring",
        128: "flash_decode8",
    }


@pytest.mark.parametrize(("batch", "splits"), [(1, 16), (8, 4), (64, 1)])
def test_two_blocks_share_a_multiprocessor_where_shares_are_long(batch: int, splits: int) -> None:
    config = KERNEL.default_config(shape_of(batch=batch), HOPPER)
    assert (config.block_n, config.num_warps, config.parameters["splits"]) == (128, 8, splits)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("seqlen_k", [1, 1000, 1 << 20])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_default_config_breaks_no_rule(head_dim: int, seqlen_k: int, rows: int) -> None:
    shape = shape_of(head_dim=head_dim, seqlen_k=seqlen_k, num_heads=8 * rows)
    assert KERNEL.violations(KERNEL.default_config(shape, HOPPER), shape, HOPPER) == ()


def test_rows_of_bytes_are_counted_in_words() -> None:
    q = torch.empty(1, 4, 1, 64, dtype=torch.float16)
    k, odd = (torch.empty(1, 2, 100, columns, dtype=torch.int8)[..., :64] for columns in (80, 72))
    assert KERNEL.layout_problem(q, k, k) is None
    assert "16 must divide its address and its strides" in (KERNEL.layout_problem(q, k, odd) or "")
    shape = shape_of("kv=int8", batch=1, num_heads=4, num_heads_kv=2, seqlen_k=100, head_dim=64, dtype="float16")
    trailing = KERNEL.bind(config_of(splits=1), shape).trailing(q, k, k, q)
    assert trailing[3:6] == (2 * 100 * 5, 100 * 5, 5)
    assert trailing[-2:] == (1, 4)  # the units of strides, the second in words


# ---- machine code


@compiled_here
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("features", "block_n", "warps", "rows"),
    [("kv=e4m3", 128, 8, 4), ("kv=int8 token_scales", 256, 8, 4), ("kv=e4m3 page=16 token_scales", 128, 4, 16)],
)
def test_no_config_spills(features: str, block_n: int, warps: int, rows: int) -> None:
    shape = shape_of(features, num_heads=8 * rows)
    found = compile_resources(KERNEL, config_of(block_n, warps=warps), shape, (9, 0))
    assert found.spill_bytes == 0
    assert found.registers * 32 * warps * (2 if block_n == 128 else 1) <= 65536  # blocks of a multiprocessor


@compiled_here
def test_numbers_are_converted_in_pairs_and_keys_leave_the_cache_first(tmp_path: Path) -> None:
    """Of 64 words a thread in two places: two conversions a word, and no load of keys that Triton takes apart."""
    found = Counter(mnemonic(text) for _, text in machine_code(KERNEL, config_of(256), shape_of(), tmp_path))
    assert found["LDG.E.EF.128"] == 32
    assert 128 <= sum(count for name, count in found.items() if name.startswith("F2FP.F16.E4M3")) <= 136


# ---- results


def on_gpu(test: Any) -> Any:
    """A kernel that hangs blocks its process for good: the timeout kills it."""
    for mark in (pytest.mark.gpu, pytest.mark.timeout(120, method="thread"), pytest.mark.usefixtures("hopper_gpu")):
        test = mark(test)
    return test


@pytest.fixture
def hopper_gpu() -> None:
    skip_elsewhere(KERNEL)


def check(config: KernelConfig, short: Short) -> None:
    case, shape = short.wide, short.wide.shape
    assert KERNEL.violations(config, shape, HOPPER) == ()
    out = torch.full((*case.q.shape[:3], shape.head_dim_v), float("nan"), dtype=case.q.dtype, device="cuda")
    lse = torch.full(case.q.shape[:3], float("nan"), device="cuda")
    KERNEL.bind(config, shape)(case.q, short.k, short.v, out, lse, shape.head_dim**-0.5, short.extras)
    assert_close((out, lse), expected(case), shape.dtype)


@on_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_all_kinds(kind: str, scales: str, dtype: str) -> None:
    features = f"kv={kind} {words(scales)}"
    shape = shape_of(features, batch=3, seqlen_q=2, seqlen_k=1500, causal=Causal.LOWER_RIGHT, dtype=dtype)
    short = short_of(shape, (1500, 0, 333), scales)
    for splits in (1, 4):
        check(config_of(splits=splits), short)


@on_gpu
@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_every_tile(kind: str, head_dim: int, rows: int) -> None:
    sizes = {"batch": 2, "num_heads": 2 * rows, "num_heads_kv": 2, "seqlen_k": 700, "head_dim": head_dim}
    short = short_of(shape_of(f"kv={kind}", **sizes))
    for config in configs_of(KERNEL):
        if config.parameters["splits"] in (1, 8) and not KERNEL.violations(config, short.wide.shape, HOPPER):
            check(config, short)


@on_gpu
@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize("page_size", [16, 32, 256])
def test_pages(page_size: int, scales: str) -> None:
    shape = shape_of(f"kv=e4m3 page={page_size} {words(scales)}", batch=3, seqlen_k=500)
    check(config_of(splits=2), in_pages(short_of(shape, (0, 500, 77), scales), 120))


@on_gpu
@pytest.mark.parametrize("factor", [1e6, 1e30, 1e-30])
def test_queries_that_float16_cannot_hold(factor: float) -> None:
    short = short_of(shape_of(batch=2, seqlen_k=300))
    scale = short.extras.scale_k
    assert scale is not None
    truth = replace(short.wide, q=short.wide.q * factor, k=short.k.double() * as_factor(scale.double() / factor))
    check(config_of(), replace(short, extras=replace(short.extras, scale_k=scale / factor), wide=truth))
