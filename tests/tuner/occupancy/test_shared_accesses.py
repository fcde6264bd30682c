"""Loads of shared memory counted in compiled code: small assembly by hand, and a kernel that a profiler has counted."""

from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compare.ladder_presets import PRESETS
from blocktune.tuner.compare.ladder_steps import grid_of
from blocktune.tuner.compile.compiler import compile_config
from blocktune.tuner.occupancy.calculator import Limiter, occupancy
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses, shared_accesses
from blocktune.tuner.traffic.visited_tiles import visits_of
from tests.support.triton_modes import compiled_here


def assembly(*loop: str, shift: int = 4, mask: int = 31) -> str:
    """A loop in which %r3 is a base plus (lane & mask) << shift."""
    body = "\n".join(loop)
    return f"""
mov.u32 %r1, %tid.x;
and.b32 %r2, %r1, {mask};
shl.b32 %r3, %r2, {shift};
$L__BB0_1:
{body}
fma.rn.f32 %f1, %f2, %f3, %f4;
bra $L__BB0_1;
"""


@pytest.mark.parametrize(
    ("shift", "mask", "instruction", "wavefronts", "excess"),
    [
        (2, 31, "ld.shared.b32 %r9, [%r3];", 1, 0),  # neighbours
        (7, 31, "ld.shared.b32 %r9, [%r3];", 32, 31),  # rows of 128 bytes, one bank for all
        (4, 31, "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];", 4, 0),  # four quarters of a warp
        (8, 15, "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];", 32, 28),  # eight rows in each of four phases
        (4, 15, "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3+256];", 4, 0),
    ],
)
def test_the_lanes_addresses_make_the_wavefronts(
    shift: int, mask: int, instruction: str, wavefronts: int, excess: int
) -> None:
    found = shared_accesses(assembly(instruction, shift=shift, mask=mask))
    assert found == SharedAccesses(loads=1, load_wavefronts=wavefronts, load_excess=excess)
    assert found.ways == wavefronts
    assert found.report()["conflict_share"] == excess / wavefronts


def test_neighbouring_words_of_a_lane_are_one_access_until_a_barrier() -> None:
    two = ("ld.shared.b32 %r8, [%r3];", "ld.shared.b32 %r9, [%r3+4];")
    assert shared_accesses(assembly(*two)).loads == 1
    assert shared_accesses(assembly(two[0], "bar.sync 0;", two[1])).loads == 2


def test_stores_are_counted_apart_and_addresses_of_data_not_at_all() -> None:
    found = shared_accesses(assembly("st.shared.b32 [%r3], %r9;", "ld.shared.b32 %r8, [%r77];", shift=2))
    assert (found.stores, found.store_wavefronts, found.loads) == (1, 1, 0)
    assert (found.ways, found.conflict_share) == (0.0, 0.0)


# ---- "I rebuilt FlashAttention in Triton to understand the performance archaeology" profiles a v2 on an RTX 2070:
# 10 x 64 heads, 1024 x 32 in float32, blocks of 32, four warps.
PROFILED_LOADS = 293_601_280
PROFILED_WAVEFRONTS = 1_845_667_948
PROFILED_EXCESS = 1_174_405_120
PROFILED_CONFLICT_SHARE = 0.6364
PROFILED_BLOCKS, PROFILED_OCCUPANCY, PROFILED_SHARED_KIB = 20_480, 0.625, 12


@compiled_here
def test_the_textbook_kernel_takes_what_a_profiler_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    preset, device, kernel = PRESETS["rtx2070"], device_named("rtx2070"), get_kernel("flash_v2")
    config = KernelConfig("flash_v2", *preset.blocks)
    resources, shared = compile_config(kernel, config, preset.shape, device.limits.cc)
    blocks = grid_of(config, preset.shape)
    assert blocks == PROFILED_BLOCKS
    heads = preset.shape.batch * preset.shape.num_heads
    rounds = visits_of(preset.shape, config.block_m, config.block_n).total * heads * resources.num_warps
    assert rounds * shared.loads == PROFILED_LOADS
    assert rounds * shared.load_excess == PROFILED_EXCESS
    assert rounds * shared.load_wavefronts == pytest.approx(PROFILED_WAVEFRONTS, rel=2e-4)
    assert shared.conflict_share == pytest.approx(PROFILED_CONFLICT_SHARE, abs=5e-5)
    assert round(shared.ways, 1) == 6.3
    occupied = occupancy(resources, device.limits)
    assert (
        resources.shared_bytes == PROFILED_SHARED_KIB * 1024 == kernel.shared_bytes(config, preset.shape, device.limits)
    )
    assert (occupied.fraction, occupied.blocks_per_sm) == (PROFILED_OCCUPANCY, 5)
    assert occupied.limiters == (Limiter.SHARED_MEMORY,)


@compiled_here
def test_transposed_keys_have_no_conflicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    preset, device, kernel = PRESETS["rtx2070"], device_named("rtx2070"), get_kernel("flash_fwd_transposed")
    own = kernel.default_config(preset.shape, device.limits).parameters
    names = ("block_m", "block_n", "num_warps", "num_stages")
    config = KernelConfig.of(kernel.name, own | dict(zip(names, preset.blocks, strict=True)))
    _, shared = compile_config(kernel, config, preset.shape, device.limits.cc)
    assert shared.loads > 100
    assert shared.load_excess == 0


@pytest.mark.parametrize("name", ["flash_fwd", "flash_fwd_tma", "flash_fwd_general", "flash_fwd_sparse"])
@pytest.mark.parametrize("device", ["rtx2070", "a100_sxm4_80", "h200", "b200"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_portable_forward_has_tiles_of_32(name: str, device: str, dtype: str) -> None:
    kernel, limits = get_kernel(name), device_named(device).limits
    plain = replace(PRESETS["rtx2070"].shape, dtype=dtype)
    shape = _shape_for(name, plain)
    if kernel.unsupported(shape, limits) is not None:
        assert (name, device) in {("flash_fwd_tma", "rtx2070"), ("flash_fwd_tma", "a100_sxm4_80")}
        return
    own = kernel.default_config(shape, limits).parameters
    config = KernelConfig.of(name, own | {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 1})
    assert kernel.violations(config, shape, limits) == ()


def _shape_for(name: str, plain: AttentionShape) -> AttentionShape:
    """The shape with a feature that the kernel is for."""
    from blocktune.kernels.values.features import Features, MaskKind

    features = {
        "flash_fwd_general": Features(softcap=True),
        "flash_fwd_sparse": Features(mask=MaskKind.BLOCK_SPARSE),
    }
    return replace(plain, features=features.get(name, Features()))
