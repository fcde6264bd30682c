"""Appends new keys and values to an 8-bit cache, contiguous or paged: divided by their scales, rounded and clamped, in
one launch that also counts the keys."""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.base.steps import Launcher, Step
from blocktune.kernels.portable.decode.append import HEADS, WARPS, layout_obstacle
from blocktune.kernels.portable.decode8.launch import E4M3_CC, scale_strides


@triton.jit
def round_to(quotients, kind):
    """Return float32 numbers in an 8-bit type: the nearest there is, an even one of two, and the least or largest for
    what is beyond."""
    if kind == tl.int8:
        clamped = tl.minimum(tl.maximum(quotients, -128.0), 127.0)
        return ((clamped + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23 leaves no bits below 1
    else:
        clamped = tl.minimum(tl.maximum(quotients, -448.0), 448.0)
        exponents = tl.maximum(
            (clamped.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121
        )  # 2^-6 is the least, biased by 127
        # 1.5 * 2^20 times the power of two leaves four bits; here and not in the conversion, which the interpreter of
        # Triton 3.6 gets wrong where a number is rounded up to a power of two
        magic = (((exponents + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
        rounded = (clamped + magic) - magic
        return tl.where(quotients == quotients, rounded, quotients).to(tl.float8e4nv)


@triton.jit
def append8_rows(
    source, target, scales, heads, stride_h, stride_th, stride_sh, num_heads, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Append one row of some heads [HEADS, 1] from source to target; scales: those of the row's entry, or None for
    1."""
    # [1, WIDTH]
    columns = tl.arange(0, WIDTH)[None, :]
    inside = (heads < num_heads) & (columns < DIM)
    numbers = tl.load(source + heads * stride_h + columns, mask=inside, other=0.0).to(tl.float32)
    if scales is not None:
        numbers = tl.div_rn(numbers, tl.load(scales + heads * stride_sh, mask=heads < num_heads, other=1.0))
    tl.store(target + heads * stride_th + columns, round_to(numbers, target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("given", "capacity", "new", "num_heads", "k_sb", "k_sh", "v_sb", "v_sh"))
def append8_kernel(
    K_cache, V_cache, K, V, Lengths, Table, KScales, VScales, After, given,
    stride_cb, stride_cn, stride_ch, stride_db, stride_dn, stride_dh,
    stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, stride_table,
    k_sb, k_sh, v_sb, v_sh, capacity, new, num_heads,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Append as `append_kernel` does, into caches of e4m3 or int8. KScales and VScales: float32, what the caches'
    numbers are multiplied with, with strides (batch, head) k_sb, k_sh, v_sb and v_sh; None for 1."""
    batch = tl.program_id(0)
    row = tl.program_id(1)
    length = given
    if Lengths is not None:
        length = tl.load(Lengths + batch)
    if row + tl.program_id(2) == 0:
        tl.store(After + batch, length + new)
    place = length + row
    if (place >= 0) & (place < capacity):
        own = batch.to(tl.int64)
        entry = own
        if PAGE_SIZE != 0:
            entry = tl.load(Table + own * stride_table + place // PAGE_SIZE).to(tl.int64)
            place = place % PAGE_SIZE
        position = tl.cast(place, tl.int64)
        # [HEADS, 1]
        heads = (tl.program_id(2) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
        k_scales = None if KScales is None else KScales + own * k_sb
        v_scales = None if VScales is None else VScales + own * v_sb
        append8_rows(
            K + own * stride_kb + row * stride_kn, K_cache + entry * stride_cb + position * stride_cn, k_scales,
            heads, stride_kh, stride_ch, k_sh, num_heads, DIM, WIDTH,
        )  # fmt: skip
        append8_rows(
            V + own * stride_vb + row * stride_vn, V_cache + entry * stride_db + position * stride_dn, v_scales,
            heads, stride_vh, stride_dh, v_sh, num_heads, DIM_V, WIDTH_V,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Append8Launch(Launcher):
    """launch(k_cache, v_cache, k, v, lengths, table, k_scale, v_scale, after, given) appends k and v; fields as of
    `AppendLaunch`."""

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
        k_scale: Any,
        v_scale: Any,
        after: Any,
        given: int,
        *,
        pins: bool,
    ) -> Launch:
        del lengths, after, given
        batch, new, num_heads, dim = k.shape
        dim_v = v.shape[3]
        strides = [stride for tensor in (k_cache, v_cache, k, v) for stride in tensor.stride()[:3]]
        strides.append(0 if table is None else table.stride(0))
        for scale in (k_scale, v_scale):
            entry, _, head = scale_strides(scale)
            strides += [entry, head]
        widths = triton.next_power_of_2(dim), triton.next_power_of_2(dim_v), HEADS
        rest = *strides, self.capacity, new, num_heads, dim, dim_v, *widths, self.page_size
        grid = batch, new, triton.cdiv(num_heads, HEADS)
        return Step(append8_kernel, grid, rest, {"num_warps": WARPS}, pins=pins)


def append8_obstacle(k_cache: Any, v_cache: Any, k: Any, v: Any, cc: tuple[int, int]) -> str | None:
    """Return why the kernel cannot append such rows on this compute capability; or None."""
    if cc < E4M3_CC and k_cache.dtype.is_floating_point:
        return f"e4m3 takes compute capability {E4M3_CC}, but got {cc}"
    return layout_obstacle(k_cache, v_cache, k, v)
