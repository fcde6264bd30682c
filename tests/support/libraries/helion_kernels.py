"""The examples' operators as Helion's own examples write them; they are tuned at its quick effort."""

import math
from collections.abc import Callable

import helion  # type: ignore[import-not-found]
import helion.language as hl  # type: ignore[import-not-found]
import torch
from torch import Tensor


def kernels(seconds: int) -> dict[str, Callable[..., Tensor]]:
    """Return the operators by the name of the example.

    Args:
        seconds: after which Helion ends a search and takes what it has found.
    """
    kernel = helion.kernel(static_shapes=True, autotune_effort="quick", autotune_budget_seconds=seconds)
    return {"softmax": kernel(softmax), "matmul": kernel(matmul), "attention": kernel(attention)}


def softmax(x: Tensor) -> Tensor:
    rows, _ = x.size()
    out = torch.empty_like(x)
    for tile in hl.tile(rows):
        out[tile, :] = torch.softmax(x[tile, :], dim=1)
    return out


def matmul(a: Tensor, b: Tensor) -> Tensor:
    rows, inner = a.size()
    _, columns = b.size()
    out = torch.empty([rows, columns], dtype=a.dtype, device=a.device)
    for tile_m, tile_n in hl.tile([rows, columns]):
        total = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(inner):
            total = torch.addmm(total, a[tile_m, tile_k], b[tile_k, tile_n])
        out[tile_m, tile_n] = total.to(a.dtype)
    return out


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention without a mask; tensors are [heads, seqlen, head_dim]."""
    heads, seqlen, _ = q.size()
    head_dim = hl.specialize(q.size(2))
    out = torch.empty_like(q)
    scale = head_dim**-0.5 / math.log(2.0)
    for tile_h, tile_m in hl.tile([heads, seqlen]):
        largest = hl.full([tile_h, tile_m], float("-inf"), dtype=torch.float32)
        total = torch.full_like(largest, 1.0)
        result = hl.zeros([tile_h, tile_m, head_dim], dtype=torch.float32)
        queries = q[tile_h, tile_m, :]
        for tile_n in hl.tile(seqlen):
            scores = torch.bmm(queries, k[tile_h, tile_n, :].transpose(1, 2)).to(torch.float32)
            larger = torch.maximum(largest, torch.amax(scores, -1) * scale)
            weights = torch.exp2(scores * scale - larger[:, :, None])
            shrink = torch.exp2(largest - larger)
            total = total * shrink + torch.sum(weights, -1)
            result = torch.baddbmm(result * shrink[:, :, None], weights.to(v.dtype), v[tile_h, tile_n, :])
            largest = larger
        out[tile_h, tile_m, :] = (result / total[:, :, None]).to(out.dtype)
    return out
