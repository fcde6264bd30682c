"""The gradient of an additive mask: the kernel with every feature of a score, and whole calls, in Triton's
interpreter on the CPU, compiled where a GPU is. What is right comes from float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from blocktune import Dispatcher
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.portable.backward.bias import NARROW_TILE, TILES, BiasTile, bias_gradient, bias_tile
from blocktune.kernels.values.dropout import keep_mask
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.runtime.dispatch import obstacles, resolver
from blocktune.runtime.dispatch.launches.plans import KernelPlan
from tests.support.fakes.dispatch_fakes import ListSource
from tests.support.triton_modes import DEVICE, ON_GPU, runs

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),  # masked_rows.py
]
TOLERANCE = {"bfloat16": 1.5e-2, "float16": 2e-3, "float32": 2e-5}
DTYPES = [own for own in TOLERANCE if ON_GPU or own != "bfloat16"]  # interpreted it is garbage
SMALL = BiasTile(16, 16, 4, 1)
INFINITE = float("inf")
BROADCASTS = [
    (1, 1, 40, 37),
    (2, 4, 40, 37),
    (1, 4, 40, 37),
    (2, 1, 40, 37),
    (2, 1, 1, 37),
    (1, 4, 1, 37),
    (1, 1, 1, 37),
]


def close(found: torch.Tensor, right: torch.Tensor, dtype: str) -> bool:
    difference = (found.double() - right.double()).norm()
    return bool(difference <= TOLERANCE[dtype] * right.double().norm() + 1e-12)


def problem(dtype: str, sizes: tuple[int, ...], features: str, causal: Causal) -> tuple[AttentionShape, Any, Extras]:
    """A shape, its query, key, value and output gradient, and extras with a mask."""
    torch.manual_seed(0)
    shape = AttentionShape(
        batch=2, num_heads=4, num_heads_kv=2, seqlen_q=40, seqlen_k=37, head_dim=24, head_dim_v=16, dtype=dtype,
        causal=causal, direction=Direction.BACKWARD, features=Features.parse(features),
    )  # fmt: skip
    made = [(4, 40, 24), (2, 37, 24), (2, 37, 16), (4, 40, 16)]
    tensors = [torch.randn(2, *own, device=DEVICE).to(getattr(torch, dtype)) for own in made]
    mask = torch.randn(sizes, device=DEVICE).to(getattr(torch, dtype))
    mask[..., 5] = -INFINITE
    extras = Extras(mask=mask)
    if shape.features.softcap:
        extras = replace(extras, softcap=2.0)
    if shape.features.alibi:
        extras = replace(extras, alibi_slopes=torch.rand(1, 4, device=DEVICE))
    return shape, tensors, extras


@runs
@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("features", "causal"),
    [("additive", Causal.NONE), ("additive", Causal.UPPER_LEFT), ("additive", Causal.LOWER_RIGHT),
     ("additive window=9:4", Causal.NONE), ("additive softcap alibi", Causal.NONE)],
)  # fmt: skip
@pytest.mark.parametrize("sizes", BROADCASTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_that_of_float64(dtype: str, sizes: tuple[int, ...], features: str, causal: Causal) -> None:
    shape, (q, k, v, dout), extras = problem(dtype, sizes, features, causal)
    exact = extras.mask.double().requires_grad_()  # type: ignore[union-attr]
    options: dict[str, Any] = {"causal": causal, "features": shape.features, "dtype": torch.float64}
    out, lse = attention_reference(
        q.double(), k.double(), v.double(), extras=replace(extras, mask=exact), scale=0.2, **options
    )
    grad_lse = torch.rand_like(lse)
    seen = ~lse.isneginf()
    loss = (out * dout.double()).sum() + (lse[seen] * grad_lse[seen]).sum()
    (right,) = torch.autograd.grad(loss, exact)
    given = extras.with_grad_lse(grad_lse.float())
    arguments = shape, q, k, v, out.detach().to(q.dtype), lse.detach().float(), dout, 0.2, given
    found = bias_gradient(*arguments, SMALL)
    assert found.dtype is extras.mask.dtype  # type: ignore[union-attr]
    assert found.shape == sizes
    assert close(found, right, dtype)
    assert not found[..., 5].any()
    assert torch.equal(found, bias_gradient(*arguments, SMALL))


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """One whose kernels run here."""
    if not ON_GPU:
        monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
        monkeypatch.setattr(resolver, "current_device", lambda index: device_named("a100"))
    return Dispatcher(ListSource())


def leaves(dtype: str, dim: int, bias_dtype: str, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    made = [torch.randn(2, heads, rows, dim, device=DEVICE) for heads, rows in ((4, 40), (2, 37), (2, 37))]
    tensors = [own.to(getattr(torch, dtype)) for own in made]
    return [
        own.requires_grad_() for own in (*tensors, torch.randn(sizes, device=DEVICE).to(getattr(torch, bias_dtype)))
    ]


@runs
@pytest.mark.few(5)
@pytest.mark.parametrize("sizes", [(40, 37), (4, 40, 37), (2, 1, 1, 37), (1, 4, 40, 1), (2, 4, 40, 37)])
@pytest.mark.parametrize(("dtype", "dim", "bias_dtype"), [
    ("float16", 16, "float16"), ("float16", 20, "float32"), ("float32", 32, "float32"),
])  # fmt: skip
def test_whole_calls(dispatcher: Dispatcher, dtype: str, dim: int, bias_dtype: str, sizes: tuple[int, ...]) -> None:
    inputs = leaves(dtype, dim, bias_dtype, sizes)
    doubles = [own.detach().double().requires_grad_() for own in inputs]
    right = sdpa(*doubles[:3], doubles[3], enable_gqa=True)
    grad = torch.randn_like(right)
    wanted = torch.autograd.grad(right, doubles, grad)
    for _ in range(2):  # the second call comes by the fast path
        out = dispatcher(*inputs[:3], inputs[3], enable_gqa=True)
        got = torch.autograd.grad(out, inputs, grad.to(out.dtype))
        for tensor, one, other in zip(inputs, got, wanted, strict=True):
            assert one.shape == tensor.shape
            if sizes[-1] != 1 or tensor is not inputs[3]:  # a row's sum of ds is 0
                assert close(one, other, dtype)
    assert all(isinstance(own, KernelPlan) for own in dispatcher._resolver.plans.values())


@runs
@pytest.mark.parametrize("needs", [(False, False, False), (True, False, False)])
def test_the_mask_alone_may_require_a_gradient(dispatcher: Dispatcher, needs: tuple[bool, ...]) -> None:
    inputs = leaves("float32", 16, "float32", (1, 4, 40, 37))
    for tensor, own in zip(inputs[:3], needs, strict=True):
        tensor.requires_grad_(own)
    grads = []
    for attend in (dispatcher, sdpa):
        for tensor in inputs:
            tensor.grad = None
        attend(*inputs[:3], inputs[3], enable_gqa=True).square().sum().backward()
        grads.append(inputs[3].grad)
        assert [tensor.grad is not None for tensor in inputs[:3]] == list(needs)
    assert close(grads[0], grads[1], "float32")  # type: ignore[arg-type]


@runs
@pytest.mark.parametrize("hidden", [-INFINITE, torch.finfo(torch.float32).min])
def test_rows_that_a_mask_hides(dispatcher: Dispatcher, hidden: float) -> None:
    inputs = leaves("float32", 16, "float32", (2, 1, 40, 37))
    with torch.no_grad():
        inputs[3][0, :, 7] = hidden
        inputs[3][1, :, :, 30:] = hidden
    doubles = [own.detach().double().requires_grad_() for own in inputs]
    got, wanted = (
        torch.autograd.grad(attend(*own[:3], own[3], enable_gqa=True).square().sum(), own[3])[0]
        for attend, own in ((dispatcher, inputs), (sdpa, doubles))
    )
    assert close(got, wanted.nan_to_num(), "float32")
    assert not got[1, :, :, 30:].any()


@runs
def test_dropped_pairs_give_the_mask_no_gradient_of_their_values(dispatcher: Dispatcher) -> None:
    inputs = leaves("float32", 16, "float32", (1, 4, 1, 37))
    torch.manual_seed(5)
    out = dispatcher(*inputs[:3], inputs[3], 0.3, enable_gqa=True)
    torch.manual_seed(5)
    if ON_GPU:
        seed, offset = torch.cuda.initial_seed(), 0
    else:
        seed, offset = torch.randint(2**62, (2,)).tolist()
    kept = keep_mask(2, 4, 40, 37, 0.3, seed, offset).to(DEVICE)
    q, k, v, bias = (own.detach().double().requires_grad_() for own in inputs)
    wide_k, wide_v = (own.repeat_interleave(2, 1) for own in (k, v))
    right = ((q @ wide_k.mT / 4 + bias).softmax(-1) * kept / 0.7) @ wide_v
    grad = torch.randn_like(right)
    (got,) = torch.autograd.grad(out, inputs[3], grad.float())
    (wanted,) = torch.autograd.grad(right, bias, grad)
    assert close(got, wanted, "float32")


@runs
def test_checkpoints_and_second_derivatives(dispatcher: Dispatcher) -> None:
    inputs = leaves("float32", 16, "float32", (40, 37))

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return dispatcher(*tensors, enable_gqa=True)

    plain = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    again = torch.autograd.grad(checkpoint(attend, *inputs, use_reentrant=False).square().sum(), inputs)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    (first,) = torch.autograd.grad(attend(*inputs).square().sum(), inputs[3], create_graph=True)
    with pytest.raises(UsageError, match="differentiable once"):
        first.sum().backward()


@runs
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_compiled_graphs(dispatcher: Dispatcher, dropout_p: float) -> None:
    inputs = leaves("float32", 16, "float32", (1, 4, 40, 37))

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return dispatcher(*tensors, dropout_p, enable_gqa=True)

    graph = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for own in (graph, attend):
        torch.manual_seed(7)
        results.append(torch.autograd.grad(own(*inputs).square().sum(), inputs))
    if dropout_p and ON_GPU:  # a graph draws its seed on the CPU
        return
    assert all(close(one, other, "float32") for one, other in zip(*results, strict=True))
    assert all(isinstance(own, KernelPlan) for own in dispatcher._resolver.plans.values())


def test_tiles_fit_the_shared_memory() -> None:
    shape = AttentionShape(
        batch=1, num_heads=4, num_heads_kv=4, seqlen_q=512, seqlen_k=512, head_dim=256, head_dim_v=256
    )
    assert bias_tile(shape, 1 << 17) is TILES[3]
    assert bias_tile(replace(shape, head_dim=64, head_dim_v=64), 232_448) is NARROW_TILE
    assert bias_tile(replace(shape, head_dim=128, head_dim_v=64), 232_448) is TILES[0]
    assert bias_tile(replace(shape, head_dim=64, head_dim_v=64, dtype="float32"), 232_448).block_m <= 64
