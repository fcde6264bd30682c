"""Windows whose sides are as large as numbers get, against their definition in float64, with gradients: "no bound" is
often written as the largest integer. PyTorch's mathematics on the CPU, the portable kernels in Triton's interpreter,
our kernels on a GPU."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blocktune import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.api.torch_varlen import varlen_attn
from blocktune.runtime.dispatch import obstacles, resolver
from blocktune.runtime.dispatch.dispatcher import attention
from blocktune.runtime.dispatch.launches.plans import TorchPlan
from tests.runtime.api.test_flash_api import DEVICES, defined, exact
from tests.support.triton_modes import INTERPRETED

# A sum that overflows warns in the interpreter and is an error here.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow encountered in exp|invalid value|divide by zero):RuntimeWarning"),
]

FAR = 2**31 - 1
WINDOWS = [
    (FAR, 0), (0, FAR), (FAR, FAR), (FAR - 40, 0), (FAR - 1, 3), (3, FAR - 1), (FAR - 41, FAR - 41), (2**31, 2**31),
    (sys.maxsize, 0), (0, sys.maxsize), (2**63, 2**64), (np.int64(FAR), np.int32(0)),
]  # fmt: skip
FEW = [(FAR, 0), (0, FAR), (FAR, FAR), (sys.maxsize, 5)]
ROWS = {"cpu": 40, "cuda": 300}


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels serve tensors on the CPU."""
    if INTERPRETED:
        monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
        monkeypatch.setattr(resolver, "current_device", lambda index: device_named("h200"))
    attention.reload()


def assert_served(device: str) -> None:
    plans = attention.resolver.plans.values()
    if INTERPRETED or device == "cuda":
        assert plans
        assert not any(isinstance(plan, TorchPlan) for plan in plans)


def random(*sizes: int, device: str) -> Tensor:
    dtype = torch.bfloat16 if device == "cuda" else torch.float16 if INTERPRETED else torch.float32
    return torch.randn(*sizes, dtype=dtype, device=device)


def assert_close(got: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Compare results, the output first, with the right ones: a gradient of 0 with the size of the output."""
    for one, other in zip(got, right, strict=True):
        bound = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}[one.dtype]
        size = max(other.detach().norm(), right[0].detach().norm())
        assert (one.detach().double().cpu() - other.detach()).norm() <= bound * size


def plain(window: tuple[Any, Any]) -> tuple[int, int]:
    """The window as Python's integers, which the definition counts with."""
    return int(window[0]), int(window[1])


@pytest.mark.few(8)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_outputs_and_gradients(device: str, window: tuple[int, int], causal: bool) -> None:
    torch.manual_seed(0)
    rows = ROWS[device]
    for rows_q in (rows, rows + 10):
        leaves = [random(1, own, 2, 64, device=device).requires_grad_() for own in (rows_q, rows, rows)]
        out = flash_attn_func(*leaves, causal=causal, window_size=window)
        grad = torch.randn_like(out)
        got = out, *torch.autograd.grad(out, leaves, grad)
        doubles = exact(*leaves)
        right = defined(*(one[0] for one in doubles), causal=causal, window_size=plain(window))[0][None]
        assert_close(got, (right, *torch.autograd.grad(right, doubles, grad.double().cpu())))
    assert_served(device)


@pytest.mark.few(2)
@pytest.mark.parametrize("window", FEW, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences(device: str, window: tuple[int, int]) -> None:
    torch.manual_seed(0)
    leaves = [random(tokens, 2, 64, device=device).requires_grad_() for tokens in (37, 40, 40)]
    bounds = [torch.tensor([0, *ends], dtype=torch.int32, device=device) for ends in ((17, 37), (29, 40))]
    q, k, v = doubles = exact(*leaves)
    parts = [(q[:17], k[:29], v[:29]), (q[17:], k[29:], v[29:])]
    right = torch.cat([defined(*part, window_size=window)[0] for part in parts])
    calls = [
        flash_attn_varlen_func(*leaves, *bounds, 20, 29, window_size=window),
        flash_attn_varlen_func(*leaves, *bounds, FAR, 2**70, window_size=window),
        varlen_attn(*leaves, *bounds, 20, 29, window_size=window),
    ]
    for out in calls:
        grad = torch.randn_like(out)
        got = out, *torch.autograd.grad(out, leaves, grad)
        wanted = torch.autograd.grad(right, doubles, grad.double().cpu(), retain_graph=True)
        assert_close(got, (right, *wanted))
    assert_served(device)


@pytest.mark.parametrize("window", FEW, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_caches(device: str, window: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q, (k, v) = random(2, 3, 2, 64, device=device), (random(2, 64, 2, 64, device=device) for _ in "kv")
    lengths = torch.tensor([40, 7], dtype=torch.int32, device=device)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, window_size=window)
    for entry, length in enumerate(lengths.tolist()):
        given = [tensor[entry].double().cpu() for tensor in (q, k[:, :length], v[:, :length])]
        assert_close([out[entry]], [defined(*given, window_size=window)[0]])
    assert_served(device)
