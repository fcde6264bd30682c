"""Comparisons beyond the plain forward: backward, features and decoding, on the CPU."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.db.records.records import Best, Environment
from blocktune.db.store import ResultStore
from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.compare import peers
from blocktune.tuner.compare.compare import compare
from blocktune.tuner.compare.flash_peers import FLASH_PEERS
from blocktune.tuner.compare.peers import sdpa_problem
from blocktune.tuner.compare.report import Comparison
from blocktune.tuner.correctness.inputs import key_bytes
from blocktune.tuner.measure import protocol

DEVICE = device_named("h200")
SHAPE = AttentionShape(
    batch=1, num_heads=2, num_heads_kv=1, seqlen_q=128, seqlen_k=128, head_dim=64, head_dim_v=64, dtype="float16"
)
BACKWARD = replace(SHAPE, direction=Direction.BACKWARD)


class FakeClock:
    """Runs every launch once; each takes 100 microseconds."""

    def __init__(self) -> None:
        self._known: list[Callable[[], None]] = []

    def heat(self, launch: Callable[[], None], seconds: float) -> None:
        launch()

    def rounds(self, launches: Sequence[Callable[[], None]], count: int) -> tuple[tuple[float, ...], ...]:
        for launch in launches:
            if launch not in self._known:
                launch()
        self._known += launches
        return ((100.0,) * len(launches),) * count

    def synchronize(self) -> None:
        pass


def bind(config: KernelConfig, shape: AttentionShape) -> Launch:
    """A launcher of the reference, in either direction."""

    def forward(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> None:
        out.copy_(attention_reference(q, k, v, causal=shape.causal, features=shape.features, extras=extras)[0])

    def backward(
        q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float
    ) -> None:
        inputs = [tensor.float().requires_grad_() for tensor in (q, k, v)]
        with torch.enable_grad():
            result, _ = attention_reference(*inputs, causal=shape.causal)
        for gradient, found in zip((dq, dk, dv), torch.autograd.grad(result, inputs, dout.float()), strict=True):
            gradient.copy_(found)

    return backward if shape.direction is Direction.BACKWARD else forward


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Comparison]]:
    """Compares a shape whose winner is the default of the first kernel that computes it."""
    monkeypatch.setattr(protocol, "REST_SECONDS", 1e-4)
    monkeypatch.setattr("blocktune.tuner.compare.compare.BACKENDS", {"cudnn": "MATH"})
    with ResultStore.open(tmp_path / "results.db") as store:

        def compared(shape: AttentionShape, **given: Any) -> Comparison:
            kernel = kernels_for(shape, DEVICE.limits)[0]
            best = Best(
                device=DEVICE,
                environment=Environment(triton="3.6.0", ptxas="12.8", torch="2.13"),
                shape=shape,
                config=kernel.default_config(shape, DEVICE.limits),
                kernel_hash=get_kernel(kernel.name).source_hash,
                origin=Origin.MEASURED,
                time_us=10.0,
                trials=3,
            )
            assert store.set_best(best)
            clock = FakeClock()
            return compare(shape, store=store, device=DEVICE, torch_device="cpu", bind=bind, clock=clock, **given)

        yield compared


def problems(comparison: Comparison) -> dict[str, str]:
    """Of everybody but FlashAttention-4, which is not installed."""
    return {
        entry.name: entry.problem for entry in comparison.entries if entry.problem and entry.name not in FLASH_PEERS
    }


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
def test_a_backward_is_compared_with_pytorchs(run: Callable[..., Comparison], causal: Causal) -> None:
    shape = replace(BACKWARD, causal=causal)
    comparison = run(shape, compiler=object())
    assert problems(comparison) == {
        "paper": "this rule is one of a forward whose queries fill a tile",
        "triton_autotune": "stock autotune tunes one function of a forward without features, and no other",
    }
    timing = next(entry.timing for entry in comparison.entries if entry.name == "cudnn")
    assert timing is not None
    assert timing.tflops == pytest.approx(shape.flops / 1e8)
    assert timing.key_gbs is None


def test_masks_reach_pytorch(run: Callable[..., Comparison]) -> None:
    for label in ("boolean", "additive"):
        comparison = run(replace(SHAPE, features=Features.parse(label)))
        assert problems(comparison) == {}, label


@pytest.mark.parametrize(
    ("label", "causal", "reason"),
    [
        ("window=20:0", Causal.NONE, "has no window"),
        ("softcap alibi", Causal.NONE, "has no alibi, softcap"),
        ("dropout", Causal.NONE, "draws other random numbers"),
        ("boolean", Causal.UPPER_LEFT, "`attn_mask` or `is_causal`, not both"),
    ],
)
def test_who_cannot_compute_a_feature_is_named_with_the_reason(
    run: Callable[..., Comparison], label: str, causal: Causal, reason: str
) -> None:
    comparison = run(replace(SHAPE, causal=causal, features=Features.parse(label)))
    assert set(problems(comparison)) == {"cudnn"}
    assert reason in problems(comparison)["cudnn"]


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.LOWER_RIGHT])
def test_decoding_shows_the_rate_of_keys_and_values(run: Callable[..., Comparison], causal: Causal) -> None:
    shape = replace(SHAPE, seqlen_q=1, seqlen_k=512, causal=causal)
    comparison = run(shape)
    assert set(problems(comparison)) == {"paper"}
    assert key_bytes(shape) == 512 * 128 * 2
    timing = next(entry.timing for entry in comparison.entries if entry.name == "tuned")
    assert timing is not None
    assert timing.key_gbs == pytest.approx(512 * 128 * 2 / 1e5)
    assert comparison.to_json()["contenders"][0]["timing"]["key_gbs"] == timing.key_gbs


def test_a_single_query_sees_all_keys_but_more_do_not() -> None:
    one, two = (replace(SHAPE, seqlen_q=queries, causal=Causal.LOWER_RIGHT) for queries in (1, 2))
    assert sdpa_problem(one) is None
    assert "aligns the mask to the upper left" in (sdpa_problem(two) or "")


def test_pytorch_is_not_compared_while_a_provider_stands_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "current_flash_attention_impl", lambda: "blocktune")
    assert "calls the kernels of blocktune" in (sdpa_problem(SHAPE) or "")
