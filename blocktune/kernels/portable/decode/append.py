"""Appends new keys and values to a cache, contiguous or paged, in one launch that also counts the keys."""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.base.steps import Launcher, Step

HEADS = 16
"""Heads whose rows a program copies."""
WARPS = 4


@triton.jit(do_not_specialize=("given", "capacity", "new", "num_heads"))
def append_kernel(
    K_cache, V_cache, K, V, Lengths, Table, After, given,
    stride_cb, stride_cn, stride_ch, stride_db, stride_dn, stride_dh,
    stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, stride_table,
    capacity, new, num_heads,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (entry, row, part of the heads): row number `row` of K and V [batch, new, num_heads, DIM(_V)] becomes
    number length + row of the entry's keys and values, unless the cache holds no such row.

    K_cache and V_cache [batch, capacity, num_heads, DIM(_V)] with strides stride_c* and stride_d*, or with PAGE_SIZE
    [pages, PAGE_SIZE, ...] with Table int32 [batch, ..]. Lengths int32 [batch], or None: all are `given`. After int32
    [batch] gets length + new.
    """
    batch = tl.program_id(0)
    row = tl.program_id(1)
    length = given
    if Lengths is not None:
        length = tl.load(Lengths + batch)
    if row + tl.program_id(2) == 0:
        tl.store(After + batch, length + new)
    place = length + row
    if (place >= 0) & (place < capacity):
        entry = batch.to(tl.int64)
        if PAGE_SIZE != 0:
            entry = tl.load(Table + entry * stride_table + place // PAGE_SIZE).to(tl.int64)
            place = place % PAGE_SIZE
        position = tl.cast(place, tl.int64)
        # [HEADS, 1]
        heads = (tl.program_id(2) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
        # [1, WIDTH]
        columns = tl.arange(0, WIDTH)[None, :]
        inside = (heads < num_heads) & (columns < DIM)
        source = K + batch.to(tl.int64) * stride_kb + row * stride_kn + heads * stride_kh + columns
        target = K_cache + entry * stride_cb + position * stride_cn + heads * stride_ch + columns
        tl.store(target, tl.load(source, mask=inside), mask=inside)
        # [1, WIDTH_V]
        columns = tl.arange(0, WIDTH_V)[None, :]
        inside = (heads < num_heads) & (columns < DIM_V)
        source = V + batch.to(tl.int64) * stride_vb + row * stride_vn + heads * stride_vh + columns
        target = V_cache + entry * stride_db + position * stride_dn + heads * stride_dh + columns
        tl.store(target, tl.load(source, mask=inside), mask=inside)


@dataclass(frozen=True, slots=True)
class AppendLaunch(Launcher):
    """launch(k_cache, v_cache, k, v, lengths, table, after, given) appends k and v, of tensors without an
    `append_obstacle`.

    capacity: keys that an entry has room for. page_size: keys of a page, 0 for a contiguous cache.
    """

    capacity: int
    page_size: int

    def prepared(
        self,
        k_cache: Any,
        v_cache: Any,
        k: Any,
        v: Any,
        lengths: Any,
        table: Any,
        after: Any,
        given: int,
        *,
        pins: bool,
    ) -> Launch:
        del lengths, after, given
        batch, new, num_heads, dim = k.shape
        dim_v = v.shape[3]
        strides = [stride for tensor in (k_cache, v_cache, k, v) for stride in tensor.stride()[:3]]
        widths = triton.next_power_of_2(dim), triton.next_power_of_2(dim_v), HEADS
        rest = *strides, 0 if table is None else table.stride(0), self.capacity, new, num_heads, dim, dim_v, *widths
        grid = batch, new, triton.cdiv(num_heads, HEADS)
        return Step(append_kernel, grid, (*rest, self.page_size), {"num_warps": WARPS}, pins=pins)


def append_obstacle(k_cache: Any, v_cache: Any, k: Any, v: Any) -> str | None:
    """Return why the kernel cannot append such rows; or None."""
    for name, cache, rows in (("k", k_cache, k), ("v", v_cache, v)):
        if rows.dtype != cache.dtype:
            return f"{name} is of another data type than its cache"
    return layout_obstacle(k_cache, v_cache, k, v)


def layout_obstacle(k_cache: Any, v_cache: Any, k: Any, v: Any) -> str | None:
    """Return why no kernel appends rows that lie like these, whatever their types; or None."""
    for name, cache, rows in (("k", k_cache, k), ("v", v_cache, v)):
        if rows.device != cache.device:
            return f"{name} is on another device than its cache"
        if rows.shape[2:] != cache.shape[2:]:
            return f"{name} and its cache have other heads"
        if rows.stride(-1) != 1 or cache.stride(-1) != 1:
            return f"the last dimension of {name} and its cache must be contiguous"
    return "k and v have other batches or lengths" if k.shape[:2] != v.shape[:2] else None
