"""Attention sinks by kernels: the passes over finished rows, and whole calls whose backward gets rows with sinks, in
Triton's interpreter on the CPU, compiled where a GPU is."""

from typing import Any

import pytest
import torch

from blocktune import Dispatcher, flash_attn_func, flash_attn_varlen_func
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.portable.sinks.rows import add_sinks, sink_gradients
from blocktune.runtime.dispatch import obstacles, resolver
from blocktune.runtime.dispatch.launches.plans import KernelPlan
from tests.support.fakes.dispatch_fakes import ListSource
from tests.support.triton_modes import DEVICE, ON_GPU, runs

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]
TOLERANCE = {"bfloat16": 8e-3, "float16": 1.2e-3, "float32": 1e-5}
INFINITE = float("inf")
SINKS = (0.5, -2.0, 3.0, -INFINITE)


def close(found: torch.Tensor, right: torch.Tensor, dtype: str = "float32") -> bool:
    difference = (found.double() - right.double()).norm()
    return bool(difference <= TOLERANCE[dtype] * right.double().norm() + 1e-12)


def results(dtype: str, rows: int, dim: int, *, packed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """An output [batch, 4, rows, dim] in the layout [batch, rows, heads, dim], and a log-sum-exp; row 1 saw no key."""
    generator = torch.Generator().manual_seed(0)
    batch = 1 if packed else 2
    out = torch.randn(batch, rows, 4, dim, generator=generator).transpose(1, 2).to(getattr(torch, dtype))
    lse = torch.randn(*(() if packed else (batch,)), 4, rows, generator=generator) * 3.0
    if rows > 1:
        out[:, :, 1], lse[..., 1] = 0.0, -INFINITE
    return out.to(DEVICE), lse.to(DEVICE)


@runs
@pytest.mark.few(10)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("rows", "dim"), [(1, 16), (70, 32), (129, 40), (64, 128)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_are_written_again_with_sinks(dtype: str, rows: int, dim: int, packed: bool) -> None:
    out, lse = results(dtype, rows, dim, packed=packed)
    sinks = torch.tensor(SINKS, device=DEVICE, dtype=torch.bfloat16)
    own, sink = lse.double().exp(), sinks.double().exp()[:, None]
    right = out.double() * (own / (own + sink)).nan_to_num()[..., None]
    add_sinks(out, lse, sinks)
    assert close(out, right, dtype)
    wanted = (own + sink).log()
    assert torch.equal(lse.isneginf(), wanted.isneginf())
    finite = ~wanted.isneginf()
    torch.testing.assert_close(lse[finite].double(), wanted[finite], atol=1e-5, rtol=1e-5)


@runs
@pytest.mark.few(8)
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(("rows", "dim"), [(1, 16), (70, 32), (129, 40)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_gradient_of_sinks(dtype: str, rows: int, dim: int, with_lse: bool) -> None:
    out, lse = results(dtype, rows, dim)
    sinks = torch.tensor(SINKS, device=DEVICE)
    exact = sinks.double().requires_grad_()
    total = lse.double().exp() + exact.exp()[:, None]
    right, sums = out.double() * (lse.double().exp() / total).nan_to_num()[..., None], total.log()
    grad, grad_lse = torch.randn_like(out), torch.rand_like(lse) + 0.5  # of one sign: rows do not cancel out
    add_sinks(out, lse, sinks)
    found = sink_gradients(out, lse, grad, grad_lse if with_lse else None, sinks)
    loss = (right * grad.double()).sum()
    if with_lse:
        visible = ~sums.isneginf()
        loss = loss + (sums[visible] * grad_lse.double()[visible]).sum()
    (wanted,) = torch.autograd.grad(loss, exact)
    assert close(found, wanted.nan_to_num(), "float32" if dtype == "float32" else "bfloat16")
    assert found[3] == 0.0


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """One whose kernels run here."""
    if not ON_GPU:
        monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
        monkeypatch.setattr(resolver, "current_device", lambda index: device_named("a100"))
    return Dispatcher(ListSource())


@runs
@pytest.mark.few(4)
@pytest.mark.parametrize("sunk", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("varlen", [True, False])
@pytest.mark.parametrize(
    "dtype", [own for own in TOLERANCE if ON_GPU or own != "bfloat16"]
)  # interpreted it is garbage
def test_whole_calls_with_gradients_of_both_results(
    dispatcher: Dispatcher, dtype: str, varlen: bool, deterministic: bool, sunk: bool
) -> None:
    torch.manual_seed(0)
    sizes: list[Any] = [(20, 4, 16), (37, 2, 16), (37, 2, 16)]
    leaves = [torch.randn(size, device=DEVICE).to(getattr(torch, dtype)).requires_grad_() for size in sizes]
    sinks = torch.tensor((0.5, -2.0, 3.0, 1.0), device=DEVICE).requires_grad_() if sunk else None
    options: dict[str, Any] = {"causal": True, "deterministic": deterministic, "return_attn_probs": True}
    options |= {"s_aux": sinks, "dispatcher": dispatcher}
    if varlen:
        bounds = (torch.tensor(own, dtype=torch.int32, device=DEVICE) for own in ([0, 8, 20], [0, 15, 37]))
        out, lse, _ = flash_attn_varlen_func(*leaves, *bounds, 12, 22, **options)  # type: ignore[misc]
        shares = [(slice(0, 8), slice(0, 15)), (slice(8, 20), slice(15, 37))]
    else:
        found = flash_attn_func(*(leaf[None] for leaf in leaves), **options)
        out, lse = found[0][0], found[1][0]
        shares = [(slice(0, 20), slice(0, 37))]
    plans = dispatcher._resolver.plans.values()
    assert len(plans) == 2
    assert all(isinstance(own, KernelPlan) for own in plans)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = None if sinks is None else sinks.detach().double().requires_grad_()
    parts = [defined(*(own[rows] for own, rows in zip(doubles, (q, k, k), strict=True)), exact) for q, k in shares]
    right, sums = torch.cat([one for one, _ in parts]), torch.cat([one for _, one in parts], 1)
    assert close(out, right, dtype)
    assert close(lse, sums, dtype)
    grads = torch.randn_like(out), torch.rand_like(lse) + 0.5
    inputs, exact_inputs = (leaves, doubles) if exact is None else ([*leaves, sinks], [*doubles, exact])
    got = torch.autograd.grad((out, lse), inputs, grads)  # type: ignore[arg-type]
    wanted = torch.autograd.grad((right, sums), exact_inputs, [own.double() for own in grads])
    for one, other in zip(got, wanted, strict=True):
        assert close(one, other, dtype)


def defined(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence [rows, heads, dim], causal from the lower right: a sink is a key whose value is 0."""
    k, v = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + k.shape[0] - q.shape[0])
    scores = scores.masked_fill(later, -INFINITE)
    if sinks is not None:
        scores = torch.cat([sinks[:, None, None].expand(-1, q.shape[0], -1), scores], -1)
        v = torch.cat([torch.zeros_like(v[:1]), v])
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v), scores.logsumexp(-1)
