"""New keys and values, written into a cache after those that are there."""

import torch
from torch import Tensor

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.base.steps import Launcher
from blocktune.kernels.portable.decode.append import AppendLaunch, append_obstacle
from blocktune.kernels.portable.decode8.append import Append8Launch, append8_obstacle
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.api.cache.descales import Descales
from blocktune.runtime.api.cache.rotary import Rotary
from blocktune.runtime.api.cache.rows import CacheRows
from blocktune.runtime.dispatch.call_checks import check_dimensions
from blocktune.runtime.dispatch.launches.launch_trial import on_its_device
from blocktune.runtime.dispatch.obstacles import KERNEL_DEVICE, is_capturing, trace_obstacle


def new_rows(
    k: Tensor | None, v: Tensor | None, q: Tensor, k_cache: Tensor, v_cache: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return the keys and values to append, if there are any.

    Raises:
        UsageError: one is missing, or they do not fit the caches or each other.
    """
    if (k is None) != (v is None):
        raise UsageError("`k` and `v` are appended together, but only one is given. Give both or none.")
    if k is None or v is None:
        return None
    check_dimensions("[batch, new, heads, dim]", k=k, v=v)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if (new.shape[0], *new.shape[2:]) != (q.shape[0], *cache.shape[2:]) or new.shape[1] != k.shape[1]:
            raise UsageError(
                f"`{name}` must be [batch, new, heads, dim], with batch {q.shape[0]}, the heads and dim of its cache "
                f"{tuple(cache.shape)}, and as many rows in k as in v, but got {tuple(new.shape)}. Check the order of "
                "the arguments."
            )
    return k, v


def positions_from(lengths: Tensor, count: int) -> Tensor:
    """Return int64 [batch, count]: `count` positions from each length on."""
    return lengths.long()[:, None] + torch.arange(count, device=lengths.device)[None]


def append(
    rows: CacheRows,
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    lengths: Tensor,
    rotary: Rotary | None,
    descales: Descales | None,
) -> None:
    """Write new keys, turned, and values [batch, new, ...] after the present ones: `lengths` of each entry; as 8-bit
    numbers where there are descales."""
    positions = positions_from(lengths, new[0].shape[1])
    keys, values = new if rotary is None else (rotary.turned(new[0], positions), new[1])
    if descales is not None:
        keys, values = (short.view(torch.int8) for short in descales.shortened((keys, values), caches))
        caches = caches[0].view(torch.int8), caches[1].view(torch.int8)  # no device indexes all types of 8 bits
    rows.write(caches[0], keys, positions)
    rows.write(caches[1], values, positions)


def append_in_one(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    after: Tensor,
    given: Tensor | None,
    all_have: int,
    table: Tensor | None,
    descales: Descales | None,
) -> Launch | None:
    """Write new rows [batch, new, ...] into the caches, which hold `after` rows per entry then; before, `given` per
    entry, or without it all_have in each.

    Returns:
        what does so again in one launch for such tensors; None where it takes several, and nothing was written.
    """
    tensors = (k_cache, v_cache, k, v)
    if k.device.type != KERNEL_DEVICE or trace_obstacle(*tensors) or is_capturing(k):
        return None
    size, page_size = capacity_of(k_cache, table), 0 if table is None else k_cache.shape[1]
    others: tuple[Tensor | None, ...]
    launch: Launcher
    if descales is not None:
        if append8_obstacle(*tensors, torch.cuda.get_device_capability(k.device)):
            return None
        launch = Append8Launch(size, page_size)
        others = (given, table, descales.k, descales.v)
    else:
        if append_obstacle(*tensors):
            return None
        launch, others = AppendLaunch(size, page_size), (given, table)
    with torch.cuda.device_of(k):
        short = launch.pinned(*tensors, *others, torch.empty_like(after), all_have)
    return on_its_device(short, k.device.index)


def capacity_of(cache: Tensor, table: Tensor | None) -> int:
    """Return the keys that an entry has room for; cache [entries or pages, rows, ...]."""
    rows: int = cache.shape[1] if table is None else table.shape[1] * cache.shape[1]
    return rows
