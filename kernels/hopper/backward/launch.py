"""A launch of the Hopper backward: descriptors, workspace, and the three kernels."""

from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon import language as gl

from blocktune.kernels.base.feature_arguments import check_extras, lse_strides
from blocktune.kernels.hopper.backward.layout import (
    BLOCK_M,
    Rows,
    descriptor_width,
    dq_part,
    form_arguments,
    is_deferred,
    is_plain,
    is_wide,
    keys_of_block,
    scale_arguments,
    width_of,
)
from blocktune.kernels.hopper.backward.pre_and_post import (
    finish_kernel,
    finish_rows_kernel,
    prepare_kernel,
    prepare_rows_kernel,
)
from blocktune.kernels.hopper.backward.warps import flash_bwd_hopper_kernel
from blocktune.kernels.hopper.backward.wide_warps import flash_bwd_hopper_wide_kernel
from blocktune.kernels.hopper.common.descriptors import describe, describe_packed, descriptor, is_describable
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import AttentionShape

WARPS = 4
"""Of a warpgroup; also what the copying warp takes: itself, and three idle ones up to a whole warpgroup."""
PASS_ROWS = 32
"""Rows of a program of the pass before."""


@dataclass(frozen=True, slots=True)
class BackwardLaunch:
    """What `bind` returns. Every launch has a workspace and a tile counter of its own, so that launches of several
    streams and captured graphs do not meet."""

    shape: AttentionShape
    sizes: tuple[int, ...]
    constants: tuple[Any, ...]
    persistent: bool

    def __call__(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
        extras: Extras | None = None,
    ) -> None:  # fmt: skip
        """Enqueues the three kernels.

        Raises:
            UsageError: a gradient lies in memory as the copy engine cannot write it, or the tensor of a feature is
                missing.
        """
        import torch

        shape = self.shape
        extras = NO_EXTRAS if extras is None else extras
        check_extras(shape.features, extras)
        dout = dout if is_describable(dout) else dout.contiguous()
        rows = Rows.of(shape, q.shape[2])
        lse_log2, delta = (torch.empty(rows.count, dtype=torch.float32, device=q.device) for _ in range(2))
        sums = torch.empty(rows.count * width_of(shape), dtype=torch.float32, device=q.device)
        counter = torch.empty(1, dtype=torch.int32, device=q.device)
        turns = None
        if shape.features.deterministic:
            turns = torch.empty(rows.count // BLOCK_M * 2, dtype=torch.int32, device=q.device)
        self._before(out, dout, lse, (lse_log2, delta, sums, counter), turns, rows, extras)
        statistics = statistic_descriptor(lse_log2, rows.count), statistic_descriptor(delta, rows.count)
        sums_desc = sums_descriptor(sums, rows.count * width_of(shape), dq_part(shape))
        scale, scale_log2, cap_in = scale_arguments(shape, scale, extras)
        form = form_arguments(shape, rows, cap_in, extras, turns)
        tensors = zip((q, k, v, dout, dk, dv), _block_rows(shape), strict=True)
        described = [_described(tensor, block_rows, shape) for tensor, block_rows in tensors]
        kernel = flash_bwd_hopper_wide_kernel if is_wide(shape) else flash_bwd_hopper_kernel
        kernel[self._grid(q.device)](
            *described[:4], sums_desc, *described[4:], *statistics, counter, scale, scale_log2, *self.sizes, *form,
            *self.constants, num_warps=WARPS,
        )  # fmt: skip
        self._after(sums, dq, scale, rows, extras)

    def _before(self, out: Any, dout: Any, lse: Any, space: Any, turns: Any, rows: Rows, extras: Extras) -> None:
        shape = self.shape
        strides = *out.stride()[:3], *dout.stride()[:3]
        if is_plain(shape):
            prepare_kernel[(rows.count // PASS_ROWS,)](
                out, dout, lse, *space, *strides, shape.num_heads, shape.seqlen_q,
                HEAD_DIM=shape.head_dim, ROWS=PASS_ROWS, num_warps=WARPS,
            )  # fmt: skip
            return
        programs = rows.longest // PASS_ROWS
        prepare_rows_kernel[(programs * shape.num_heads * shape.batch,)](
            out, dout, lse, *space, turns, extras.cu_seqlens_q, *strides, *lse_strides(out), shape.num_heads,
            shape.seqlen_q, rows.of_head, programs,
            HEAD_DIM_V=shape.head_dim_v, WIDTH=width_of(shape), ROWS=PASS_ROWS, BLOCK_M=BLOCK_M, num_warps=WARPS,
        )  # fmt: skip

    def _after(self, sums: Any, dq: Any, scale: float, rows: Rows, extras: Extras) -> None:
        shape, part, strides = self.shape, dq_part(self.shape), dq.stride()[:3]
        if is_plain(shape):
            finish_kernel[(rows.count // BLOCK_M * 2,)](
                sums, dq, scale, *strides, shape.num_heads, shape.seqlen_q,
                HEAD_DIM=shape.head_dim, HALF=part, TRANSPOSED=is_deferred(shape), num_warps=WARPS,
            )  # fmt: skip
            return
        programs = rows.longest // BLOCK_M
        parts = 2 if is_deferred(shape) else width_of(shape) // part
        finish_rows_kernel[(programs * parts * shape.num_heads * shape.batch,)](
            sums, dq, extras.cu_seqlens_q, scale, *strides, shape.num_heads, shape.seqlen_q, rows.of_head, programs,
            HEAD_DIM=shape.head_dim, WIDTH=width_of(shape), PART=part, TRANSPOSED=is_deferred(shape), num_warps=WARPS,
        )  # fmt: skip

    def _grid(self, device: Any) -> tuple[int]:
        import torch

        tiles = -(-self.shape.seqlen_k // keys_of_block(self.shape)) * self.shape.batch * self.shape.num_heads_kv
        if not self.persistent:
            return (tiles,)
        return (min(tiles, torch.cuda.get_device_properties(device).multi_processor_count),)


def sums_descriptor(sums: Any, elements: int, part: int) -> Any:
    """Of the float32 sums of dq, as rows of 64 values that are stored without a swizzle."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return descriptor(sums, [elements // 64, 64], [64, 1], [part, 64], layout)


def statistic_descriptor(values: Any, count: int) -> Any:
    return descriptor(values, [count], [1], [BLOCK_M], gl.NVMMASharedLayout.get_default_for([BLOCK_M], gl.float32))


def _block_rows(shape: AttentionShape) -> tuple[int, ...]:
    """Of q, k, v, dout, dk and dv."""
    keys = keys_of_block(shape)
    return BLOCK_M, keys, keys, BLOCK_M, 64, 64


def _described(tensor: Any, block_rows: int, shape: AttentionShape) -> Any:
    if not is_describable(tensor):
        raise UsageError(
            "Rows of a gradient must be contiguous, and 16 must divide its address and its strides in bytes, but got "
            f"strides {tensor.stride()} and address {tensor.data_ptr():#x}. Allocate it with torch.empty_like."
        )
    make = describe_packed if shape.features.varlen else describe
    return make(tensor, block_rows, descriptor_width(shape))
