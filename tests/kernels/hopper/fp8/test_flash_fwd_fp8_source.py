"""The source of the 8-bit Hopper forward, run on the CPU by tests/support/gluon/machine.py: lengths, masks, scales and
parameters.

The pass over the values is ordinary Triton; its order of keys is written down here once more.
"""

import itertools
from typing import Any

import pytest
import torch

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.fp8 import kernel as flash_fwd_fp8
from blocktune.kernels.hopper.fp8 import warps
from blocktune.kernels.hopper.fp8.kernel import FlashForwardFp8
from blocktune.kernels.hopper.fp8.launch import TurnedLaunch
from blocktune.kernels.hopper.fp8.sums import STRETCH_KEYS
from blocktune.kernels.hopper.fp8.transpose_values import KEYS, padded_keys
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal
from tests.support.gluon import machine as gluon_machine

pytestmark = pytest.mark.triton_free

HOPPER = limits_for((9, 0))
KERNEL = FlashForwardFp8()
TOLERANCE = 4e-2
"""Relative Frobenius error of probabilities that are rounded to three bits behind the point."""
LSE_TOLERANCE = 1e-4
EDGES = [(1, 1), (1, 300), (64, 64), (65, 63), (128, 129), (257, 255), (300, 1)]
HEAD_DIMS = [(48, 48), (80, 80), (128, 128), (256, 128), (128, 64), (64, 128), (256, 256), (96, 192)]
PLACES = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
"""The keys of every 16, as the registers of the probabilities hold them."""


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_fwd_fp8, "tile_counter", lambda device: torch.zeros(2, dtype=torch.int32))


def shape_of(seqlen_q: int, seqlen_k: int, head_dim: int = 64, **changes: Any) -> AttentionShape:
    sizes: dict[str, Any] = {"batch": 1, "num_heads": 2, "num_heads_kv": 1, "head_dim_v": head_dim, "dtype": FP8}
    return AttentionShape(**sizes | {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim} | changes)


def turned(v: torch.Tensor, length: int) -> torch.Tensor:
    """What the pass over the values writes."""
    whole = torch.zeros(*v.shape[:2], length, v.shape[3], dtype=torch.uint8)
    whole[:, :, : v.shape[2]] = v.view(torch.uint8)
    ordered = whole.unflatten(2, (-1, 16))[:, :, :, PLACES].flatten(2, 3)
    return ordered.transpose(2, 3).contiguous().view(v.dtype)


def tensors(problem: AttentionShape) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = (
        (problem.num_heads, problem.seqlen_q, problem.head_dim),
        (problem.num_heads_kv, problem.seqlen_k, problem.head_dim),
        (problem.num_heads_kv, problem.seqlen_k, problem.head_dim_v),
    )
    return [torch.randn(problem.batch, *size).to(torch.float8_e4m3fn) for size in sizes]


def check(
    problem: AttentionShape, extras: Extras = NO_EXTRAS, lse_tolerance: float = LSE_TOLERANCE, **changes: int
) -> None:
    default = KERNEL.default_config(problem, HOPPER)
    config = KernelConfig.of(KERNEL.name, dict(default.parameters) | changes)
    assert KERNEL.violations(config, problem, HOPPER) == ()
    q, k, v = tensors(problem)
    lse = torch.full(q.shape[:3], 7.0)
    bound, scale = KERNEL.bind(config, problem), problem.head_dim**-0.5
    attend, values = (bound.attend, turned(v, padded_keys(problem))) if isinstance(bound, TurnedLaunch) else (bound, v)
    numbers = (dequantised(*pair) for pair in ((q, extras.scale_q), (k, extras.scale_k), (v, extras.scale_v)))
    expected, expected_lse = attention_reference(*numbers, causal=problem.causal, scale=scale, dtype=torch.float64)
    dead = expected_lse.isneginf()
    for wanted in (None, lse):  # without it the tensor cores add up, with it threads
        out = torch.full((*q.shape[:3], problem.head_dim_v), 7.0).bfloat16()
        arguments = attend.arguments(q, k, values, out, wanted, scale, extras)
        gluon_machine.run(attend.function, arguments, 2)
        assert arguments[5].tolist() == [0, 0]  # as the next launch expects it
        assert (out[dead] == 0).all()
        assert (out.double() - expected).norm() <= TOLERANCE * expected.norm()
    assert torch.equal(lse.isneginf(), dead)
    assert ((lse - expected_lse)[~dead].abs() <= lse_tolerance).all()


def dequantised(tensor: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return tensor.double() if scale is None else tensor.double() * scale[..., None, None]


@pytest.mark.few(8)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), EDGES)
def test_lengths_around_the_edges_of_tiles(seqlen_q: int, seqlen_k: int, causal: Causal) -> None:
    for turn_values in (0, 1):
        check(shape_of(seqlen_q, seqlen_k, num_heads=1, causal=causal), turn_values=turn_values)


def test_consumers_with_other_numbers_of_steps() -> None:
    """Three or four whose rows end at different blocks give back the slots that they skip."""
    for block_m, offset in ((192, 0), (256, 200)):
        problem = shape_of(700, 700 + offset, num_heads=3, num_heads_kv=3, causal=Causal.LOWER_RIGHT)
        check(problem, block_m=block_m, block_n=64, num_stages=2)


def truncated(before: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As an 8-bit wgmma adds: every product of 32 is cut off below 2^-13 of the largest power of two in the sum."""
    for terms in (a[:, at : at + 32, None] * b[None, at : at + 32] for at in range(0, a.shape[1], 32)):
        place = torch.exp2(torch.maximum(before.abs(), terms.abs().amax(1)).clamp_min(1e-30).log2().floor() - 13)
        before = (before / place).trunc() * place + ((terms / place[:, None]).trunc() * place[:, None]).sum(1)
    return before


@pytest.mark.parametrize(("block_m", "block_n"), [(128, 64), (128, 128), (192, 64)])
def test_sums_of_one_sign_keep_their_size(block_m: int, block_n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accumulator starts again from zero every 1024 keys. Otherwise 5,120 keys lose several times as much."""
    problem = shape_of(64, 5120, num_heads=1)
    own = {"block_m": block_m, "block_n": block_n, "turn_values": 0}
    config = dict(KERNEL.default_config(problem, HOPPER).parameters) | own
    bound = KERNEL.bind(KernelConfig.of(KERNEL.name, config), problem)
    q, k, v = tensors(problem)
    v = (v.float().abs() + 0.5).to(v.dtype)
    expected, _ = attention_reference(*(t.double() for t in (q, k, v)), dtype=torch.float64)
    monkeypatch.setattr(gluon_machine, "accumulated", truncated)
    biases = []
    for keys in (STRETCH_KEYS, 1 << 20):
        monkeypatch.setattr(warps, "stretch_of", lambda block_n, *_, keys=keys: keys // block_n)
        out = torch.full((*q.shape[:3], 64), 7.0).bfloat16()
        arguments = bound.attend.arguments(q, k, turned(v, 5120), out, None, 0.125, NO_EXTRAS)
        gluon_machine.run(bound.attend.function, arguments, 1)
        biases.append(((out.double() * expected).sum() / expected.square().sum() - 1).item())
    assert -0.02 < biases[0] < 0.002
    assert biases[1] < 3 * biases[0]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
def test_every_head_dimension(head_dim: int, head_dim_v: int) -> None:
    for turn_values in (0, 1):
        check(shape_of(100, 170, head_dim, head_dim_v=head_dim_v, causal=Causal.LOWER_RIGHT), turn_values=turn_values)


@pytest.mark.few(2)
@pytest.mark.parametrize(("block_m", "block_n", "stages"), [(128, 64, 2), (192, 128, 3), (256, 64, 4), (128, 128, 2)])
def test_every_block(block_m: int, block_n: int, stages: int) -> None:
    own = {"block_m": block_m, "block_n": block_n, "num_stages": stages}
    check(shape_of(600, 700, causal=Causal.LOWER_RIGHT), **own)
    check(shape_of(400, 1700, causal=Causal.NONE), **own)


def test_stretches_that_end_with_a_tile() -> None:
    """Of 1024 keys, with sums in registers and in shared memory."""
    for block_m, length in itertools.product((128, 192), (1024, 1025, 1088, 2048, 2049)):
        check(shape_of(192, length, num_heads=1), block_m=block_m, block_n=64, num_stages=3)


@pytest.mark.parametrize("block_n", [64, 128])
def test_stretches_of_256_columns(block_n: int) -> None:
    """Of 1024 keys, the second consumer's after 512 already; what 16 bits do not hold of their sums is not lost."""
    for length in (448, 513, 1024, 1025, 1700):
        check(shape_of(128, length, 256, num_heads=1), block_n=block_n, num_stages=2, q_registers=0)


def test_split_sums_keep_what_16_bits_do_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one block a stretch a sum of many like numbers would stop to grow in 16 bits."""
    monkeypatch.setattr(warps, "stretch_of", lambda block_n, *_: 2)
    problem = shape_of(128, 16384, 256, num_heads=1)
    q, k, v = tensors(problem)
    q, v = torch.zeros_like(q.float()).to(q.dtype), torch.ones_like(v.float()).to(v.dtype)
    out = torch.full(q.shape, 7.0).bfloat16()
    own = dict(KERNEL.default_config(problem, HOPPER).parameters) | {"turn_values": 0}
    bound = KERNEL.bind(KernelConfig.of(KERNEL.name, own), problem)
    arguments = bound.attend.arguments(q, k, turned(v, 16384), out, None, 1 / 16, NO_EXTRAS)
    gluon_machine.run(bound.attend.function, arguments, 1)
    assert (out == 1).all()


def test_scales_of_every_head() -> None:
    problem = shape_of(200, 200, 128, batch=2, num_heads=4, num_heads_kv=2, causal=Causal.UPPER_LEFT)
    torch.manual_seed(1)
    one, heads, entries = torch.rand(1, 1) + 0.5, torch.rand(1, 2) + 0.5, torch.rand(2, 4) + 0.5
    check(problem, Extras(scale_q=entries, scale_k=one, scale_v=heads))
    check(problem, Extras(scale_v=torch.rand(2, 2)))


def test_rising_scores_are_rescaled() -> None:
    """Keys far from the end weigh more: the running maximum is raised block by block, beyond what may be put off."""
    problem, factor = shape_of(200, 1000, 64), 64.0
    q = tensors(problem)[0]
    check(problem, Extras(scale_q=torch.full((1, 2), factor / q.float().abs().max().item())))


def test_the_machine_notices_another_order_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PLACES", list(range(16)))
    with pytest.raises(AssertionError):
        check(shape_of(100, KEYS), turn_values=0)
