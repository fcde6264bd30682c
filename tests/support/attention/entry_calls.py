"""Calls of every entry point, of tensors so small that the host's part is all that counts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from blocktune.kernels.values.block_mask import BlockMask
from blocktune.runtime.api.block_sparse import block_sparse_attention
from blocktune.runtime.api.flash_attn import flash_attn_func, flash_attn_varlen_func
from blocktune.runtime.api.kv_cache import flash_attn_with_kvcache
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention

SIZE = (1, 4, 128, 64)
PACKED, CACHE, NEW = (256, 4, 64), (2, 512, 2, 64), (2, 1, 2, 64)
MASK = (1, 1, 128, 128)

Call = Callable[[], Any]
Pair = tuple[Call, Call | None]
"""Our call, and PyTorch's of the same if it has one."""


def entry_calls(device: str, dispatcher: Dispatcher = attention) -> dict[str, Callable[[], Pair]]:
    """What makes the calls of each entry point on a device, by the name under which its cost is recorded."""
    own: dict[str, Any] = {"dispatcher": dispatcher}

    def three(size: tuple[int, ...] = SIZE, *, grad: bool = False) -> list[Tensor]:
        made = [torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(3)]
        return [tensor.requires_grad_(grad) for tensor in made]

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def both(tensors: list[Tensor], *rest: Any, **options: Any) -> Pair:
        return lambda: dispatcher(*tensors, *rest, **options), lambda: sdpa(*tensors, *rest, **options)

    def backward() -> Pair:
        tensors = three(grad=True)
        return backward_of(dispatcher, tensors), backward_of(sdpa, tensors)

    def flash(**options: Any) -> Pair:
        tensors = three((1, 128, 4, 64))
        return lambda: flash_attn_func(*tensors, **options, **own), None

    def packed() -> Callable[..., Any]:
        ends = int32(0, 100, 256)
        return lambda *tensors: flash_attn_varlen_func(*tensors, ends, ends, 160, 160, **own)

    def varlen() -> Pair:
        attend, tensors = packed(), three(PACKED)
        return lambda: attend(*tensors), None

    def varlen_backward() -> Pair:
        return backward_of(packed(), three(PACKED, grad=True)), None

    def decode(*, new: bool) -> Pair:
        query, lengths = torch.randn(2, 1, 8, 64, dtype=torch.bfloat16, device=device), int32(100, 200)
        keys, values, _ = three(CACHE)
        rows = three(NEW)[:2] if new else (None, None)
        return lambda: flash_attn_with_kvcache(query, keys, values, *rows, cache_seqlens=lengths, **own), None

    def block_sparse() -> Pair:
        tensors, blocks = three(), BlockMask(64, 64, torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device))
        return lambda: block_sparse_attention(*tensors, blocks, **own), None

    def compiled() -> Pair:
        tensors = three()
        ours, pytorchs = torch.compile(lambda *all: dispatcher(*all)), torch.compile(lambda *all: sdpa(*all))
        return lambda: ours(*tensors), lambda: pytorchs(*tensors)

    def compiled_step() -> Pair:
        tensors = three(grad=True)
        grad = torch.randn_like(tensors[0])

        def step_of(attend: Callable[..., Tensor]) -> Call:
            graph = torch.compile(lambda *all: attend(*all))
            return lambda: torch.autograd.grad(graph(*tensors), tensors, grad)

        return step_of(dispatcher), step_of(sdpa)

    return {
        "forward": lambda: both(three()),
        "forward with gradients": lambda: both(three(grad=True)),
        "backward": backward,
        "boolean mask": lambda: both(three(), torch.rand(MASK, device=device) > 0.3),
        "dropout": lambda: both(three(), dropout_p=0.1),
        "flash_attn_func": flash,
        "window": lambda: flash(window_size=(32, 0)),
        "soft cap": lambda: flash(softcap=20.0),
        "ALiBi": lambda: flash(alibi_slopes=torch.rand(4, device=device)),
        "packed sequences": varlen,
        "packed sequences, backward": varlen_backward,
        "cache": lambda: decode(new=False),
        "cache, with new keys": lambda: decode(new=True),
        "block mask": block_sparse,
        "compiled graph": compiled,
        "compiled graph, forward and backward": compiled_step,
    }


def backward_of(attend: Callable[..., Tensor], tensors: list[Tensor]) -> Call:
    """The gradients of a call, which is not the first one of its kind."""
    for _ in range(3):
        out = attend(*tensors)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, tensors, grad, retain_graph=True)
