"""The portable kernels with infinite keys, huge scores and a rounded log-sum-exp, against float64: in Triton's
interpreter on the CPU, compiled where a GPU is."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from tests.support.attention.feature_cases import shape_of, tensors
from tests.support.attention.masked_rows import LOWEST, masked_rows
from tests.support.triton_modes import DEVICE, runs

# Infinities and their differences are what this is about; NumPy warns about them.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|divide by zero|All-NaN slice) encountered:RuntimeWarning"
    ),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]
TILE = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 1}
SPLIT = {"dq_block_m": 64, "dq_block_n": 32, "dq_num_warps": 4, "dq_num_stages": 1}
FORWARD = [KernelConfig.of("flash_fwd", TILE | {"schedule": schedule}) for schedule in (0, 1, 2)]
FORWARD += [KernelConfig.of("flash_fwd_general", TILE)]
BACKWARD = [KernelConfig.of("flash_bwd_split", TILE | SPLIT), KernelConfig.of("flash_bwd_fused", TILE | {"reduce": 0})]
TOLERANCE = {"float16": 3e-3, "float32": 1e-5}
"""Largest error, relative to the largest number of the result."""
HIDDEN = {"first": slice(0, 40), "last": slice(50, 90), "all": slice(0, 90), "some": slice(0, 90, 7)}
Tensors = Sequence[torch.Tensor]


def labels(config: KernelConfig) -> str:
    return f"{config.kernel}-{config.parameters.get('schedule', '')}"


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: Causal,
    mask: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attention with zeros where a query sees no key, or none but infinite ones."""
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    if causal is not Causal.NONE:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = torch.where(seen, scores, -math.inf)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return torch.where(blind, 0.0, torch.where(blind, 0.0, scores).softmax(-1)) @ v


def hide(qkv: Tensors, keys: slice) -> list[torch.Tensor]:
    """Tensors whose `keys` have scores of -inf, from an infinite element that all queries meet with a positive one."""
    q, k, v = (tensor.clone() for tensor in qkv)
    q[..., 0] = q[..., 0].abs() + 0.5
    k[..., keys, 0] = -math.inf
    return [q, k, v]


def expected(
    shape: AttentionShape, qkv: Tensors, dout: torch.Tensor, mask: torch.Tensor | None = None, softcap: float = 0.0
) -> list[torch.Tensor]:
    """The output and the gradients; of infinite elements, and where these meet a probability of 0, there are none."""
    leaves = [tensor.double().requires_grad_() for tensor in qkv]
    out = attention(*leaves, shape.causal, mask, softcap)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]


def close(found: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    """Whether it is finite and right wherever float64 is finite."""
    where = right.isfinite()
    assert found[where].isfinite().all()
    assert (found.double() - right)[where].abs().max() <= tolerance * right[where].abs().max().clamp_min(1e-3)


def forward(shape: AttentionShape, config: KernelConfig, qkv: Tensors, *extras: Extras) -> Tensors:
    out = torch.full((*qkv[0].shape[:3], shape.head_dim_v), math.nan, dtype=qkv[0].dtype, device=DEVICE)
    lse = torch.full(qkv[0].shape[:3], math.nan, device=DEVICE)
    bound(shape, config)(*qkv, out, lse, shape.head_dim**-0.5, *extras)
    return out, lse


def backward(
    shape: AttentionShape, config: KernelConfig, qkv: Tensors, dout: torch.Tensor, *extras: Extras, lower: float = 0.0
) -> Tensors:
    """The gradients, with the log-sum-exp of the general forward, made too low by as much."""
    general = KernelConfig.of("flash_fwd_general", TILE)
    out, lse = forward(shape, general, qkv, *(extras or (Extras(),)))
    found = [torch.full_like(tensor, math.nan) for tensor in qkv]
    launch = bound(replace(shape, direction=Direction.BACKWARD), config)
    launch(*qkv, out, lse - lower, dout, *found, shape.head_dim**-0.5, *extras)
    return found


def bound(shape: AttentionShape, config: KernelConfig) -> Any:
    kernel: AttentionKernel = get_kernel(config.kernel)
    return kernel.bind(config, shape)


def drawn(shape: AttentionShape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    sizes = shape.batch, shape.num_heads, shape.seqlen_q, shape.head_dim_v
    return torch.randn(sizes, generator=generator).to(getattr(torch, shape.dtype)).to(DEVICE)


@runs
@pytest.mark.few(12)
@pytest.mark.parametrize("config", FORWARD, ids=labels)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
@pytest.mark.parametrize("keys", HIDDEN)
def test_forwards_with_infinite_keys(config: KernelConfig, causal: Causal, keys: str) -> None:
    shape = shape_of("", causal=causal, dtype="float16", seqlen_q=90)
    qkv = hide(tensors(shape), HIDDEN[keys])
    extras = (Extras(),) if config.kernel == "flash_fwd_general" else ()
    out, lse = forward(shape, config, qkv, *extras)
    right = attention(*(tensor.double() for tensor in qkv), causal)
    close(out, right, TOLERANCE[shape.dtype])
    assert torch.equal(lse.isneginf(), (right == 0).all(-1))


@runs
@pytest.mark.few(10)
@pytest.mark.parametrize("config", BACKWARD, ids=labels)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
@pytest.mark.parametrize("keys", HIDDEN)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_backwards_with_infinite_keys(config: KernelConfig, causal: Causal, keys: str, dtype: str) -> None:
    shape = shape_of("", causal=causal, dtype=dtype)  # 70 queries: rows past the end meet the infinite keys, too
    qkv, dout = hide(tensors(shape), HIDDEN[keys]), drawn(shape)
    for found, right in zip(
        backward(shape, config, qkv, dout), expected(shape, qkv, dout)[1:], strict=True
    ):  # dq of the infinite column alone is not finite
        close(found, right, TOLERANCE[dtype])


@runs
@pytest.mark.few(8)
@pytest.mark.parametrize("config", BACKWARD, ids=labels)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("softcap", [1.0, 1e6])
def test_soft_caps_of_infinite_keys(softcap: float, config: KernelConfig, causal: Causal, dtype: str) -> None:
    """A capped score is finite, and no gradient passes it. Of a row past the end the derivative would be NaN."""
    shape = shape_of("softcap", causal=causal, dtype=dtype)
    qkv, dout, extras = hide(tensors(shape), HIDDEN["some"]), drawn(shape), Extras(softcap=softcap)
    out, *gradients = expected(shape, qkv, dout, softcap=softcap)
    close(forward(shape, KernelConfig.of("flash_fwd_general", TILE), qkv, extras)[0], out, TOLERANCE[dtype])
    _, dk, dv = gradients
    assert dk.isfinite().all()
    assert dv.isfinite().all()
    for found, right in zip(backward(shape, config, qkv, dout, extras), gradients, strict=True):
        close(found, right, TOLERANCE[dtype])


@runs
@pytest.mark.parametrize("config", BACKWARD, ids=labels)
def test_an_infinite_output_spoils_no_key_that_is_hidden(config: KernelConfig) -> None:
    shape = shape_of("softcap boolean", dtype="float16")
    q, k, v = tensors(shape)
    seen = (torch.arange(shape.seqlen_k, device=DEVICE) < 60).expand(1, 1, shape.seqlen_q, -1)
    v[..., 5, 0] = math.inf
    _, dk, dv = backward(shape, config, [q, k, v], drawn(shape), Extras(mask=seen, softcap=1.5))
    for gradient in (dk, dv):
        assert not gradient[:, :, 60:].any()
    assert not dk[:, :, :60].isfinite().any()


@runs
@pytest.mark.few(8)
@pytest.mark.parametrize("config", BACKWARD, ids=labels)
@pytest.mark.parametrize("features", ["", "additive"])
@pytest.mark.parametrize("factor", [1.0, 30.0, 300.0, 1e4, 1e5])
def test_float32_gradients_of_huge_scores(config: KernelConfig, features: str, factor: float) -> None:
    """Scores up to 1e10, of which a log-sum-exp in float32 does not know the last thousand."""
    shape = shape_of(features, causal=Causal.NONE if features else Causal.UPPER_LEFT)
    q, k, v = tensors(shape)
    qkv, dout = [q * factor, k * factor, v], drawn(shape)
    mask = torch.randn(70, 90, device=DEVICE).expand(1, 2, -1, -1) if features else None
    found = backward(shape, config, qkv, dout, *((Extras(mask=mask),) if features else ()))
    _, *right = expected(shape, qkv, dout, mask)
    leaves = [tensor.requires_grad_() for tensor in qkv]
    narrow = torch.autograd.grad(attention(*leaves, shape.causal, mask), leaves, dout)  # the same in float32
    # probabilities of 0 and 1 leave no gradient but rounding errors, which the factor multiplies
    for gradient, wanted, other, floor in zip(found, right, narrow, (factor, factor, 1.0), strict=True):
        error, theirs = ((tensor.double() - wanted).abs().max() for tensor in (gradient, other))
        assert error <= 3 * theirs + 1e-5 * floor


@runs
@pytest.mark.parametrize("config", BACKWARD, ids=labels)
def test_a_probability_is_at_most_one(config: KernelConfig) -> None:
    """Of 16 bits the log-sum-exp is taken as it is: rounded as scores of 1e8 round it, it is too low by ten or so."""
    shape = shape_of("", dtype="float16")
    qkv, dout = tensors(shape), drawn(shape)
    _, _, dv = backward(shape, config, qkv, dout, lower=10.0)
    most = dout.double().abs().sum(2).view(1, 1, -1, shape.head_dim).sum(2)
    assert (dv.double().abs().amax(2) <= most * 1.01).all()


@runs
@pytest.mark.parametrize("config", BACKWARD, ids=labels)
def test_probabilities_that_are_no_numbers_stay_so(config: KernelConfig) -> None:
    shape = shape_of("", dtype="float16")
    q, k, v = tensors(shape)
    q[0, 0, 3, 1] = math.nan
    _, dk, dv = backward(shape, config, [q, k, v], drawn(shape))
    assert dk.isnan().all()
    assert dv.isnan().all()


@runs
@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min, -1e5])
def test_16_bits_with_a_float32_mask(hidden: float) -> None:
    shape = shape_of("additive", dtype="float16", head_dim=80, head_dim_v=24)
    qkv, dout = tensors(shape), drawn(shape)
    generator = torch.Generator().manual_seed(4)
    mask = torch.randn(70, 90, generator=generator)
    mask = mask.masked_fill(torch.rand(70, 90, generator=generator) < 0.3, hidden).to(DEVICE)
    extras = Extras(mask=mask.expand(1, 2, -1, -1))
    out, *gradients = expected(shape, qkv, dout, mask)
    close(forward(shape, KernelConfig.of("flash_fwd_general", TILE), qkv, extras)[0], out, TOLERANCE["float16"])
    for config in BACKWARD:
        for found, right in zip(backward(shape, config, qkv, dout, extras), gradients, strict=True):
            close(found, right, TOLERANCE["float16"])


LEAST = {"float32": torch.finfo(torch.float32).min, "bfloat16": torch.finfo(torch.bfloat16).min}
LEAST |= {"float16": torch.finfo(torch.float16).min, "1e9": -1e9}


@runs
@pytest.mark.few(8)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
@pytest.mark.parametrize(
    ("dtype", "mask_dtype", "least"),
    [
        ("float16", "float32", "float32"),
        ("float16", "float32", "bfloat16"),
        ("float16", "float32", "1e9"),
        ("float16", "float16", "float16"),
        ("float32", "float32", "float32"),
    ],
)
@pytest.mark.parametrize("others", ["", "softcap", "window=40:20"])
def test_rows_that_finite_numbers_hide(others: str, dtype: str, mask_dtype: str, least: str, causal: Causal) -> None:
    """Their keys have equal probabilities, also in the backward, where the sum of dv says what they add up to."""
    shape = shape_of(f"additive {others}".strip(), dtype=dtype, causal=causal)
    qkv, dout = tensors(shape), drawn(shape)
    mask = masked_rows(70, 90, LEAST[least], getattr(torch, mask_dtype), device=DEVICE)
    extras = Extras(mask=mask, softcap=5.0 if shape.features.softcap else 0.0)
    leaves = [tensor.double().requires_grad_() for tensor in qkv]
    options: dict[str, Any] = {"causal": causal, "features": shape.features, "extras": deeper(extras)}
    right, right_lse = attention_reference(*leaves, dtype=torch.float64, **options)
    out, lse = forward(shape, KernelConfig.of("flash_fwd_general", TILE), qkv, extras)
    tolerance = 8e-3 if least == "float16" else TOLERANCE[dtype]  # the log-sum-exp of 65504 is rounded to 2^-9
    close(out, right.detach(), tolerance)
    assert torch.equal(lse.isneginf(), right_lse.isneginf())
    ordinary = right_lse > LOWEST
    torch.testing.assert_close(lse[ordinary].double(), right_lse[ordinary].detach(), rtol=1e-6, atol=5e-3)
    masked = ~ordinary & ~right_lse.isneginf()
    assert (lse[masked] / torch.finfo(torch.float32).min - 1).abs().max() < 0.01 if masked.any() else least == "float16"
    for config in BACKWARD:
        gradients = backward(shape, config, qkv, dout, extras)
        of_right = torch.autograd.grad(right, leaves, dout.double(), retain_graph=True)
        for found, wanted in zip(gradients, of_right, strict=True):
            close(found, wanted, tolerance)


def deeper(extras: Extras) -> Extras:
    """The extras with a mask beside whose lowest numbers float64 keeps no score, as float32 beside -1e9."""
    assert extras.mask is not None
    mask = extras.mask.double()
    return replace(extras, mask=torch.where((mask < LOWEST) & (mask > -math.inf), -1e38, mask))


@runs
def test_a_mask_that_is_no_number_reaches_all_gradients_of_its_row() -> None:
    shape = shape_of("additive", dtype="float16")
    mask = torch.zeros(1, 1, 70, 90, device=DEVICE)
    mask[..., 3, 1] = math.nan
    qkv, extras = tensors(shape), Extras(mask=mask)
    assert forward(shape, KernelConfig.of("flash_fwd_general", TILE), qkv, extras)[0][:, :, 3].isnan().all()
    for config in BACKWARD:
        dq, dk, dv = backward(shape, config, qkv, drawn(shape), extras)
        assert torch.equal(dq.isnan().all(-1), (torch.arange(70, device=DEVICE) == 3).expand(dq.shape[:3]))
        assert dk.isnan().all()
        assert dv.isnan().all()


@runs
def test_block_sparse_kernels_with_infinite_keys() -> None:
    from blocktune.kernels.values.block_mask import BlockMask

    shape = replace(shape_of("", dtype="float16"), features=Features.parse("block_sparse"))
    blocks = BlockMask(64, 32, torch.ones(1, 1, 2, 3, dtype=torch.bool, device=DEVICE))
    qkv, dout, extras = hide(tensors(shape), HIDDEN["first"]), drawn(shape), Extras(block_mask=blocks)
    config = KernelConfig.of("flash_fwd_sparse", TILE | {"schedule": 0})
    out, *gradients = expected(shape, qkv, dout)
    found, lse = forward(shape, config, qkv, extras)
    close(found, out, TOLERANCE["float16"])
    config = KernelConfig.of("flash_bwd_sparse", TILE | {"kv_block_m": 64, "kv_block_n": 32})
    made = [torch.full_like(tensor, math.nan) for tensor in qkv]
    launch = bound(replace(shape, direction=Direction.BACKWARD), config)
    launch(*qkv, found, lse, dout, *made, shape.head_dim**-0.5, extras)
    for gradient, right in zip(made, gradients, strict=True):
        close(gradient, right, TOLERANCE["float16"])
