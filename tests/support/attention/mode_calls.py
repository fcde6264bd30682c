"""Calls of every entry point as functions of their tensors, for modes of PyTorch that run them in other ways."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.values.block_mask import BlockMask
from blocktune.runtime.api.block_sparse import block_sparse_attention
from blocktune.runtime.api.flash_attn import flash_attn_func, flash_attn_varlen_func
from blocktune.runtime.api.kv_cache import flash_attn_with_kvcache
from blocktune.runtime.dispatch.dispatcher import Dispatcher

HEADS, HEADS_KV, DIM = 8, 2, 64


@dataclass(frozen=True, slots=True)
class ModeCall:
    """attend(*tensors), and how many of the tensors, from the first one, have gradients."""

    attend: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    trained: int = 0

    def run(self, attend: Callable[..., Any], tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the output of a form of the call, and the gradients."""
        if not self.trained:
            out = attend(*tensors)
            return [out]
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[: self.trained]]
        out = attend(*leaves, *tensors[self.trained :])
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    def fresh(self, seed: int) -> tuple[Tensor, ...]:
        """Return tensors of the same kinds with other values where these are numbers of 16 bits."""
        generator = torch.Generator("cuda").manual_seed(seed)
        return tuple(
            torch.randn(tensor.shape, dtype=tensor.dtype, device="cuda", generator=generator)
            if tensor.dtype == torch.bfloat16
            else tensor.clone()
            for tensor in self.tensors
        )


def mode_calls(dispatcher: Dispatcher) -> dict[str, ModeCall]:
    """Return calls of every entry point on a GPU, by name: the same ones each time."""
    torch.manual_seed(0)
    own: dict[str, Any] = {"dispatcher": dispatcher}

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.bfloat16, device="cuda")

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def rows(length: int = 256) -> tuple[Tensor, Tensor, Tensor]:
        return random(2, length, HEADS, DIM), random(2, length, HEADS_KV, DIM), random(2, length, HEADS_KV, DIM)

    heads_first = tuple(tensor.transpose(1, 2).contiguous() for tensor in rows())
    packed = random(300, HEADS, DIM), random(300, HEADS_KV, DIM), random(300, HEADS_KV, DIM)
    ends, mask = int32(0, 100, 300), torch.rand(1, 1, 256, 256, device="cuda") > 0.3
    query, keys, values = random(4, 1, HEADS, DIM), random(4, 640, HEADS_KV, DIM), random(4, 640, HEADS_KV, DIM)
    lengths, table = int32(5, 640, 100, 333), torch.randperm(40, device="cuda").int().view(4, 10)
    pages = random(40, 64, HEADS_KV, DIM), random(40, 64, HEADS_KV, DIM)
    blocks = torch.ones(1, 1, 4, 4, dtype=torch.bool, device="cuda").tril()
    sdpa = partial(dispatcher, enable_gqa=True)
    flash = partial(flash_attn_func, **own)
    varlen = partial(flash_attn_varlen_func, **own)
    cached = partial(flash_attn_with_kvcache, **own)

    def packed_rows(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Any:
        return varlen(q, k, v, bounds, bounds, 200, 200, causal=True)

    def sparse(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Any:
        return block_sparse_attention(q, k, v, BlockMask(64, 64, seen), **own)

    def slopes_of(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
        return flash(q, k, v, causal=True, alibi_slopes=slopes)

    def sinks_of(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        return flash(q, k, v, causal=True, s_aux=sinks)

    def decode(q: Tensor, k: Tensor, v: Tensor, seqlens: Tensor) -> Any:
        return cached(q, k, v, cache_seqlens=seqlens, causal=True)

    def paged(q: Tensor, k: Tensor, v: Tensor, seqlens: Tensor, numbers: Tensor) -> Any:
        return cached(q, k, v, cache_seqlens=seqlens, block_table=numbers, causal=True)

    slopes, long = torch.rand(HEADS, device="cuda"), tuple(t.transpose(1, 2).contiguous() for t in rows(1024))
    return {
        "plain": ModeCall(sdpa, heads_first),
        "long causal": ModeCall(partial(sdpa, is_causal=True), long),
        "mask": ModeCall(sdpa, (*heads_first, mask)),
        "negative scale with a mask": ModeCall(partial(sdpa, scale=-0.1), (*heads_first, mask)),
        "zero scale with a mask": ModeCall(partial(sdpa, scale=0.0), (*heads_first, mask)),
        "window": ModeCall(partial(flash, window_size=(64, 0)), rows()),
        "soft cap": ModeCall(partial(flash, softcap=20.0), rows()),
        "ALiBi": ModeCall(slopes_of, (*rows(), slopes)),
        "sinks": ModeCall(sinks_of, (*rows(), torch.randn(HEADS, device="cuda"))),
        "packed": ModeCall(packed_rows, (*packed, ends)),
        "block mask": ModeCall(sparse, (*heads_first, blocks)),
        "cache": ModeCall(decode, (query, keys, values, lengths)),
        "pages": ModeCall(paged, (query, *pages, lengths, table)),
        "training": ModeCall(partial(sdpa, is_causal=True), long, trained=3),
        "training with a mask": ModeCall(sdpa, (*heads_first, mask), trained=3),
        "training with a window": ModeCall(partial(flash, window_size=(64, 0)), rows(), trained=3),
        "training with sinks": ModeCall(sinks_of, (*rows(), torch.randn(HEADS, device="cuda")), trained=3),
        "training of packed rows": ModeCall(packed_rows, (*packed, ends), trained=3),
        "training with a block mask": ModeCall(sparse, (*heads_first, blocks), trained=3),
    }


CALLS = (
    "plain", "long causal", "mask", "negative scale with a mask", "zero scale with a mask", "window", "soft cap",
    "ALiBi", "sinks", "packed", "block mask", "cache", "pages", "training", "training with a mask",
    "training with a window", "training with sinks", "training of packed rows", "training with a block mask",
)  # fmt: skip
"""The names of `mode_calls`, for tests that are collected where there is no GPU."""
