"""Calls with masks, dropout, windows, packed sequences and block masks through kernels of either direction, without a
GPU: the kernels get what was asked, both directions the same pairs to drop, and what goes wrong is remembered."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.dropout import keep_mask, share_kept
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import Causal, Direction
from blocktune.runtime.api.flash_attn import flash_attn_func, flash_attn_varlen_func
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.torch_attention import scaled_dot_product_attention
from blocktune.runtime.selection.ladder import Rung
from tests.runtime.dispatch.test_dispatch import calls
from tests.support.fakes.dispatch_fakes import ListSource, config, shape_like, tuned
from tests.support.fakes.feature_fakes import FeatureBackward, FeatureForward, pretend_features

pytestmark = pytest.mark.triton_free

Kernels = tuple[FeatureForward, FeatureBackward]
HEADS, KEYS = 4, 24
BLOCKED = shape_like(
    32, batch=2, num_heads_kv=2, seqlen_k=KEYS, head_dim=16, features=Features(mask=MaskKind.BLOCK_SPARSE)
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The CPU as an H200 with a kernel for either direction that serves all features."""
    return pretend_features(monkeypatch)


def packed_in_one(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The batch as packed sequences of one length."""
    bounds = [torch.arange(0, x.shape[0] * x.shape[1] + 1, x.shape[1], dtype=torch.int32) for x in (q, k)]
    flat = (tensor.flatten(0, 1) for tensor in (q, k, v))
    out: Tensor = flash_attn_varlen_func(*flat, *bounds, q.shape[1], k.shape[1], **options)
    return out


def inputs(queries: int = 20, *, grad: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((2, HEADS, queries, 16), (2, 2, KEYS, 16), (2, 2, KEYS, 16))
    return [torch.randn(size, dtype=dtype).requires_grad_(grad) for size in sizes]


def gradients(attend: Callable[..., Tensor], leaves: list[Tensor], **options: Any) -> list[Tensor]:
    out = attend(*leaves, enable_gqa=True, **options)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.randn_like(out))]


MASKS: list[tuple[str, Callable[[], Tensor]]] = [
    ("boolean", lambda: torch.rand(2, HEADS, 20, KEYS) > 0.3),
    ("boolean", lambda: torch.rand(2, 1, 1, KEYS) > 0.3),
    ("boolean", lambda: torch.rand(20, KEYS) > 0.3),
    ("boolean", lambda: torch.rand(HEADS, 1, KEYS) > 0.3),
    ("boolean", lambda: torch.rand(2, 1, 20, 1) > 0.5),
    ("additive", lambda: torch.randn(1, HEADS, 20, KEYS)),
    ("additive", lambda: torch.randn(20, KEYS).masked_fill(torch.rand(20, KEYS) > 0.7, float("-inf"))),
]


@pytest.mark.parametrize(("kind", "make"), MASKS)
@pytest.mark.parametrize("grad", [False, True])
def test_masks_go_through_our_kernels_with_pytorchs_meaning(
    kernels: Kernels, kind: str, make: Callable[[], Tensor], grad: bool
) -> None:
    leaves, dispatcher = inputs(grad=grad), Dispatcher(ListSource())
    mask = make()
    if grad:
        got, expected = (gradients(attend, leaves, attn_mask=mask) for attend in (dispatcher, sdpa))
    else:
        got, expected = ([attend(*leaves, mask, enable_gqa=True)] for attend in (dispatcher, sdpa))
    torch.testing.assert_close(got, expected)
    shape, extras = kernels[0].seen[-1]
    assert shape.features.label == kind
    assert extras.mask is not None
    assert extras.mask.shape[3] == KEYS
    assert len(kernels[1].seen) == (2 if grad else 0)  # tried once, launched once
    assert dispatcher.explain(*leaves, mask, enable_gqa=True).rung is Rung.DEFAULT


def test_both_directions_drop_the_same_pairs(kernels: Kernels) -> None:
    leaves, dispatcher = inputs(), Dispatcher(ListSource())
    torch.manual_seed(5)
    out, dq, _, _ = gradients(dispatcher, leaves, dropout_p=0.4)
    extras = kernels[0].seen[-1][1]
    assert (extras.dropout_p, extras.seed, extras.offset) == (
        0.4, kernels[1].seen[-1][1].seed, kernels[1].seen[-1][1].offset,
    )  # fmt: skip
    kept = keep_mask(2, HEADS, 20, KEYS, 0.4, extras.seed, extras.offset)
    q, k, v = (tensor.detach().double() for tensor in leaves)
    q.requires_grad_()
    k, v = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
    right = ((q @ k.mT / 4).softmax(-1) * kept / share_kept(0.4)) @ v
    torch.testing.assert_close(out, right.float())
    torch.manual_seed(1)
    right_dq = torch.autograd.grad(right, q, torch.randn(right.shape).double())[0]
    torch.testing.assert_close(dq, right_dq.float())


def test_the_seed_is_pytorchs(kernels: Kernels) -> None:
    leaves, dispatcher = inputs(grad=False), Dispatcher(ListSource())

    def attend() -> Tensor:
        return dispatcher(*leaves, dropout_p=0.5, enable_gqa=True)

    torch.manual_seed(7)
    first, second = attend(), attend()
    torch.manual_seed(7)
    again = attend()
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert all(extras.mask is None for _, extras in kernels[0].seen)


def test_a_checkpoint_drops_the_same_pairs_again(kernels: Kernels) -> None:
    leaves, dispatcher = inputs(), Dispatcher(ListSource())

    def attend(*tensors: Tensor, **options: Any) -> Tensor:
        return dispatcher(*tensors, dropout_p=0.5, **options)

    def checkpointed(*tensors: Tensor, **options: Any) -> Tensor:
        return checkpoint(attend, *tensors, use_reentrant=False, **options)  # type: ignore[no-any-return]

    torch.manual_seed(3)
    expected = gradients(attend, leaves)
    torch.manual_seed(3)
    torch.testing.assert_close(gradients(checkpointed, leaves), expected, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("entry", [flash_attn_func, packed_in_one])
def test_a_checkpoint_may_be_computed_again_the_short_way(kernels: Kernels, entry: Any) -> None:
    """PyTorch compares what a call and what computes it again have saved for the backward."""
    dispatcher = Dispatcher(ListSource())
    leaves = [tensor.transpose(1, 2).detach().requires_grad_() for tensor in inputs()]
    attend = partial(entry, softcap=2.0, dispatcher=dispatcher)
    right = attend(*leaves)
    dispatcher.resolver.fast_path.clear()
    out = checkpoint(attend, *leaves, use_reentrant=False)
    grad = torch.randn_like(out)
    got, expected = (torch.autograd.grad(one, leaves, grad) for one in (out, right))
    torch.testing.assert_close(got, expected)


def test_any_call_of_pytorchs_attention_is_the_same_by_ours(kernels: Kernels) -> None:
    dispatcher, served = Dispatcher(ListSource()), 0

    @given(call=calls(), lead=st.sampled_from(["", "batch", "heads", "both", "ones"]), learn=st.booleans())
    @settings(max_examples=30, deadline=None)
    def check(call: tuple[list[Tensor], dict[str, Any]], lead: str, learn: bool) -> None:
        nonlocal served
        arguments, options = call
        if "attn_mask" in options and lead:
            batch, heads = arguments[0].shape[:2]
            sizes = (batch if lead in ("batch", "both") else 1, heads if lead in ("heads", "both") else 1)
            options["attn_mask"] = options["attn_mask"].expand(*sizes, -1, -1)
        tensors = [tensor.detach().requires_grad_(learn) for tensor in arguments]
        got, right = dispatcher(*tensors, **options), sdpa(*tensors, **options)
        torch.testing.assert_close(got, right, equal_nan=True)
        served += bool(got.grad_fn is not None and "Attention" in type(got.grad_fn).__name__)
        if learn and got.numel():
            grad = torch.randn_like(right)
            found, wanted = (torch.autograd.grad(out, tensors, grad) for out in (got, right))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4, equal_nan=True)

    check()
    assert served
    assert kernels[0].launched


BAD: list[tuple[str, dict[str, Any]]] = [
    ("broadcast to", {"attn_mask": torch.ones(20, KEYS + 1, dtype=torch.bool)}),
    ("broadcast to", {"attn_mask": torch.ones(3, 1, 20, KEYS, dtype=torch.bool)}),
    ("broadcast to", {"attn_mask": torch.ones(1, 2, 1, 20, KEYS, dtype=torch.bool)}),
    ("broadcast to", {"attn_mask": torch.ones(KEYS, dtype=torch.bool)}),
    ("must be boolean", {"attn_mask": torch.ones(20, KEYS, dtype=torch.int64)}),
    ("must be boolean", {"attn_mask": torch.ones(20, KEYS, dtype=torch.float64)}),
    ("0 <= dropout_p <= 1", {"dropout_p": 1.5}),
    ("0 <= dropout_p <= 1", {"dropout_p": -0.1}),
    ("0 <= dropout_p <= 1", {"dropout_p": float("nan")}),
]


@pytest.mark.parametrize(("message", "options"), BAD)
@pytest.mark.parametrize("grad", [False, True])
def test_bad_masks_and_shares_are_refused_before_any_launch(
    kernels: Kernels, message: str, options: dict[str, Any], grad: bool
) -> None:
    with pytest.raises(UsageError, match=message):
        Dispatcher(ListSource())(*inputs(grad=grad), enable_gqa=True, **options)
    assert kernels[0].launched == kernels[1].launched == []


def test_grouped_heads_and_other_dimensions_are_pytorchs_matter(kernels: Kernels) -> None:
    leaves, dispatcher = inputs(grad=False), Dispatcher(ListSource())
    mask = torch.ones(20, KEYS, dtype=torch.bool)
    with pytest.raises(RuntimeError):
        dispatcher(*leaves, mask)
    three = [tensor[0, :2] for tensor in leaves]
    torch.testing.assert_close(dispatcher(*three, mask), sdpa(*three, mask))
    five = [tensor[None, :, :2] for tensor in leaves]
    torch.testing.assert_close(dispatcher(*five, mask), sdpa(*five, mask))
    assert kernels[0].launched == []


def test_without_a_backward_pytorch_computes_both_directions(kernels: Kernels) -> None:
    kernels[1].broken.add(kernels[1].default_config(None, None))  # type: ignore[arg-type]
    leaves, dispatcher = inputs(), Dispatcher(ListSource())
    mask = torch.rand(20, KEYS) > 0.3
    torch.testing.assert_close(gradients(dispatcher, leaves, attn_mask=mask), gradients(sdpa, leaves, attn_mask=mask))
    assert kernels[0].launched == []
    assert "gradients are needed" in dispatcher.explain(*leaves, mask, enable_gqa=True).reason


@pytest.mark.parametrize("option", [{}, {"attn_mask": torch.ones(20, KEYS, dtype=torch.bool)}])
def test_deterministic_algorithms_ask_for_a_deterministic_backward(kernels: Kernels, option: dict[str, Any]) -> None:
    leaves, dispatcher = inputs(), Dispatcher(ListSource())
    gradients(dispatcher, leaves, **option)
    assert not kernels[1].seen[-1][0].features.deterministic
    torch.use_deterministic_algorithms(True)
    try:
        gradients(dispatcher, leaves, **option)
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernels[1].seen[-1][0].features.deterministic
    assert not kernels[0].seen[-1][0].features.deterministic


def test_autocast_trains_in_its_own_precision(kernels: Kernels) -> None:
    leaves, dispatcher = inputs(), Dispatcher(ListSource())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = dispatcher(*leaves, torch.zeros(20, KEYS), enable_gqa=True)
    assert out.dtype is torch.bfloat16
    dq = torch.autograd.grad(out.sum(), leaves[0])[0]
    assert dq.dtype is torch.float32
    assert {shape.dtype for shape, _ in (*kernels[0].seen, *kernels[1].seen)} == {"bfloat16"}
    assert kernels[0].seen[-1][1].mask.dtype is torch.bfloat16  # type: ignore[union-attr]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.autograd.grad(sdpa(*leaves, torch.zeros(20, KEYS), enable_gqa=True).sum(), leaves[0])[0]
    torch.testing.assert_close(dq, expected, atol=3e-2, rtol=3e-2)


def test_inference_mode_needs_no_backward(kernels: Kernels) -> None:
    leaves, dispatcher = inputs(), Dispatcher(ListSource())
    with torch.inference_mode():
        mask = torch.rand(20, KEYS) > 0.2
        torch.testing.assert_close(
            dispatcher(*leaves, mask, enable_gqa=True), scaled_dot_product_attention(*leaves, mask, enable_gqa=True)
        )
    assert kernels[0].launched
    assert kernels[1].launched == []


FEATURES: list[dict[str, Any]] = [
    {"window": (3, 2)},
    {"softcap": 2.0},
    {"alibi_slopes": torch.rand(1, HEADS)},
    {"window": (5, -1), "softcap": 3.0, "alibi_slopes": torch.rand(2, HEADS), "dropout_p": 0.3},
]


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
@pytest.mark.parametrize("asked", FEATURES)
def test_features_reach_both_kernels(kernels: Kernels, asked: dict[str, Any], causal: Causal) -> None:
    leaves, dispatcher = inputs(), Dispatcher(ListSource())
    out, _ = dispatcher.attend(*leaves, lse=True, causal=causal, scale=0.25, **asked)
    torch.autograd.grad(out.sum(), leaves)
    forward, backward = (kernel.seen[-1] for kernel in kernels)
    assert forward[1] == backward[1]
    assert forward[0].features == backward[0].features
    assert forward[0].features.softcap is ("softcap" in asked)
    assert forward[0].features.alibi is ("alibi_slopes" in asked)
    assert (forward[0].features.window is not None) is ("window" in asked)
    assert (forward[0].direction, backward[0].direction) == (Direction.FORWARD, Direction.BACKWARD)


def test_a_second_derivative_is_refused(kernels: Kernels) -> None:
    leaves = inputs()
    out = Dispatcher(ListSource())(*leaves, torch.zeros(20, KEYS), enable_gqa=True)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(UsageError, match=r"Attention is differentiable once.*SDPBackend\.MATH"):
        first.sum().backward()


def test_a_block_mask_trains(kernels: Kernels) -> None:
    leaves, dispatcher = inputs(32), Dispatcher(ListSource())
    blocks = BlockMask(16, 16, torch.tensor([[True, False], [True, True]])[None, None])
    out, _ = dispatcher.attend(*leaves, causal=Causal.UPPER_LEFT, scale=0.25, block_mask=blocks)
    got = torch.autograd.grad(out.square().sum(), leaves)
    seen = blocks.to_dense(32, KEYS).tril()
    expected = torch.autograd.grad(sdpa(*leaves, seen, enable_gqa=True).square().sum(), leaves)
    torch.testing.assert_close(got, expected)
    assert kernels[1].seen[-1][1].block_mask is blocks


def test_tiles_are_no_larger_than_blocks(kernels: Kernels) -> None:
    leaves, dispatcher = inputs(32), Dispatcher(ListSource([tuned(BLOCKED, config(128))]))
    for block, expected in ((128, (128, 64)), (16, (16, 16)), (64, (64, 64))):
        mask = BlockMask(block, block, torch.ones(1, 1, -(-32 // block), -(-KEYS // block), dtype=torch.bool))
        out, _ = dispatcher.attend(*leaves, causal=Causal.NONE, scale=0.25, block_mask=mask)
        torch.testing.assert_close(out, sdpa(*leaves, enable_gqa=True))
        assert (kernels[0].launched[-1].block_m, kernels[0].launched[-1].block_n) == expected
        plans = dispatcher._resolver.plans.values()
        rung = [plan.explanation.rung for plan in plans if plan.explanation.shape == BLOCKED][-1]
        assert rung is (Rung.EXACT if block == 128 else Rung.DEFAULT)


def test_a_failure_for_small_blocks_bans_no_config_for_large_ones(kernels: Kernels, monkeypatch: Any) -> None:
    monkeypatch.setattr(FeatureForward, "smallest_block", 128)
    leaves, dispatcher = inputs(32, grad=False), Dispatcher(ListSource())
    for block in (64, 128, 64):
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        out, _ = dispatcher.attend(*leaves, causal=Causal.NONE, scale=0.25, block_mask=BlockMask(block, block, mask))
        torch.testing.assert_close(out, sdpa(*leaves, enable_gqa=True))
    assert {extras.block_mask.block_q for _, extras in kernels[0].seen} == {128}
    assert len(dispatcher._resolver._failures) == 1


def test_misses_count_calls_with_features(kernels: Kernels) -> None:
    leaves, dispatcher = inputs(grad=False), Dispatcher(ListSource())
    for _ in range(3):
        dispatcher(*leaves, torch.zeros(20, KEYS), enable_gqa=True)
    ((shape, calls),) = dispatcher.misses().items()
    assert (shape.features.label, calls) == ("additive", 3)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("words", ["", "boolean", "additive dropout"])
def test_warmup_makes_the_plans_that_calls_use(kernels: Kernels, words: str, direction: Direction) -> None:
    dispatcher, features = Dispatcher(ListSource()), Features.parse(words)
    leaves = inputs(grad=direction is Direction.BACKWARD)
    shape = shape_like(20, batch=2, num_heads_kv=2, seqlen_k=KEYS, head_dim=16, features=features, direction=direction)
    assert [explanation.rung for explanation in dispatcher.warmup([shape])] == [Rung.DEFAULT]
    resolver_of = dispatcher._resolver
    plans = len(resolver_of.plans)
    options: dict[str, Any] = {"attn_mask": torch.ones(20, KEYS, dtype=torch.bool)} if words == "boolean" else {}
    if words == "additive dropout":
        options = {"attn_mask": torch.ones(20, KEYS), "dropout_p": 0.1}
    out = dispatcher(*leaves, enable_gqa=True, **options)
    if direction is Direction.BACKWARD:
        torch.autograd.grad(out.sum(), leaves)
    assert len(resolver_of.plans) == plans
    with pytest.raises(UsageError, match="masks and dropout"):
        dispatcher.warmup([replace(shape, features=Features(softcap=True))])
