"""On a GPU: the second call of a kind launches by the fast path, and computes what PyTorch computes."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from blocktune.runtime.api.flash_attn import flash_attn_func, flash_attn_varlen_func
from blocktune.runtime.api.kv_cache import flash_attn_with_kvcache
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.dispatcher import attention

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-2
"""Relative Frobenius error of bfloat16 to PyTorch's attention in bfloat16, which has as much itself."""
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda grad: grad,
    "transposed": lambda grad: grad.transpose(1, 2).contiguous().transpose(1, 2),
    "one for all": lambda grad: grad[:, :, :1, :1].expand(grad.shape),
    "padded": lambda grad: torch.cat([grad, grad], -1)[..., : grad.shape[-1]],
    "misaligned": lambda grad: torch.cat([grad.flatten()[:1], grad.flatten()])[1:].view(grad.shape),
}


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    attention.reload()
    yield
    attention.reload()


def random(*sizes: int, grad: bool = False) -> Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16, device="cuda").requires_grad_(grad)


def assert_close(got: Any, wanted: Any) -> None:
    for one, other in zip(got, wanted, strict=True):
        error = (one.float() - other.float()).norm()
        assert error <= TOLERANCE * other.float().norm(), float(error / other.float().norm())


def exact(*tensors: Tensor, **options: Any) -> Tensor:
    """PyTorch's attention in float32 by its definition, which no layout or address of a gradient changes."""
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(*(tensor.float() for tensor in tensors), **options).to(tensors[0].dtype)


def gradients(attend: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def forbid_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def long_way(*_: Any, **__: Any) -> None:
        raise AssertionError("a call of a known kind took the long way")

    monkeypatch.setattr(Call, "of", long_way)
    monkeypatch.setattr(Call, "plan_key", long_way)


@pytest.mark.parametrize("seqlen", [128, 200])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
def test_gradients_of_any_layout(kind: str, seqlen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"is_causal": kind == "causal"}
    if kind == "mask":
        options["attn_mask"] = torch.rand(2, 1, seqlen, seqlen, device="cuda") > 0.3
    for turn in range(3):
        if turn == 1:
            forbid_long_way(monkeypatch)
        leaves, grad = [random(2, 4, seqlen, 64, grad=True) for _ in range(3)], random(2, 4, seqlen, 64)
        for laid_out in LAYOUTS.values():
            got, wanted = (
                gradients(lambda *all, own=attend: own(*all, **options), leaves, laid_out(grad))
                for attend in (attention, exact)
            )
            assert_close(got, wanted)


def test_packed_sequences_of_other_numbers_of_tokens() -> None:
    """Multiples of 16 and others: compiled code differs, and so does the workspace."""
    for tokens in (256, 240, 333, 300, 256, 333):
        cut = tokens // 3
        bounds = torch.tensor([0, cut, tokens], dtype=torch.int32, device="cuda")
        leaves, grad = [random(tokens, 4, 64, grad=True) for _ in range(3)], random(tokens, 4, 64)

        def packed(*all: Tensor, ends: Tensor = bounds) -> Tensor:
            out = flash_attn_varlen_func(*all, ends, ends, 256, 256, causal=True)
            assert isinstance(out, Tensor)
            return out

        def apart(*all: Tensor, cut: int = cut) -> Tensor:
            parts = [
                [tensor[first:last].transpose(0, 1)[None] for tensor in all] for first, last in ((0, cut), (cut, None))
            ]
            return torch.cat([sdpa(*part, is_causal=True)[0].transpose(0, 1) for part in parts])

        for _ in range(3):
            assert_close(gradients(packed, leaves, grad), gradients(apart, leaves, grad))


class Cache:
    """A cache of two entries, and what it should hold."""

    def __init__(self, page_size: int = 0) -> None:
        self.rows = [random(2, 512, 2, 64) for _ in range(2)]
        self.lengths = torch.tensor([5, 60], dtype=torch.int32, device="cuda")
        self.caches, self.table = [tensor.clone() for tensor in self.rows], None
        if page_size:
            pages = torch.randperm(2 * 512 // page_size, device="cuda")
            self.table = pages.view(2, -1).int()
            self.caches = [torch.empty_like(rows).view(-1, page_size, 2, 64) for rows in self.rows]
            for cache, rows in zip(self.caches, self.rows, strict=True):
                cache[pages] = rows.reshape(cache.shape)

    def attend(self, query: Tensor, new: list[Tensor]) -> Tensor:
        out = flash_attn_with_kvcache(
            query, *self.caches, *new, cache_seqlens=self.lengths, block_table=self.table, causal=True
        )
        assert isinstance(out, Tensor)
        return out

    def expected(self, query: Tensor, new: list[Tensor]) -> Tensor:
        """The output, with the new rows in `rows`."""
        outs = []
        for entry, length in enumerate(self.lengths.tolist()):
            for rows, own in zip(self.rows, new, strict=True):
                rows[entry, length : length + own.shape[1]] = own[entry]
            keys, values = (rows[entry : entry + 1, : length + new[0].shape[1]].transpose(1, 2) for rows in self.rows)
            outs.append(sdpa(query[entry : entry + 1].transpose(1, 2), keys, values, enable_gqa=True).transpose(1, 2))
        return torch.cat(outs)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("page_size", [0, 64])
def test_a_cache_grows_without_reading_anything_back(page_size: int) -> None:
    cache = Cache(page_size)
    for step in range(5):
        query, new = random(2, 1, 8, 64), [random(2, 1, 2, 64) for _ in range(2)]
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            out = cache.attend(query, new)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_close([out], [cache.expected(query, new)])
        cache.lengths += 1


def test_a_captured_graph_appends_what_its_tensors_hold() -> None:
    cache = Cache()
    query, new = random(2, 1, 8, 64), [random(2, 1, 2, 64) for _ in range(2)]
    cache.attend(query, new)
    cache.attend(query, new)
    cache.expected(query, new)  # the rows that are appended ahead of the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.attend(query, new)
    for _ in range(3):
        cache.lengths += 1
        for tensor in (query, *new):
            tensor.normal_()
        graph.replay()
        assert_close([out], [cache.expected(query, new)])


def test_a_captured_training_step_repeats() -> None:
    leaves, grad = [random(1, 4, 128, 64, grad=True) for _ in range(3)], random(1, 4, 128, 64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(attention, leaves, grad)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = gradients(attention, leaves, grad)
    with torch.no_grad():
        for tensor in leaves:
            tensor.normal_()
    for _ in range(2):
        graph.replay()
        assert_close(found, gradients(sdpa, leaves, grad))


@pytest.mark.parametrize("options", [{"window_size": (40, 8)}, {"softcap": 20.0}, {"causal": True}], ids=str)
def test_repeated_calls_on_several_streams_compute_the_same(options: dict[str, Any]) -> None:
    tensors = [random(2, 300, 4, 64) for _ in range(3)]
    wanted = flash_attn_func(*tensors, **options)
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
    torch.cuda.synchronize()
    for number in range(12):
        with torch.cuda.stream(streams[number % 2]):
            found.append(flash_attn_func(*tensors, **options))
    torch.cuda.synchronize()
    for out in found:
        assert torch.equal(out, wanted)


def test_a_profiler_sees_the_kernels_of_repeated_calls() -> None:
    leaves, grad, seen = [random(1, 4, 128, 64, grad=True) for _ in range(3)], random(1, 4, 128, 64), []
    for _ in range(3):
        wanted = gradients(attention, leaves, grad)
    hook = triton.knobs.runtime.launch_enter_hook
    noted = seen.append
    hook.add(noted)
    try:
        assert_close(gradients(attention, leaves, grad), wanted)
    finally:
        hook.remove(noted)
    assert len(seen) >= 2


@pytest.mark.parametrize("dim", [64, 96])
def test_a_new_thread_has_no_context_until_it_needs_one(dim: int) -> None:
    """Memory for the result is there, so that PyTorch asks CUDA for nothing before the first descriptor is encoded."""
    first, others = ([random(1, 4, 512, dim) for _ in range(3)] for _ in range(2))
    for _ in range(3):
        attention(*first)
    wanted = attention(*others).clone()
    fresh = [tensor.clone() for tensor in others]  # at addresses that no call has seen
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: attention(*fresh)).result()
    assert torch.equal(found, wanted)
