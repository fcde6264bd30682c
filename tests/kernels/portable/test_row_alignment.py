"""Rows that begin at multiples of 16 bytes are copied by 16 bytes, and ahead, if 8 divides the head dimension.

A head dimension that 8 divides is compared with the multiple of 16 next to it that has tiles of the same width.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from blocktune.kernels.base.flash_kernel import padded_width
from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.base.specialize import in_units, named_in_units
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.compiler import compiled_code
from tests.support.compiles.remembered import remembered
from tests.support.triton_modes import compiled_here

FEATURES = {"flash_fwd_general": "window=256:0", "flash_fwd_sparse": "block_sparse", "flash_bwd_sparse": "block_sparse"}
KERNELS = (
    "flash_fwd", "flash_fwd_tma", "flash_fwd_general", "flash_fwd_sparse", "flash_decode", "flash_bwd_split",
    "flash_bwd_fused", "flash_bwd_sparse",
)  # fmt: skip
FULL = os.environ.get("BLOCKTUNE_WIDTHS") == "full"
HALVES = range(24, 256, 16) if FULL else (72, 200)
"""What 8 divides, and 16 does not."""
WHOLES = (*range(16, 256, 16), 256) if FULL else (64, 128)


@pytest.fixture(autouse=True)
def _fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def shape_of(name: str, head_dim: int, features: str = "") -> AttentionShape:
    decoding = "decode" in name
    return AttentionShape(
        direction=get_kernel(name).direction,
        dtype="bfloat16",
        batch=16,
        num_heads=16,
        seqlen_q=1 if decoding else 1024,
        seqlen_k=8192 if decoding else 1024,
        head_dim=head_dim,
        features=Features.parse(features or FEATURES.get(name, "")),
    )


def accesses(spec: CompileSpec, cc: tuple[int, int]) -> Counter[tuple[str, int]]:
    """How many copies, loads and stores of device memory a function has, by their bytes a thread."""
    return Counter(_accesses((spec,), cc))


@remembered
def _accesses(specs: Sequence[CompileSpec], cc: tuple[int, int]) -> dict[tuple[str, int], int]:
    ptx = compiled_code(specs[0], cc).asm["ptx"]
    found = Counter(("copy", int(size, 16)) for size in re.findall(r"cp\.async\.c[ag]\..*, (0x\w+)", ptx))
    pattern = r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[bsuf](\d+)\b"
    for name, count, bits in re.findall(pattern, ptx):
        found[name, int(count or 1) * int(bits) // 8] += 1
    return dict(sorted(found.items()))


def accesses_of(name: str, shape: AttentionShape, cc: tuple[int, int]) -> Iterator[Counter[tuple[str, int]]]:
    """Those of every function of a kernel's default."""
    kernel, limits = get_kernel(name), limits_for(cc)
    assert kernel.unsupported(shape, limits) is None
    config = kernel.default_config(shape, limits)
    for spec in (kernel.compile_spec(config, shape), *kernel.further_specs(config, shape)):
        yield accesses(spec, cc)


def neighbour(head_dim: int) -> int:
    """The multiple of 16 next to a head dimension whose tiles are as wide."""
    return next(dim for dim in (head_dim + 8, head_dim - 8) if padded_width(dim) == padded_width(head_dim))


@compiled_here
@pytest.mark.few(6)
@pytest.mark.parametrize("head_dim", HALVES)
@pytest.mark.parametrize("cc", [(8, 0), (9, 0)])
@pytest.mark.parametrize("name", KERNELS)
def test_accesses_are_as_wide_as_those_of_a_multiple_of_16(name: str, cc: tuple[int, int], head_dim: int) -> None:
    if name == "flash_fwd_tma" and cc < (9, 0):
        pytest.skip("has no copy engine")
    own, next_to_it = (list(accesses_of(name, shape_of(name, dim), cc)) for dim in (head_dim, neighbour(head_dim)))
    assert own == next_to_it
    assert own[0]["copy", 16] + own[0]["ld", 16] > 0


@compiled_here
@pytest.mark.few(2)
@pytest.mark.parametrize("head_dim", WHOLES)
@pytest.mark.parametrize("cc", [(8, 0), (9, 0)])
@pytest.mark.parametrize("name", KERNELS)
def test_multiples_of_16_are_copied_by_16_bytes(name: str, cc: tuple[int, int], head_dim: int) -> None:
    if name == "flash_fwd_tma" and cc < (9, 0):
        pytest.skip("has no copy engine")
    found = next(accesses_of(name, shape_of(name, head_dim), cc))
    assert found["copy", 16] + found["ld", 16] > 0
    assert found["ld", 2] == found["st", 2] == 0


@compiled_here
@pytest.mark.few(2)
@pytest.mark.parametrize("head_dim", [dim for dim in HALVES if dim > 24])
def test_hopper_passes_over_rows(head_dim: int) -> None:
    """Before and after the backward's own kernel, whose copies are those of the copy engine."""

    def found(dim: int) -> list[Counter[tuple[str, int]]]:
        kernel, shape = get_kernel("flash_bwd_hopper"), shape_of("flash_bwd_hopper", dim)
        specs = kernel.further_specs(kernel.default_config(shape, limits_for((9, 0))), shape)
        return [accesses(spec, (9, 0)) for spec in specs]

    own = found(head_dim)
    assert own == found(neighbour(head_dim))
    assert all(passed["st", 16] > 0 and passed["ld", 2] == passed["st", 2] == 0 for passed in own)


@compiled_here
@pytest.mark.few(2)
@pytest.mark.parametrize("head_dim", HALVES)
@pytest.mark.parametrize("cc", [(8, 9), (9, 0)])
@pytest.mark.parametrize("cache", ["kv=e4m3", "kv=int8"])
def test_rows_of_bytes_are_copied_by_8(cache: str, cc: tuple[int, int], head_dim: int) -> None:
    """They begin at multiples of 8 bytes."""
    own = next(accesses_of("flash_decode8", shape_of("flash_decode8", head_dim, f"cached {cache}"), cc))
    assert {size for kind, size in own if kind == "copy"} == {8}
    assert own["ld", 1] == own["ld", 2] == 0


@pytest.mark.parametrize(
    ("strides", "found"),
    [
        ((64, 128, 16), ((64, 128, 16), 1)),  # 16 divides all, which the compiler is told
        ((0, 72, 40), ((0, 9, 5), 8)),
        ((72, 16, 1), ((72, 16, 1), 1)),
        ((72, 36), ((72, 36), 1)),
        ((8 * ((1 << 31) + 1),), (((1 << 31) + 1,), 8)),
    ],
)
def test_strides_in_units(strides: tuple[int, ...], found: tuple[tuple[int, ...], int]) -> None:
    assert in_units(strides) == found
    named = {f"stride_{place}": stride for place, stride in enumerate(strides)}
    assert tuple(named_in_units(named).values()) == (*found[0], found[1])


def test_words_have_a_unit_of_their_own() -> None:
    assert in_units((20, 36), 4) == ((5, 9), 4)
