"""Calls of distributed tensors by every entry point, and how far they are from those of ordinary tensors on a rank."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

from blocktune import UsageError, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, varlen_attn
from tests.support.attention.entry_points import E4M3, entry_points

LEADING = {"attention": 0, "block_sparse_attention": 0, "attention_fp8": 0, "tree_attention": 0}
"""Entry points whose queries begin with batch and heads; others have heads in the last dimension but one."""
LEFT_OUT = ("new rows", "rotation", "entries", "8 bits", "some keys", "varlen_func, pages", "attn, pages")
"""What writes or looks up rows of a cache or a table in front of the call."""


def placed(name: str, tensors: tuple[Tensor, ...], mesh: DeviceMesh, placements: tuple[str, ...]) -> list[Tensor]:
    """The tensors with queries, keys and values distributed, along "batch" or "heads" of each dimension of the mesh."""
    count = {"flash_attn_qkvpacked_func": 1, "flash_attn_varlen_qkvpacked_func": 1}.get(name, 3)
    count = 2 if "kvpacked" in name and count == 3 else count

    def of(tensor: Tensor) -> Tensor:
        heads = 1 if name.partition(",")[0] in LEADING and not is_cache(tensor) else tensor.dim() - 2
        dims: dict[str, Any] = {"batch": Shard(0), "heads": Shard(heads), "none": Replicate()}
        wide = tensor.float() if tensor.dtype is E4M3 else tensor  # gloo sends no 8 bits
        return distribute_tensor(wide, mesh, [dims[one] for one in placements]).to(tensor.dtype)

    def is_cache(tensor: Tensor) -> bool:
        return name == "tree_attention" and tensor.shape[1] == 32

    return [of(tensor) if place < count else tensor for place, tensor in enumerate(tensors)]


def results(function: Callable[..., Any], tensors: list[Tensor], *, trains: bool) -> list[Tensor]:
    """The outputs, whole, and the gradients, those of slopes and sinks among them."""
    given = [one.detach().requires_grad_(trains and one.is_floating_point()) for one in tensors]
    found = tree_leaves(function(*given))
    if trains:
        found += torch.autograd.grad([(found[0] * found[0]).sum()], [one for one in given if one.requires_grad])
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]


def errors(mesh: DeviceMesh, placements: tuple[str, ...]) -> dict[str, float]:
    """The largest error of every entry point."""
    found = {}
    for name, (function, tensors) in entry_points().items():
        is_sent = placements == ("heads", "heads")  # two key heads have no four parts, and gloo sends no 8 bits
        if any(one in name for one in LEFT_OUT) or ("batch" in placements and "varlen" in name):
            continue
        if is_sent and "fp8" in name:
            continue
        trains = not ("cache" in name or "tree" in name or "fp8" in name)
        right = results(function, list(tensors), trains=trains)
        own = results(function, placed(name, tensors, mesh, placements), trains=trains)
        found[name] = max(float((one - other).detach().abs().max()) for one, other in zip(own, right, strict=True))
    return found


def refusals(mesh: DeviceMesh) -> list[str]:
    """What calls raise that a rank cannot compute of its part."""
    q, cache = (distribute_tensor(torch.zeros(size), mesh, [Replicate()]) for size in ((2, 1, 4, 16), (2, 32, 2, 16)))
    packed, bounds, table = q[:, 0], torch.tensor([0, 2]).int(), torch.zeros(1, 1).int()
    calls: list[Callable[[], Any]] = [
        lambda: flash_attn_func(q, q, q, dropout_p=0.5),
        lambda: flash_attn_func(q, torch.zeros(2, 1, 4, 16), q, softcap=1.0),
        lambda: flash_attn_with_kvcache(q, cache, cache, cache[:, :1], cache[:, :1], cache_seqlens=3),
        lambda: flash_attn_with_kvcache(q, cache, cache, cache_leftpad=bounds),
        lambda: flash_attn_varlen_func(packed, cache, cache, bounds, bounds, 2, 2, block_table=table),
        lambda: varlen_attn(packed, packed, packed, bounds, bounds, 2, 2, seqused_k=bounds[1:]),
    ]
    raised = []
    for call in calls:
        try:
            call()
        except UsageError as error:
            raised.append(str(error))
    return raised


def compiled_error(mesh: DeviceMesh) -> float:
    """How far a graph is from the eager call."""
    function, tensors = entry_points()["flash_attn_func, features"]
    given = placed("flash_attn_func", tensors, mesh, ("heads",))
    graph = torch.compile(function, fullgraph=True, backend="aot_eager")
    return float((graph(*given)[0] - function(*given)[0]).full_tensor().abs().max())


def compare() -> dict[str, Any]:
    """What this rank finds of all placements."""
    torch.manual_seed(0)  # the same tensors on all ranks
    ranks = dist.get_world_size()
    if ranks == 4:  # of two dimensions, and with a rank that has no batch entry
        row, square = DeviceMesh("cpu", torch.arange(4)), DeviceMesh("cpu", torch.arange(4).view(2, 2))
        both = {" ".join(own): errors(square, own) for own in (("batch", "heads"), ("heads", "heads"))}
        return both | {"batch": errors(row, ("batch",))}
    mesh = DeviceMesh("cpu", torch.arange(ranks))
    found: dict[str, Any] = {one: errors(mesh, (one,)) for one in ("batch", "heads", "none")}
    return found | {"refusals": refusals(mesh), "compiled": compiled_error(mesh)}
