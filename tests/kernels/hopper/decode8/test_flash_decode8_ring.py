"""The ring, decoding over 8-bit caches with many rows: its rules and default, its machine code compiled without a GPU,
and its results where there is one.

What its source computes is tested in test_flash_decode8_ring_source.py.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.hopper.decode8.ring.kernel import FlashDecode8Ring
from blocktune.kernels.registry import default_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.kernels.values.short_numbers import as_factor
from blocktune.tuner.candidates.space import configs_of
from blocktune.tuner.occupancy.tiles_by_kernel import on_chip_of
from tests.kernels.portable.decode.test_flash_decode import assert_close, expected
from tests.kernels.portable.decode8.test_flash_decode8 import KINDS, SCALES, Short, in_pages, short_of, words
from tests.support.compiles.measures import compile_resources
from tests.support.hopper_gpu import skip_elsewhere
from tests.support.machine_code.kernels import loops, machine_code, mnemonic
from tests.support.triton_modes import compiled_here

HOPPER = limits_for((9, 0))
KERNEL = FlashDecode8Ring()


def shape_of(cache: str = "kv=e4m3", **changes: Any) -> AttentionShape:
    sizes = {"batch": 8, "num_heads": 32, "num_heads_kv": 8, "seqlen_q": 16, "seqlen_k": 8192, "head_dim": 128}
    sizes |= {"dtype": "bfloat16", "features": Features.parse(f"cached {cache}")} | changes
    return AttentionShape(**sizes)


def config_of(shape: AttentionShape, splits: int = 4, stages: int = 4) -> KernelConfig:
    block_m = KERNEL.default_config(shape, HOPPER).block_m
    extra = (("splits", splits), ("overlap", int(splits > 1)))
    return KernelConfig(KERNEL.name, block_m, 64, 4, stages, extra)


# ---- rules


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 64}, "`head_dim == head_dim_v == 128` must hold"),
        ({"head_dim_v": 64}, "`head_dim == head_dim_v == 128` must hold"),
        ({"seqlen_q": 17}, "`group_size * seqlen_q <= 64` must hold for flash_decode8_ring, but got 68 rows"),
        ({"batch": 65536}, "`batch <= 65535` must hold"),
        ({"features": Features(cached=True)}, "reads caches of 8 bits, but got keys and values of bfloat16"),
        ({"features": Features(cached=True, kv="int8", page_size=512)}, "`page_size <= 256` must hold"),
        ({"features": Features(cached=True, kv="int8", mask=MaskKind.TREE)}, "does not know tree"),
    ],
)
def test_shapes_that_it_leaves_to_others(changes: dict[str, Any], reason: str) -> None:
    assert reason in (KERNEL.unsupported(shape_of(**changes), HOPPER) or "")


@pytest.mark.parametrize("cc", [cc for cc in known_ccs() if cc != (9, 0)], ids=str)
def test_other_gpus_are_left_to_others(cc: tuple[int, int]) -> None:
    assert f"(compute capability 9.0), but got {cc[0]}.{cc[1]}" in (
        KERNEL.unsupported(shape_of(), limits_for(cc)) or ""
    )


def test_a_tile_holds_all_rows() -> None:
    """It would leave out rows without a word."""
    config, shape = config_of(shape_of(seqlen_q=8)), shape_of(seqlen_q=9)
    assert "but got 36 rows and block_m=32" in KERNEL.violations(config, shape, HOPPER)[0]
    with pytest.raises(ValueError, match=r"The tile has 32 rows, but .* has 36"):
        KERNEL.bind(config, shape)


@pytest.mark.parametrize("rows", [1, 17, 32, 64])
@pytest.mark.parametrize("seqlen_k", [1, 1000, 1 << 20])
def test_default_config_breaks_no_rule(seqlen_k: int, rows: int) -> None:
    shape = shape_of(seqlen_q=1, num_heads=8 * rows, seqlen_k=seqlen_k)
    assert KERNEL.violations(KERNEL.default_config(shape, HOPPER), shape, HOPPER) == ()


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "wanted"),
    [
        (8, 16, "64x64 w4 s4 overlap=1 splits=4"),
        (64, 16, "64x64 w4 s4 overlap=0 splits=1"),
        (8, 8, "32x64 w4 s4 overlap=1 splits=4"),
        (8, 4, "16x64 w4 s5 overlap=1 splits=4"),
    ],
)
def test_two_blocks_share_a_multiprocessor(batch: int, seqlen_q: int, wanted: str) -> None:
    config = KERNEL.default_config(shape_of(batch=batch, seqlen_q=seqlen_q), HOPPER)
    assert config.label == f"{KERNEL.name} {wanted}"


def test_it_is_the_default_from_17_to_64_rows() -> None:
    found = {queries: default_kernel(shape_of(seqlen_q=queries), HOPPER) for queries in (4, 5, 16)}
    assert {queries: kernel and kernel.name == KERNEL.name for queries, kernel in found.items()} == {
        4: False,
        5: True,
        16: True,
    }


# ---- machine code


@compiled_here
@pytest.mark.few(3)
@pytest.mark.parametrize(("causal", "splits"), [(Causal.NONE, 4), (Causal.LOWER_RIGHT, 1)])
@pytest.mark.parametrize("seqlen_q", [16, 8, 4])
@pytest.mark.parametrize("features", ["kv=e4m3", "kv=int8 page=16 token_scales", "kv=e4m3 page=64"])
def test_two_blocks_share_a_multiprocessor_and_spill_nothing_in_the_loop(
    features: str, seqlen_q: int, causal: Causal, splits: int, tmp_path: Path
) -> None:
    """Up to 8 bytes are stored before it and loaded after it."""
    shape = shape_of(features, seqlen_q=seqlen_q, causal=causal)
    config = config_of(shape, splits)
    found = compile_resources(KERNEL, config, shape, (9, 0))
    assert found.spill_bytes <= 8
    (loop,) = loops(machine_code(KERNEL, config, shape, tmp_path))
    assert not [text for _, text in loop if mnemonic(text).startswith(("LDL", "STL"))]
    assert found.registers * 128 * 2 <= 65536
    least, most = KERNEL.shared_bytes(config, shape, HOPPER), KERNEL.most_shared_bytes(config, shape, HOPPER)
    assert least <= found.shared_bytes <= most
    assert 2 * (most + HOPPER.shared_reserved_bytes) <= HOPPER.shared_per_sm_bytes
    tiles = on_chip_of(KERNEL, config, shape, HOPPER)
    assert tiles is not None
    assert tiles.shared_bytes == least


@compiled_here
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_copied_and_converted_in_words(kind: str, tmp_path: Path) -> None:
    """Of 32 words a thread, those of keys are loaded four at once; both products read them from registers."""
    shape = shape_of(f"kv={kind}")
    (loop,) = loops(machine_code(KERNEL, config_of(shape), shape, tmp_path))
    found = Counter(mnemonic(text) for _, text in loop)
    assert found["LDGSTS.E.BYPASS.128"] == 8
    assert found["LDS.128"] >= 4
    assert found["HGMMA.64x64x16.F32"] == 16
    assert found["F2FP.F16.E4M3.UNPACK_B"] == (64 if kind == "e4m3" else 0)


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
    shape = shape_of(features, batch=3, seqlen_q=7, seqlen_k=1500, causal=Causal.LOWER_RIGHT, dtype=dtype)
    short = short_of(shape, (1500, 0, 333), scales)
    for splits in (1, 4):
        check(config_of(shape, splits), short)


@on_gpu
@pytest.mark.parametrize("rows", [4, 32, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_and_places_of_the_ring(kind: str, rows: int) -> None:
    shape = shape_of(f"kv={kind}", batch=2, seqlen_q=1, num_heads=2 * rows, num_heads_kv=2, seqlen_k=700)
    short = short_of(shape)
    for config in configs_of(KERNEL):
        shares = config.parameters["splits"], config.parameters["overlap"]
        if shares in ((1, 0), (8, 1)) and config.num_stages in (2, 5) and not KERNEL.violations(config, shape, HOPPER):
            check(config, short)


@on_gpu
@pytest.mark.parametrize("causal", list(Causal))
def test_what_every_query_sees(causal: Causal) -> None:
    shape = shape_of(batch=2, seqlen_k=500, causal=causal)
    check(config_of(shape), short_of(shape, (500, 7)))


@on_gpu
@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize("page_size", [16, 32, 256])
def test_pages(page_size: int, scales: str) -> None:
    shape = shape_of(f"kv=e4m3 page={page_size} {words(scales)}", batch=3, seqlen_k=500)
    check(config_of(shape), in_pages(short_of(shape, (0, 500, 77), scales), 120))


@on_gpu
@pytest.mark.parametrize("factor", [1e6, 1e30, 1e-30])
def test_queries_that_float16_cannot_hold(factor: float) -> None:
    short = short_of(shape_of(batch=2, seqlen_k=300))
    scale = short.extras.scale_k
    assert scale is not None
    truth = replace(short.wide, q=short.wide.q * factor, k=short.k.double() * as_factor(scale.double() / factor))
    check(config_of(truth.shape), replace(short, extras=replace(short.extras, scale_k=scale / factor), wide=truth))
