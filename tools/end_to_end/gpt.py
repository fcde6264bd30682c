"""Training of a model of GPT-2's size: blocks of causal attention and a feed-forward net, one step at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of query, key and value [batch, num_heads, seqlen, head_dim]."""


@dataclass(frozen=True, slots=True)
class GptSizes:
    """The sizes of a model and of its batches; those of GPT-2 with 124 million parameters."""

    layers: int = 12
    num_heads: int = 12
    head_dim: int = 64
    vocabulary: int = 50257
    batch: int = 4
    seqlen: int = 1024

    @property
    def width(self) -> int:
        """Elements of a token between the layers."""
        return self.num_heads * self.head_dim


class GptBlock(nn.Module):
    """Attention and a feed-forward net, each after a norm and around a residual."""

    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        width = sizes.width
        self._heads = (3, sizes.num_heads, sizes.head_dim)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        joint = self.joint(self.norms[0](tokens)).unflatten(-1, self._heads)  # [batch, seqlen, 3, num_heads, head_dim]
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        tokens = tokens + self.out(attend(query, key, value).transpose(1, 2).flatten(2))
        return tokens + self.down(functional.gelu(self.up(self.norms[1](tokens)), approximate="tanh"))


class Gpt(nn.Module):
    """The logits of every next token."""

    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(sizes.vocabulary, sizes.width), nn.Embedding(sizes.seqlen, sizes.width)
        self.blocks = nn.ModuleList(GptBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        found = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            found = block(found, attend)
        return self.head(self.norm(found))


class Training:
    """A model, its optimizer and a batch that stays the same.

    Args:
        sizes: of the model and the batch.
        device: where it is trained.
        dtype: of parameters and activations.
    """

    def __init__(self, sizes: GptSizes, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self._model = Gpt(sizes).to(device, dtype)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self._tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.seqlen + 1), device=device)

    def gradients(self, attend: Attend) -> list[Tensor]:
        """Return the loss and the gradients of the first block, without a step."""
        loss = self._loss(attend)
        return [loss.detach(), *torch.autograd.grad(loss, list(self._model.blocks[0].parameters()))]

    def step(self, attend: Attend) -> None:
        """Compute the loss and its gradients, and change the parameters by them."""
        self._loss(attend).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _loss(self, attend: Attend) -> Tensor:
        logits = self._model(self._tokens[:, :-1], attend)
        return functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
