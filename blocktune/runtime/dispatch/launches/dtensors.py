"""Calls of distributed tensors (`torch.distributed.tensor.DTensor`): each rank computes its batch entries and heads.

Where query, key or value is sharded along the batch or the heads, so are all tensors of the call; along other
dimensions they are gathered. Each rank makes an ordinary call of its part, and the results are sharded as the query is.
"""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Size, Tensor
from torch.nn import Parameter

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.dispatch.launches.results import strides_like

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, Placement

BATCH, HEADS = 0, 1
"""The dimensions of query and output that ranks may share."""
BLOCKS = "blocks"
"""The tensor of a block mask."""

Results = tuple[Tensor, Tensor | None]
Shared = list[int | None]
"""For each dimension of a mesh `BATCH`, `HEADS`, or None where all ranks compute the same."""

_DIMENSIONS: Mapping[str, tuple[int | None, int | None]] = {
    "query": (0, 1),
    "key": (0, 1),
    "value": (0, 1),
    "mask": (-4, -3),
    "alibi_slopes": (0, 1),
    "cache_seqlens": (0, None),
    "block_table": (0, None),
    "tree_mask": (0, None),
    "scale_q": (0, 1),
    "scale_k": (0, -1),
    "scale_v": (0, -1),
    "sinks": (None, 0),
    BLOCKS: (0, 1),
}
"""Where the tensors of a call have batch entries and heads; those that are not named have neither."""
_NOWHERE = None, None
_PAGES = ("key", "value")
"""With a block table they have pages instead of batch entries, and so have scales of tokens."""


def is_distributed(tensor: Tensor) -> bool:
    """Return whether it is a DTensor."""
    if type(tensor) in (Tensor, Parameter) or "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def refuse_distributed(query: Tensor, what: str) -> None:
    """Refuse a DTensor.

    Raises:
        UsageError: the query is one.
    """
    if is_distributed(query):
        raise UsageError(
            f"{what} cannot be computed of DTensors, but the query is one. Call it on local tensors "
            "(torch.distributed.tensor.experimental.local_map)."
        )


def attend_locally(
    attend: Callable[..., Results], query: Any, key: Any, value: Any, tensors: Mapping[str, Tensor | None]
) -> Results:
    """Return the output and log-sum-exp of a call as DTensors, differentiable as it is.

    Args:
        attend: computes attend(query, key, value, **tensors) of ordinary tensors.
        tensors: of the call, by the names of `EXTRA_TENSORS` or `BLOCKS`; an ordinary one is the same on all ranks.

    Raises:
        UsageError: key or value is no DTensor on the query's mesh.
    """
    _check_mesh(query, key, value)
    shared = _shared_dimensions(query, key, value, packed=tensors.get("cu_seqlens_q") is not None)
    paged, given = tensors.get("block_table") is not None, {"query": query, "key": key, "value": value, **tensors}
    own = {
        name: _own_part(tensor, query.device_mesh, shared, _dimensions(name, tensor, paged=paged))
        for name, tensor in given.items()
        if tensor is not None
    }
    out, lse = attend(**own)
    sizes = *query.shape[:3], value.shape[3]
    whole = _whole(out, query.device_mesh, shared, sizes, strides_like(query.stride(), sizes))
    if lse is None:
        return whole, None
    packed = 3 - lse.dim()  # the log-sum-exp of packed sequences has no dimension of the batch
    rows = query.shape[packed:3]
    places = [None if dim is None else dim - packed for dim in shared]
    return whole, _whole(lse, query.device_mesh, places, rows, strides_like(range(len(rows), 0, -1), rows))


def _check_mesh(query: Any, key: Any, value: Any) -> None:
    """Check that key and value are where the query is.

    Raises:
        UsageError: they are not.
    """
    if not all(is_distributed(one) and one.device_mesh == query.device_mesh for one in (key, value)):
        kinds = ", ".join(type(one).__name__ for one in (query, key, value))
        raise UsageError(
            f"Query, key and value must be DTensors on one mesh, or none of them, but got {kinds}. Distribute all of "
            "them (torch.distributed.tensor.distribute_tensor), or call attention on local tensors (local_map)."
        )


def _shared_dimensions(query: Any, key: Any, value: Any, *, packed: bool) -> Shared:
    """Return what ranks share: heads where they get whole groups of them, and batch entries, of which packed sequences
    have one."""
    mesh, heads, heads_kv = query.device_mesh, query.shape[HEADS], key.shape[HEADS]
    everyone = heads_kv == 1
    shared: Shared = []
    for place in range(mesh.ndim):
        ranks = mesh.size(place)
        placements = [one.placements[place] for one in (query, key, value)]
        dims = {placement.dim for placement in placements if placement.is_shard()}
        if HEADS in dims and heads % ranks == 0 and (everyone or heads_kv % ranks == 0):
            heads, heads_kv = heads // ranks, heads_kv // ranks
            shared.append(HEADS)
        else:
            shared.append(BATCH if BATCH in dims and not packed and query.shape[BATCH] > 1 else None)
    return shared


def _dimensions(name: str, tensor: Tensor, *, paged: bool) -> tuple[int | None, int | None]:
    """Return where a tensor has batch entries and heads."""
    batch, heads = _DIMENSIONS.get(name, _NOWHERE)
    of_tokens = name in ("scale_k", "scale_v") and tensor.dim() == 3
    return None if paged and (name in _PAGES or of_tokens) else batch, heads


def _own_part(
    tensor: Any, mesh: "DeviceMesh", shared: Shared, dimensions: tuple[int | None, int | None]
) -> Tensor:  # fmt: skip
    """Return this rank's part of a tensor. Where ranks share the call but not the tensor, its gradient is the sum of
    theirs."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    placements = [_placement(tensor, None if dim is None else dimensions[dim]) for dim in shared]
    gradients = [
        Partial() if dim is not None and own.is_replicate() else own
        for dim, own in zip(shared, placements, strict=True)
    ]
    part: Tensor = tensor.redistribute(placements=placements).to_local(grad_placements=gradients)
    return part


def _placement(tensor: Tensor, dim: int | None) -> "Placement":
    """Return the placement of a tensor that ranks share along a dimension, unless it lacks that or has one element for
    all."""
    from torch.distributed.tensor import Replicate, Shard

    place = -1 if dim is None else dim % tensor.dim() if dim >= -tensor.dim() else -1
    return Replicate() if place < 0 or tensor.shape[place] == 1 else Shard(place)


def _whole(part: Tensor, mesh: "DeviceMesh", shared: Shared, sizes: Any, strides: tuple[int, ...]) -> Tensor:
    """Return the DTensor of which this rank has a part."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Replicate() if dim is None else Shard(dim) for dim in shared]
    whole: Tensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=Size(sizes), stride=strides)
    return whole
