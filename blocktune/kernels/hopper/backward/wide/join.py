"""Adding up the gradients of keys and values that parts of a group of wide query heads leave."""

from typing import Any

import triton
from triton import language as tl

from blocktune.kernels.base.flash_kernel import all_strides
from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.base.specialize import TensorArgument, named_in_units, specialize
from blocktune.kernels.base.steps import Step
from blocktune.kernels.portable.forward.tiles import in_elements
from blocktune.kernels.values.shape import AttentionShape

ROWS = 32
"""Keys of a program."""
WARPS = 4


@triton.jit(do_not_specialize=["num_heads_kv", "seqlen_k"])
def join_wide_parts_kernel(
    dk_parts, dv_parts, dk, dv, stride_kb, stride_kh, stride_km, stride_vb, stride_vh, stride_vm,
    num_heads_kv, seqlen_k,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write the sums of PARTS in float32, always in the same order.

    A program for ROWS keys of a head: (blocks * num_heads_kv * batch, 2), first of dk, then of dv. Parts are
    contiguous: [batch, num_heads_kv, PARTS, seqlen_k, head_dim].
    """
    stride_kb, stride_kh, stride_km = in_elements(stride_kb, stride_kh, stride_km, UNIT)
    stride_vb, stride_vh, stride_vm = in_elements(stride_vb, stride_vh, stride_vm, UNIT)
    if tl.program_id(1) == 0:
        join_rows(dk_parts, dk, stride_kb, stride_kh, stride_km, num_heads_kv, seqlen_k, HEAD_DIM, PARTS, ROWS)
    else:
        join_rows(dv_parts, dv, stride_vb, stride_vh, stride_vm, num_heads_kv, seqlen_k, HEAD_DIM_V, PARTS, ROWS)


@triton.jit
def join_rows(
    parts, out, stride_b, stride_h, stride_m, num_heads_kv, seqlen_k,
    HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the sum of one gradient's PARTS."""
    COLUMNS: tl.constexpr = 256
    blocks = tl.cdiv(seqlen_k, ROWS)
    block = tl.program_id(0) % blocks
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    positions = (block * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    kept = (positions < seqlen_k) & (columns < HEAD_DIM)
    # [ROWS, COLUMNS]
    x = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        first = ((batch_head * PARTS + part) * seqlen_k + positions) * HEAD_DIM
        x += tl.load(parts + first + columns, mask=kept, other=0.0).to(tl.float32)
    place = out + batch_head // num_heads_kv * stride_b + batch_head % num_heads_kv * stride_h
    tl.store(place + positions.to(tl.int64) * stride_m + columns, x.to(out.dtype.element_ty), mask=kept)


def join_step(shape: AttentionShape, parts: int, strides: tuple[int, ...], unit: int, *, pins: bool) -> Step:
    """Return the launch for gradients with such strides, which are counted in units."""
    constants = shape.head_dim, shape.head_dim_v, parts, ROWS, unit
    grid = -(-shape.seqlen_k // ROWS) * shape.num_heads_kv * shape.batch, 2
    rest = *strides, shape.num_heads_kv, shape.seqlen_k, *constants
    return Step(join_wide_parts_kernel, grid, rest, {"num_warps": WARPS}, pins=pins)


def gradient_strides(shape: AttentionShape) -> dict[str, int]:
    """Return the strides of contiguous dk and dv in units, by the names of the arguments of kernels that join parts."""
    strides = all_strides(shape, "kv").items()
    return named_in_units({f"{name[:-1]}m" if name.endswith("n") else name: stride for name, stride in strides})


def join_spec(shape: AttentionShape, parts: int) -> CompileSpec:
    """Return how the kernel is compiled for contiguous gradients."""
    own = TensorArgument(shape.dtype)
    arguments: dict[str, Any] = dict.fromkeys(("dk_parts", "dv_parts", "dk", "dv"), own)
    arguments |= gradient_strides(shape) | {"num_heads_kv": shape.num_heads_kv, "seqlen_k": shape.seqlen_k}
    arguments |= {"HEAD_DIM": shape.head_dim, "HEAD_DIM_V": shape.head_dim_v, "PARTS": parts, "ROWS": ROWS}
    return specialize(join_wide_parts_kernel, arguments, {"num_warps": WARPS})
