"""A launch of the Hopper backward: descriptors, workspace, and the three kernels."""

from collections.abc import Mapping
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
GRADIENT_ROWS = 64
"""Rows of dk and dv that leave at once: a warpgroup's."""


@dataclass(frozen=True, slots=True)
class BackwardLaunch:
    """What `bind` returns. Every launch has a workspace and a tile counter of its own, so that launches of several
    streams and captured graphs do not meet.

    numbers: sizes and constants of the kernel between the passes, by name.
    """

    shape: AttentionShape
    numbers: Mapping[str, Any]
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
        space = {"lse_log2": lse_log2, "delta": delta, "dq_sums": sums, "counter": counter}
        self._before(out, dout, lse, space, turns, rows, extras)
        if extras.grad_lse is not None:
            subtract_rows(delta, extras.grad_lse, rows, extras.cu_seqlens_q)
        scale, scale_log2, cap_in = scale_arguments(shape, scale, extras)
        keys = keys_of_block(shape)
        kernel = flash_bwd_hopper_wide_kernel if is_wide(shape) else flash_bwd_hopper_kernel
        kernel[self._grid(q.device)](
            q_desc=_described(q, BLOCK_M, shape),
            k_desc=_described(k, keys, shape),
            v_desc=_described(v, keys, shape),
            do_desc=_described(dout, BLOCK_M, shape),
            dq_desc=sums_descriptor(sums, rows.count * width_of(shape), dq_part(shape)),
            dk_desc=_described(dk, GRADIENT_ROWS, shape),
            dv_desc=_described(dv, GRADIENT_ROWS, shape),
            lse_desc=statistic_descriptor(lse_log2, rows.count),
            delta_desc=statistic_descriptor(delta, rows.count),
            counter=counter,
            scale=scale,
            scale_log2=scale_log2,
            num_warps=WARPS,
            **self.numbers,
            **form_arguments(shape, rows, cap_in, extras, turns),
        )
        self._after(sums, dq, scale, rows, extras)

    def _before(
        self, out: Any, dout: Any, lse: Any, space: Mapping[str, Any], turns: Any, rows: Rows, extras: Extras
    ) -> None:
        shape = self.shape
        common = {
            "out": out,
            "dout": dout,
            "lse": lse,
            **space,
            **_strides(out, "stride_ob", "stride_oh", "stride_om"),
            **_strides(dout, "stride_gb", "stride_gh", "stride_gm"),
            "num_heads": shape.num_heads,
            "seqlen_q": shape.seqlen_q,
            "ROWS": PASS_ROWS,
            "num_warps": WARPS,
        }
        if is_plain(shape):
            prepare_kernel[(rows.count // PASS_ROWS,)](**common, HEAD_DIM=shape.head_dim)
            return
        programs = rows.longest // PASS_ROWS
        stride_lb, stride_lh = lse_strides(out)
        prepare_rows_kernel[(programs * shape.num_heads * shape.batch,)](
            **common,
            turns=turns,
            cu_q=extras.cu_seqlens_q,
            stride_lb=stride_lb,
            stride_lh=stride_lh,
            rows=rows.of_head,
            programs=programs,
            HEAD_DIM_V=shape.head_dim_v,
            WIDTH=width_of(shape),
            BLOCK_M=BLOCK_M,
        )

    def _after(self, sums: Any, dq: Any, scale: float, rows: Rows, extras: Extras) -> None:
        shape, part = self.shape, dq_part(self.shape)
        common = {
            "dq_sums": sums,
            "dq": dq,
            "scale": scale,
            **_strides(dq, "stride_b", "stride_h", "stride_m"),
            "num_heads": shape.num_heads,
            "seqlen_q": shape.seqlen_q,
            "HEAD_DIM": shape.head_dim,
            "TRANSPOSED": is_deferred(shape),
            "num_warps": WARPS,
        }
        if is_plain(shape):
            finish_kernel[(rows.count // BLOCK_M * 2,)](**common, HALF=part)
            return
        programs = rows.longest // BLOCK_M
        parts = 2 if is_deferred(shape) else width_of(shape) // part
        finish_rows_kernel[(programs * parts * shape.num_heads * shape.batch,)](
            **common,
            cu_q=extras.cu_seqlens_q,
            rows=rows.of_head,
            programs=programs,
            WIDTH=width_of(shape),
            PART=part,
        )

    def _grid(self, device: Any) -> tuple[int]:
        import torch

        tiles = -(-self.shape.seqlen_k // keys_of_block(self.shape)) * self.shape.batch * self.shape.num_heads_kv
        if not self.persistent:
            return (tiles,)
        return (min(tiles, torch.cuda.get_device_properties(device).multi_processor_count),)


def subtract_rows(delta: Any, values: Any, rows: Rows, begins: Any) -> None:
    """Subtract values [batch, num_heads, seqlen_q], or packed [num_heads, tokens], from the workspace's row sums."""
    import torch

    by_head = delta.view(-1, rows.of_head)
    if begins is None:
        by_head[:, : values.shape[-1]].sub_(values.flatten(0, 1))
        return
    token, begins = torch.arange(values.shape[1], device=values.device), begins.long()
    sequence = (torch.searchsorted(begins, token, right=True) - 1).clamp(max=begins.shape[0] - 2)
    outside = token >= begins[-1]
    first = (begins[sequence] + sequence * BLOCK_M) // BLOCK_M * BLOCK_M
    places = (first + token - begins[sequence]).masked_fill(outside, 0)
    by_head.index_add_(1, places, -values.masked_fill(outside, 0.0))


def sums_descriptor(sums: Any, elements: int, part: int) -> Any:
    """Of the float32 sums of dq, as rows of 64 values that are stored without a swizzle."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return descriptor(sums, [elements // 64, 64], [64, 1], [part, 64], layout)


def statistic_descriptor(values: Any, count: int) -> Any:
    return descriptor(values, [count], [1], [BLOCK_M], gl.NVMMASharedLayout.get_default_for([BLOCK_M], gl.float32))


def _strides(tensor: Any, *names: str) -> dict[str, int]:
    """All strides of a tensor but the last, by these names."""
    return dict(zip(names, tensor.stride()[:-1], strict=True))


def _described(tensor: Any, block_rows: int, shape: AttentionShape) -> Any:
    if not is_describable(tensor):
        raise UsageError(
            "Rows of a gradient must be contiguous, and 16 must divide its address and its strides in bytes, but got "
            f"strides {tensor.stride()} and address {tensor.data_ptr():#x}. Allocate it with torch.empty_like."
        )
    make = describe_packed if shape.features.varlen else describe
    return make(tensor, block_rows, descriptor_width(shape))
