"""Calls of packed sequences: one plan for all numbers of tokens, and nothing but zeros outside of them."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from blocktune.kernels import registry
from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.api import flash_attn
from blocktune.runtime.dispatch import torch_math
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.launches.kinds import packed_kind
from blocktune.runtime.dispatch.launches.results import empty_output
from blocktune.runtime.dispatch.torch_math import mathematics
from tests.runtime.dispatch.calls.test_engine import HEADS, Kernels
from tests.support.fakes.dispatch_fakes import ListSource
from tests.support.fakes.feature_fakes import FeatureBackward, FeatureForward, pretend_features

pytestmark = pytest.mark.triton_free


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The CPU as an H200 with a kernel for either direction that serves all features."""
    return pretend_features(monkeypatch)


def capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls on the CPU go the way of calls while a CUDA graph is captured."""
    monkeypatch.setattr(torch_math, "is_capturing", lambda query: True)
    monkeypatch.setattr(torch_math, "prepare_blas", lambda device: None)


def test_packed_sequences_have_one_plan_for_all_numbers_of_tokens_that_compiled_code_takes(kernels: Kernels) -> None:
    """That is one for multiples of 16, one for other products with the heads that are, and one for the rest."""
    dispatcher = Dispatcher(ListSource())
    for tokens in (9, 11, 15):
        q = torch.randn(tokens, HEADS, 16).transpose(0, 1)[None]
        bounds = torch.tensor([0, 4, tokens - 1], dtype=torch.int32)
        packed = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "lengths": (2, 16, 16)}
        out, lse = dispatcher.attend(q, q, q, lse=True, causal=Causal.NONE, scale=0.25, **packed)
        for first, last in ((0, 4), (4, tokens - 1)):
            part = q[:, :, first:last]
            torch.testing.assert_close(out[:, :, first:last], sdpa(part, part, part))
        assert not bool(out[:, :, tokens - 1 :].any())
        assert bool(lse[:, tokens - 1 :].isneginf().all())
    assert len(dispatcher._resolver.plans) == 1
    assert {(shape.batch, shape.seqlen_q, shape.seqlen_k) for shape, _ in kernels[0].seen} == {(2, 16, 16)}


@pytest.mark.parametrize("heads", [torch.randn(1, 2, 40, 16), torch.randn(1, 1, 40, 16).expand(1, 2, 40, 16)])
def test_numbers_of_tokens_between_heads_have_plans_of_their_own(heads: torch.Tensor) -> None:
    """A plan has pinned the strides of its results: there all tokens of a head lie between it and the next one."""
    few, many = heads[:, :, :9], heads[:, :, :25]
    assert few.stride() == many.stride()
    assert [empty_output(tokens, 16).stride(1) for tokens in (few, many)] == [9 * 16, 25 * 16]
    assert packed_kind(few) != packed_kind(many)

    within = torch.randn(40, 2, 16).transpose(0, 1)[None]
    assert packed_kind(within[:, :, :9]) == packed_kind(within[:, :, :25])


class WithinForward(FeatureForward):
    """Writes where sequences are and nowhere else, as the real kernels do."""

    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        whole = super().bind(config, shape)

        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> None:
            rows = slice(int(extras.cu_seqlens_q[-1]))
            result, sums = torch.empty_like(out), torch.empty_like(lse)
            whole(q, k, v, result, sums, scale, extras)
            out[:, :, rows], lse[:, rows] = result[:, :, rows], sums[:, rows]

        return launch


class WithinBackward(FeatureBackward):
    def bind(self, config: KernelConfig, shape: AttentionShape) -> Launch:
        whole = super().bind(config, shape)

        def launch(*arguments: Any) -> None:
            *inputs, dq, dk, dv, scale, extras = arguments
            found = [torch.empty_like(gradient) for gradient in (dq, dk, dv)]
            whole(*inputs, *found, scale, extras)
            for gradient, own, bounds in zip((dq, dk, dv), found, ("q", "k", "k"), strict=True):
                rows = slice(int(getattr(extras, f"cu_seqlens_{bounds}")[-1]))
                gradient[:, :, rows] = own[:, :, rows]

        return launch


def test_what_stands_outside_of_packed_sequences_is_zero_and_no_old_memory(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = WithinForward(), WithinBackward()
    monkeypatch.setattr(registry, "KERNELS", {kernel.name: kernel for kernel in both})
    dispatcher = Dispatcher(ListSource())
    q, k, v = (torch.randn(tokens, heads, 16).requires_grad_() for tokens, heads in ((13, 4), (17, 2), (17, 2)))
    bounds = [torch.tensor([0, 4, last], dtype=torch.int32) for last in (11, 14)]
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            q, k, v, *bounds, 7, 10, return_attn_probs=True, dispatcher=dispatcher
        )
        gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [len(kernel.launched) for kernel in both] == [2, 2]
    assert bool((out[11:] == 0).all())
    assert bool(lse[:, 11:].isneginf().all())
    for gradient, end in zip(gradients, (11, 14, 14), strict=True):
        assert bool((gradient[end:] == 0).all())
        assert bool(gradient[:end].isfinite().all())


@pytest.mark.parametrize(
    "asked",
    [
        {"causal": Causal.NONE},
        {"causal": Causal.LOWER_RIGHT, "softcap": 2.0},
        {"causal": Causal.UPPER_LEFT},
        {"causal": Causal.NONE, "window": (3, 1), "alibi_slopes": torch.rand(4, HEADS)},
    ],
)
@pytest.mark.parametrize("longest", [9, 200])
def test_the_mathematics_in_a_captured_graph_reads_no_bounds_on_the_host(
    asked: dict[str, Any], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences without queries, without keys, and tokens behind all of them."""
    bounds = {
        "cu_seqlens_q": torch.tensor([0, 5, 5, 14, 16], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 3, 7, 16, 16], dtype=torch.int32),
    }
    sizes = [(20, HEADS), (18, 2), (18, 2)]
    leaves = [torch.randn(1, heads, tokens, 16).requires_grad_() for tokens, heads in sizes]

    def results() -> list[torch.Tensor]:
        given = bounds | {"lengths": (4, longest, longest)} | asked
        out, lse = mathematics(*leaves, Call.of(scale=0.3, **given), lse=True)
        loss = (out * torch.arange(16)).sum() + lse[~lse.isinf()].sum()
        return [out, lse, *torch.autograd.grad(loss, leaves)]

    wanted = results()
    capture(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    for found, right in zip(results(), wanted, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("softcap", [0.0, 0.05])
@pytest.mark.parametrize("place", range(3))
def test_infinite_numbers_spoil_no_more_in_a_captured_graph(
    place: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are padded to the longest sequence there: 0 * inf is no number."""
    bounds = {name: torch.tensor([0, 9, 32], dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    tensors = [torch.randn(1, 2, 32, 8) for _ in range(3)]
    tensors[place][0, 0, 20, 3], tensors[place][0, 1, 5, 2] = float("inf"), float("-inf")
    leaves = [tensor.requires_grad_() for tensor in tensors]

    def results() -> list[torch.Tensor]:
        call = Call.of(causal=Causal.LOWER_RIGHT, scale=0.3, softcap=softcap, lengths=(2, 23, 23), **bounds)
        out, _ = mathematics(*leaves, call, lse=False)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    eager = results()
    capture(monkeypatch)
    for found, right in zip(results(), eager, strict=True):
        assert not (right.isfinite() & ~found.isfinite()).any()
