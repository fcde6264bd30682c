"""Decoding by a model of Llama's shape: one token a step, whose keys and values join a cache of fixed size."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

BASE = 500_000.0
"""Of the rotary embedding's wavelengths."""


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    """The sizes of a model and its cache; layers as wide as those of Llama 3 with 8 billion parameters."""

    layers: int = 12
    num_heads: int = 32
    num_heads_kv: int = 8
    head_dim: int = 128
    inner: int = 14336
    vocabulary: int = 128256
    capacity: int = 4096
    filled: int = 2048

    @property
    def width(self) -> int:
        """Elements of a token between the layers."""
        return self.num_heads * self.head_dim


class CacheAttention(Protocol):
    """Attention over a cache that takes up the new token first. Each implementation has a cache of its own layout."""

    def begin(self, position: int) -> None:
        """Prepare a run of steps that begins when `position` tokens are in the cache."""

    def next_step(self) -> None:
        """Prepare one step: its token is one further."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of query [num_heads, head_dim], after key and value [num_heads_kv, head_dim] joined."""


class LlamaBlock(nn.Module):
    """Attention with grouped heads and a gated feed-forward net, each after a norm and around a residual."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self._heads = (sizes.num_heads, sizes.num_heads_kv, sizes.num_heads_kv)
        self._head_dim = sizes.head_dim
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.width) for _ in range(2))
        self.joint = nn.Linear(sizes.width, sum(self._heads) * sizes.head_dim, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.gate = nn.Linear(sizes.width, 2 * sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, token: Tensor, layer: int, cache: CacheAttention, turn: Tensor) -> Tensor:
        heads = self.joint(self.norms[0](token)).view(-1, self._head_dim)
        query, key, value = heads.split(self._heads)
        seen = cache.attend(layer, turn_heads(query, turn), turn_heads(key, turn), value)
        token = token + self.out(seen.reshape(1, -1))
        gate, up = self.gate(self.norms[1](token)).chunk(2, -1)
        return token + self.down(functional.silu(gate) * up)


def turn_heads(heads: Tensor, turn: Tensor) -> Tensor:
    """Return the heads [num_heads, head_dim], turned by turn [2, head_dim / 2]: cosines and sines."""
    left, right = heads.chunk(2, -1)
    return torch.cat((left * turn[0] - right * turn[1], left * turn[1] + right * turn[0]), -1)


class Decoder(nn.Module):
    """The logits of the next token, one at a time."""

    def __init__(self, sizes: LlamaSizes, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        with device:
            self.tokens = nn.Embedding(sizes.vocabulary, sizes.width, dtype=dtype)
            self.blocks = nn.ModuleList(LlamaBlock(sizes).to(dtype) for _ in range(sizes.layers))
            self.norm = nn.RMSNorm(sizes.width, dtype=dtype)
            self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False, dtype=dtype)
            self._turns = _turns(sizes).to(dtype)  # [capacity, 2, head_dim / 2]

    @torch.no_grad()
    def step(self, token: Tensor, position: Tensor, cache: CacheAttention) -> Tensor:
        """Return the logits [1, vocabulary] after token [1], which is at position [1]; the position then is one on."""
        cache.next_step()
        found, turn = self.tokens(token), self._turns.index_select(0, position)[0]
        for layer, block in enumerate(self.blocks):
            found = block(found, layer, cache, turn)
        position += 1
        return self.head(self.norm(found))


def _turns(sizes: LlamaSizes) -> Tensor:
    frequencies = BASE ** -torch.linspace(0, 1, sizes.head_dim // 2 + 1)[:-1]
    angles = torch.arange(sizes.capacity)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), 1)
