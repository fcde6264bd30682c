"""Decoding over 8-bit caches: what it cannot compute, its defaults, and what the compiler makes of it."""

import collections
import re
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.base.specialize import specialize
from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.portable.decode8.tiles import flash_decode8_kernel
from blocktune.kernels.registry import default_kernel, kernels_for
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.compiler import compiled_code, resources_of
from blocktune.tuner.occupancy.tiles_by_kernel import on_chip_of
from tests.kernels.portable.decode8.test_flash_decode8 import HOPPER, KERNEL, config_of, short_shape
from tests.support.machine_code.kernels import loops, machine_code, mnemonic
from tests.support.triton_modes import compiled_here

LLAMA: dict[str, Any] = {"batch": 8, "num_heads": 32, "num_heads_kv": 8, "seqlen_k": 8192, "head_dim": 128}


def llama(kind: str, features: str = "", **changes: Any) -> AttentionShape:
    return short_shape(kind, features, **({"dtype": "bfloat16"} | LLAMA | changes))


@pytest.mark.parametrize(
    ("kind", "changes", "cc", "reason"),
    [
        ("e4m3", {}, (8, 6), "converts e4m3 in hardware (compute capability 8.9), but got 8.6"),
        ("e4m3", {}, (8, 0), "Keep an int8 cache there"),
        ("int8", {}, (7, 5), "multiplies with tensor cores"),
        ("int8", {"head_dim_v": 33}, (9, 0), "`head_dim_v % 2 == 0` must hold"),
        ("int8", {"dtype": "float32"}, (9, 0), "computes bfloat16, float16, but got float32"),
        (
            "int8",
            {"features": Features(cached=True)},
            (9, 0),
            "reads caches of 8 bits, but got keys and values of float16",
        ),
        ("int8", {"features": Features(cached=True, kv="int8", dropout=True)}, (9, 0), "does not know dropout"),
        ("int8", {"features": Features(cached=True, kv="int8", page_size=512)}, (9, 0), "`page_size <= 256` must hold"),
    ],
)
def test_what_it_cannot_compute(kind: str, changes: dict[str, Any], cc: tuple[int, int], reason: str) -> None:
    features = changes.pop("features", Features.parse(f"cached kv={kind}"))
    shape = short_shape(kind, **changes)
    shape = AttentionShape(**{name: getattr(shape, name) for name in shape.__slots__} | {"features": features})
    assert reason in (KERNEL.unsupported(shape, limits_for(cc)) or "")


def test_kernels_of_8_bit_caches_take_them_alone() -> None:
    own = [KERNEL.name]
    few = [*own, "flash_decode8_ring"]
    for features, wanted in {"": ["flash_decode8_hopper", *few], "page=8": few, str(MaskKind.TREE): own}.items():
        for kind in ("int8", "e4m3"):
            assert [kernel.name for kernel in kernels_for(llama(kind, features), HOPPER)] == wanted
            many = [kernel.name for kernel in kernels_for(llama(kind, features, seqlen_q=8), HOPPER)]
            assert many == (own if features == str(MaskKind.TREE) else ["flash_decode8_ring", *own])
    assert default_kernel(llama("e4m3"), limits_for((8, 0))) is None


@pytest.mark.parametrize("cc", [cc for cc in known_ccs() if cc >= (8, 0)], ids=str)
@pytest.mark.parametrize("seqlen_k", [1, 1000, 1 << 20])
@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_default_config_breaks_no_rule(cc: tuple[int, int], seqlen_k: int, head_dim: int) -> None:
    for queries in (1, 16):
        shape = llama("int8", seqlen_q=queries, seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim)
        assert KERNEL.violations(KERNEL.default_config(shape, limits_for(cc)), shape, limits_for(cc)) == ()


@pytest.mark.parametrize(("dims", "cc", "fine"), [
    ((128, 128), (9, 0), True), ((256, 256), (9, 0), True), ((64, 128), (9, 0), True), ((32, 64), (9, 0), False),
    ((64, 64), (9, 0), False), ((128, 64), (9, 0), False), ((64, 64), (8, 0), True), ((64, 64), (10, 0), True),
])  # fmt: skip
def test_whole_tiles_on_hopper_need_operands_swizzled_alike(
    dims: tuple[int, int], cc: tuple[int, int], fine: bool
) -> None:
    """Half of the columns of the values, next to the keys."""
    shape, limits = llama("int8", head_dim=dims[0], head_dim_v=dims[1], seqlen_q=32), limits_for(cc)
    problems = KERNEL.violations(config_of(64, 64), shape, limits)
    assert (problems == ()) is fine
    assert fine or "Take block_m 16 or 32" in problems[0]
    assert KERNEL.violations(config_of(32, 64), shape, limits) == ()
    assert KERNEL.violations(KERNEL.default_config(shape, limits), shape, limits) == ()


@pytest.mark.parametrize(
    ("features", "batch", "wanted"),
    [
        ("", 8, "16x64 w4 s4 overlap=1 splits=4"),
        ("", 64, "16x64 w4 s4 overlap=0 splits=1"),
        ("token_scales", 8, "16x128 w4 s3 overlap=1 splits=4"),
        ("token_scales", 64, "16x128 w4 s3 overlap=0 splits=1"),
        ("page=16", 8, "16x64 w4 s2 overlap=1 splits=8"),
    ],
)
def test_the_default_fills_the_multiprocessors_at_one_time(features: str, batch: int, wanted: str) -> None:
    """132 of them hold four programs of 64 keys, or two of 128."""
    assert KERNEL.default_config(llama("e4m3", features, batch=batch), HOPPER).label == f"{KERNEL.name} {wanted}"


@pytest.mark.few(1)
@compiled_here
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_words_of_the_cache_stay_together(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A thread takes 32 words from a tile. Each is permuted once; what is left are conversions of e4m3, or a logical
    instruction and a subtraction for two numbers of int8. All loads are of 16 bytes but those of sums over warps."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = llama(kind)
    (loop,) = loops(machine_code(KERNEL, KERNEL.default_config(shape, HOPPER), shape, tmp_path))
    names = collections.Counter(mnemonic(text).partition(".")[0] for _, text in loop)
    converted = {"LOP3": 0, "HADD2": 0} if kind == "e4m3" else {"LOP3": 64, "HADD2": 64}
    assert {name: names[name] for name in ("PRMT", *converted)} == {"PRMT": 32} | converted
    assert names["LDSM"] == 20
    assert names["BAR"] <= 5


@pytest.mark.few(2)
@compiled_here
@pytest.mark.parametrize("cc", [(9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_the_default_converts_in_registers_without_spills(
    kind: str, cc: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pairs of e4m3 by one instruction; int8 by none. Values are transposed on their way, not loaded byte by byte.
    Registers leave room for 16 warps."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape, limits = llama(kind), limits_for(cc)
    config = KERNEL.default_config(shape, limits)
    compiled = compiled_code(KERNEL.compile_spec(config, shape), cc)
    resources, ptx = resources_of(compiled), compiled.asm["ptx"]
    assert resources.spill_bytes == 0
    assert resources.registers <= 128
    assert KERNEL.shared_bytes(config, shape, limits) == resources.shared_bytes
    assert ("cvt.rn.f16x2.e4m3x2" in ptx) is (kind == "e4m3")
    assert not re.search(r"cvt\.rn\.(f16|bf16)\.[su](8|16|32)", ptx)
    assert re.search(r"ldmatrix\S*\.trans", ptx)
    assert not re.search(r"ld\.shared\.[bu]8\b", ptx)
    assert re.search(r"cp\.async\.cg\.shared\.global", ptx)


@pytest.mark.few(1)
@compiled_here
@pytest.mark.parametrize("absent", [("KScales", "VScales"), ("KScales",), ("VScales",)], ids=" and ".join)
def test_a_cache_without_scales_compiles(
    absent: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton 3.6 refuses a function that returns None among other things, which the interpreter lets pass."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape, config = llama("e4m3"), config_of(16, 64, 2, 4, 2)
    given = KERNEL.example_arguments(config, shape) | dict.fromkeys(absent)
    options = KERNEL.compile_spec(config, shape).options
    compiled = compiled_code(specialize(flash_decode8_kernel, given, options), (9, 0))
    assert resources_of(compiled).spill_bytes == 0


@compiled_here
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("cc", "block_m", "block_n", "warps", "stages", "splits", "head_dim"),
    [
        ((9, 0), 16, 64, 4, 3, 4, 128),
        ((9, 0), 16, 64, 4, 1, 4, 128),
        ((9, 0), 32, 128, 4, 2, 1, 64),
        ((9, 0), 64, 64, 4, 1, 1, 128),
        ((9, 0), 64, 64, 8, 3, 4, 256),
        ((8, 0), 64, 64, 4, 3, 1, 128),
        ((8, 0), 16, 256, 8, 1, 1, 16),
        ((10, 0), 64, 64, 4, 3, 4, 128),
        ((12, 0), 64, 32, 4, 2, 4, 64),
    ],
)
def test_shared_memory_is_between_its_bounds(
    cc: tuple[int, int], block_m: int, block_n: int, warps: int, stages: int, splits: int, head_dim: int,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape, limits = llama("int8", head_dim=head_dim, head_dim_v=head_dim), limits_for(cc)
    config = config_of(block_m, block_n, splits, warps, stages)
    resources = resources_of(compiled_code(KERNEL.compile_spec(config, shape), cc))
    least = KERNEL.shared_bytes(config, shape, limits)
    assert least <= resources.shared_bytes <= KERNEL.most_shared_bytes(config, shape, limits)
    if resources.tensor_cores == "mma":
        assert least == resources.shared_bytes
        tiles = on_chip_of(KERNEL, config, shape, limits)
        assert tiles is not None
        assert tiles.shared_bytes == least
