"""All spellings of a call have one plan and one tuning shape, compiled graphs as well, whose sizes stay dynamic."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.api.hugging_face.attention import transformers_attention
from blocktune.runtime.api.torch_varlen import varlen_attn
from blocktune.runtime.dispatch import engine
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.torch_math import mathematics
from tests.support.fakes.dispatch_fakes import ListSource
from tests.support.fakes.fake_launches import pretend_kernels
from tests.support.triton_modes import compiled_here

FAR = 2**31 - 1
ROWS = 128
FULL = [{}, {"window_size": (FAR, FAR)}, {"window_size": (ROWS - 1, ROWS - 1)}, {"window_size": (-1, sys.maxsize)}]
CAUSAL = [
    {"causal": True},
    {"window_size": (-1, 0)},
    {"window_size": (FAR, 0)},
    {"window_size": (ROWS - 1, 0)},
    {"causal": True, "window_size": (4096, 0)},
    {"causal": True, "window_size": (-1, 7)},
    {"causal": True, "window_size": (FAR, FAR)},
]
WINDOW = [
    {"window_size": (31, 0)},
    {"causal": True, "window_size": (31, 31)},
    {"causal": True, "window_size": (31, -1)},
]
SPELLINGS = {"": FULL, "causal": CAUSAL, "causal window=31:-1": WINDOW}
"""Options of `flash_attn_func` by what the label of the shape says of them."""


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16)


def bounds(*ends: int) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32)


def shapes(dispatcher: Dispatcher) -> list[AttentionShape]:
    """The shapes of all plans."""
    found = [plan.explanation.shape for plan in dispatcher.resolver.plans.values()]
    return [shape for shape in found if shape is not None]


@compiled_here
@pytest.mark.parametrize("label", SPELLINGS)
@pytest.mark.parametrize("gradients", [False, True])
def test_of_dense_tensors(label: str, gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_kernels(monkeypatch)
    dispatcher = Dispatcher(ListSource())
    tensors = [random(1, ROWS, 2, 64).requires_grad_(gradients) for _ in range(3)]
    for options in SPELLINGS[label]:
        flash_attn_func(*tensors, **options, dispatcher=dispatcher)
    assert len(shapes(dispatcher)) == 1 + gradients
    assert {shape.label.removesuffix(" backward") for shape in shapes(dispatcher)} == {
        f"b1 h2 s128 d64 bf16 {label}".strip()
    }


@compiled_here
@pytest.mark.parametrize("spellings", SPELLINGS.values(), ids=SPELLINGS)
def test_of_packed_sequences(spellings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_kernels(monkeypatch)
    dispatcher = Dispatcher(ListSource())
    tensors, ends = [random(200, 2, 64) for _ in range(3)], bounds(72, 200)
    for options in spellings:
        flash_attn_varlen_func(*tensors, ends, ends, ROWS, ROWS, **options, dispatcher=dispatcher)
        given = {"is_causal": options.get("causal", False), "window_size": options.get("window_size", (-1, -1))}
        varlen_attn(*tensors, ends, ends, ROWS, ROWS, **given, dispatcher=dispatcher)
    assert len(shapes(dispatcher)) == 1


@compiled_here
def test_of_packed_sequences_whose_longest_has_no_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_kernels(monkeypatch)
    dispatcher = Dispatcher(ListSource())
    for tokens in (130, 180, 200, 256):
        tensors, ends = [random(tokens, 2, 64) for _ in range(3)], bounds(72, tokens)
        for longest in (256, 2**30, FAR, 2**80):
            flash_attn_varlen_func(*tensors, ends, ends, longest, longest, dispatcher=dispatcher)
    lengths = {(shape.seqlen_q, shape.seqlen_k) for shape in shapes(dispatcher)}
    assert lengths == {(256, 256)}
    flash_attn_varlen_func(*tensors, ends, ends, 4096, 256, dispatcher=dispatcher)
    assert (4096, 256) in {(shape.seqlen_q, shape.seqlen_k) for shape in shapes(dispatcher)}, "one for all calls"


@compiled_here
@pytest.mark.parametrize(
    ("rows", "spellings", "asked"),
    [
        (1, [*FULL, *CAUSAL], (Causal.NONE, "cached")),
        (1, WINDOW, (Causal.NONE, "window=31:-1 cached")),
        (3, FULL, (Causal.NONE, "cached")),
        (3, CAUSAL, (Causal.LOWER_RIGHT, "cached")),
        (3, WINDOW, (Causal.LOWER_RIGHT, "window=31:-1 cached")),
    ],
)
def test_of_caches(
    rows: int, spellings: list[dict[str, Any]], asked: tuple[Causal, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_kernels(monkeypatch)
    dispatcher = Dispatcher(ListSource())
    query, caches = random(2, rows, 2, 64), [random(2, ROWS, 2, 64) for _ in "kv"]
    for options in spellings:
        flash_attn_with_kvcache(query, *caches, cache_seqlens=bounds(9), **options, dispatcher=dispatcher)
    assert {(shape.causal, shape.features.label) for shape in shapes(dispatcher)} == {asked}


@compiled_here
def test_of_models_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_kernels(monkeypatch)
    dispatcher = Dispatcher(ListSource())
    tensors = [random(1, 2, ROWS, 64) for _ in range(3)]
    for window in (None, ROWS, 4096, FAR, sys.maxsize):
        transformers_attention(torch.nn.Module(), *tensors, None, sliding_window=window, dispatcher=dispatcher)
    assert [shape.label for shape in shapes(dispatcher)] == ["b1 h2 s128 d64 bf16 causal"]


def test_a_shape_that_is_written_down_is_that_of_the_call() -> None:
    query, key = random(1, 2, 64, 64), random(1, 2, 96, 64)
    for causal in Causal:
        for window in ((-1, 0), (FAR, FAR), (63, 0), (95, 63), (94, 62), (0, 0)):
            call = Call.of(causal=causal, scale=1.0, window=window).over(query, key)
            features = Features.parse(f"window={window[0]}:{window[1]}")
            written = AttentionShape(
                batch=1, num_heads=2, seqlen_q=64, seqlen_k=96, head_dim=64, causal=causal, features=features
            )
            found = call.shape(query, key, key, written.direction)
            assert found == written
            assert (call.causal, call.features) == (found.causal, found.features)  # what launches go by


LABELS = {
    (-1, 0): [""] * 4,
    (31, 0): ["", "", "window=31:-1", "window=31:-1"],
    (31, 5): ["window=-1:5", "window=-1:5", "window=31:5", "window=31:5"],
}
"""The windows of 8, 32, 33 and 64 rows."""


@pytest.mark.parametrize("window", LABELS)
def test_a_graph_takes_all_lengths_and_the_form_of_each(
    window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.testing import CompileCounter  # takes half a second

    calls: list[Call] = []

    def noted(query: Tensor, key: Tensor, value: Tensor, call: Call, *, lse: bool) -> tuple[Tensor, Tensor]:
        calls.append(call)
        return mathematics(query, key, value, call, lse=lse)

    monkeypatch.setattr(engine, "mathematics", noted)
    torch._dynamo.reset()
    graphs = CompileCounter()
    attend = torch.compile(partial(flash_attn_func, window_size=window), dynamic=True, backend=graphs)
    found = []
    for rows in (8, 32, 33, 64):
        tensors = [torch.randn(1, rows, 2, 16) for _ in range(3)]
        out = attend(*tensors)
        found.append(calls[-1])
        torch.testing.assert_close(out, flash_attn_func(*tensors, window_size=window))
    assert graphs.frame_count == 1
    assert [call.features.label for call in found] == LABELS[window]
    assert {call.causal for call in found} == {Causal.UPPER_LEFT if window[1] == 0 else Causal.NONE}
