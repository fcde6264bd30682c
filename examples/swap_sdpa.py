"""Put blocktune under a module that calls PyTorch's attention, and see that nothing else changes.

python examples/swap_sdpa.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from blocktune import attention


class SelfAttention(nn.Module):
    """Attention of a transformer; `attend` is any function with the signature of PyTorch's."""

    def __init__(self, width: int, num_heads: int, attend=functional.scaled_dot_product_attention) -> None:
        super().__init__()
        self.num_heads, self.attend = num_heads, attend
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seqlen, width = x.shape
        heads = self.qkv(x).view(batch, seqlen, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = self.attend(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, seqlen, width))


def main() -> None:
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    place = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {"device": "cpu", "dtype": torch.float32}
    module, x = SelfAttention(width=512, num_heads=8).to(**place), torch.randn(2, 1024, 512, **place)
    before = module(x)

    module.attend = attention  # all that changes

    after = module(x)
    print(f"largest difference: {(after - before).abs().max().item():.1e}")
    query = torch.randn(2, 8, 1024, 64, **place)
    print(attention.explain(query, query, query, is_causal=True))


if __name__ == "__main__":
    main()
