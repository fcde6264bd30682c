"""The dispatcher with the real kernels, against attention in float64."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.registry import KERNELS, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.selection.ladder import Rung
from tests.support.fakes.dispatch_fakes import ListSource, best, store_with, tuned

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-2}  # float32 products may use TF32


def reference(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None) -> Tensor:
    """Attention in float64, with PyTorch's upper-left triangle."""
    group = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = q @ k.mT * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def view(dice: random.Random, batch: int, heads: int, length: int, width: int, dtype: torch.dtype) -> Tensor:
    """A [batch, heads, length, width] view in some order of dimensions, padded, sliced and misaligned at times."""
    order = dice.choice([(0, 1, 2), (0, 2, 1), (2, 0, 1)])
    padding, offset = dice.choice([0, 0, 0, 8, 3]), dice.choice([0, 0, 0, 8, 1])
    outer = [(batch, heads, length)[dim] for dim in order]
    memory = torch.randn(outer[0] * outer[1] * outer[2] * (width + padding) + offset, dtype=dtype, device="cuda")
    made = memory[offset:].view(*outer, width + padding)[..., :width]
    return made.permute(*(order.index(dim) for dim in range(3)), 3)


@pytest.fixture(scope="module")
def dispatcher() -> Dispatcher:
    return Dispatcher(ListSource())


@pytest.mark.parametrize("seed", range(60))
def test_random_calls_agree_with_float64(dispatcher: Dispatcher, seed: int) -> None:
    dice = random.Random(seed)
    torch.manual_seed(seed)
    dtype = dice.choice([torch.bfloat16, torch.float16, torch.float32])
    heads_kv, group, batch = dice.choice([1, 2, 3]), dice.choice([1, 1, 4]), dice.choice([1, 2])
    seqlen_q, seqlen_k = (dice.choice([1, 17, 128, 200, 513]) for _ in range(2))
    dim = dice.choice([16, 64, 80, 128])
    query = view(dice, batch, heads_kv * group, seqlen_q, dim, dtype)
    key, value = (view(dice, batch, heads_kv, seqlen_k, dim, dtype) for _ in range(2))
    is_causal, scale = dice.choice([True, False]), dice.choice([None, 0.1])
    for _ in range(2):  # the first call resolves, the second one takes the short way
        got = dispatcher(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=group > 1)
        expected = reference(query, key, value, is_causal=is_causal, scale=scale)
        torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert got.stride() == torch.empty_like(query).stride()
    explanation = dispatcher.explain(query, key, value, is_causal=is_causal, enable_gqa=group > 1)
    assert explanation.rung is Rung.DEFAULT, str(explanation)


def aligned(length: int = 512) -> list[Tensor]:
    return [torch.randn(2, 4, length, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]


def shape_of_aligned(length: int = 512) -> AttentionShape:
    return AttentionShape(
        batch=2, num_heads=4, num_heads_kv=4, seqlen_q=length, seqlen_k=length, head_dim=64, head_dim_v=64
    )


def kernels_here() -> Iterator[AttentionKernel]:
    yield from kernels_for(shape_of_aligned(), current_device().limits)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_misaligned_slice_after_an_aligned_plan_is_right(name: str) -> None:
    kernel = KERNELS[name]
    if kernel not in kernels_here():
        pytest.skip(f"{name} does not run on this GPU")
    config = kernel.default_config(shape_of_aligned(), current_device().limits)
    dispatcher = Dispatcher(ListSource([tuned(shape_of_aligned(), config)]))
    arguments = aligned()
    torch.testing.assert_close(dispatcher(*arguments), scaled_dot_product_attention(*arguments), atol=2e-2, rtol=2e-2)
    for which in range(3):
        shifted = list(arguments)
        memory = torch.randn(arguments[which].numel() + 1, dtype=torch.bfloat16, device="cuda")
        shifted[which] = memory[1:].view_as(arguments[which])
        expected = reference(*shifted, is_causal=False, scale=None)
        for _ in range(2):
            torch.testing.assert_close(dispatcher(*shifted).double(), expected, atol=2e-2, rtol=2e-2)


def test_what_pytorch_computes_is_right_for_misaligned_slices_too(dispatcher: Dispatcher) -> None:
    query, key, value = aligned()
    memory = torch.randn(key.numel() + 1, dtype=torch.bfloat16, device="cuda")
    key = memory[1:].view_as(key)
    hidden = torch.ones(512, 512, dtype=torch.bool, device="cuda").triu(1)
    mask = torch.zeros(512, 512, dtype=torch.bfloat16, device="cuda").masked_fill(hidden, float("-inf"))
    mask.requires_grad_()  # which is PyTorch's to compute
    expected = reference(query, key, value, is_causal=True, scale=None)
    torch.testing.assert_close(dispatcher(query, key, value, mask).double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("scale", [0.0, -0.2])
def test_scales_that_are_not_positive(dispatcher: Dispatcher, scale: float) -> None:
    arguments = [tensor.float() for tensor in aligned(100)]
    expected = scaled_dot_product_attention(*(tensor.double() for tensor in arguments), scale=scale)
    for _ in range(2):
        got = dispatcher(*arguments, scale=scale)
        torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-4)


def test_the_users_store_decides(tmp_path: Path) -> None:
    device = current_device()
    kernel = next(kernels_here())
    default = kernel.default_config(shape_of_aligned(), device.limits)
    config = KernelConfig.of(kernel.name, {name: min(choices) for name, choices in kernel.parameters.items()})
    assert config != default
    from blocktune.runtime.store_reader.sources import SqliteConfigs

    winner = best(shape_of_aligned(), config, device=device, kernel_hash=kernel.source_hash)
    dispatcher = Dispatcher(SqliteConfigs(store_with(tmp_path / "store.db", winner)))
    arguments = aligned()
    torch.testing.assert_close(dispatcher(*arguments), scaled_dot_product_attention(*arguments), atol=2e-2, rtol=2e-2)
    explanation = dispatcher.explain(*arguments)
    assert (explanation.rung, explanation.config) == (Rung.EXACT, config)


def test_a_graph_replays_what_was_captured_after_warmup(dispatcher: Dispatcher) -> None:
    dispatcher.warmup([shape_of_aligned()])
    arguments = aligned()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dispatcher(*arguments)
    for tensor in arguments:
        tensor.normal_()
    graph.replay()
    torch.testing.assert_close(out, scaled_dot_product_attention(*arguments), atol=2e-2, rtol=2e-2)


def test_a_thousand_replays_take_no_more_memory(dispatcher: Dispatcher) -> None:
    dispatcher.warmup([shape_of_aligned()])
    arguments = aligned()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dispatcher(*arguments)
    graph.replay()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(1000):
        graph.replay()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_a_thousand_eager_calls_take_no_more_memory(dispatcher: Dispatcher) -> None:
    arguments = aligned()
    for _ in range(10):
        dispatcher(*arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(1000):
        dispatcher(*arguments)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_profilers_hooks_still_fire(dispatcher: Dispatcher) -> None:
    from triton import knobs

    arguments = aligned()
    dispatcher(*arguments)
    seen: list[str] = []

    def enter(metadata: object) -> None:
        seen.append("launch")

    knobs.runtime.launch_enter_hook.add(enter)
    try:
        dispatcher(*arguments)
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
    assert seen == ["launch"]


def test_other_streams_are_respected(dispatcher: Dispatcher) -> None:
    arguments = aligned(2048)
    expected = scaled_dot_product_attention(*arguments)
    dispatcher(*arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        later = [tensor.clone() for tensor in arguments]
        got = dispatcher(*later)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_decide_the_device(dispatcher: Dispatcher) -> None:
    arguments = [tensor.to("cuda:1") for tensor in aligned()]
    for _ in range(2):
        got = dispatcher(*arguments)
        torch.testing.assert_close(got, scaled_dot_product_attention(*arguments), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("is_causal", [True, False])
def test_more_keys_than_queries_are_upper_left(dispatcher: Dispatcher, is_causal: bool) -> None:
    query, key, value = torch.randn(3, 1, 2, 300, 64, device="cuda", dtype=torch.bfloat16).unbind()
    query = query[:, :, :77].contiguous()
    got = dispatcher(query, key, value, is_causal=is_causal)
    expected = reference(query, key, value, is_causal=is_causal, scale=None)
    torch.testing.assert_close(got.double(), expected, atol=3e-2, rtol=3e-2)
    upper_left = Causal.UPPER_LEFT if is_causal else Causal.NONE
    plan_shape = dispatcher.explain(query, key, value, is_causal=is_causal).shape
    assert plan_shape is not None
    assert plan_shape.causal is upper_left
