"""From a decoding config over an 8-bit cache to its launches: those of decoding, with other operands and scales."""

from dataclasses import replace
from functools import partial
from typing import Any

from blocktune.kernels.base.flash_kernel import operand_widths
from blocktune.kernels.portable.decode.launch import DecodeLaunch, decode_launch, leading, workspace_elements
from blocktune.kernels.portable.decode8.tiles import flash_decode8_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import AttentionShape

E4M3_CC = (8, 9)
"""The first compute capability that converts e4m3; Triton has no such type below."""

RESIDENT_WARPS, REGISTERS = 16, 128
"""Warps that a multiprocessor is to hold, and the most registers that each of their threads can have."""


def decode8_launch(config: KernelConfig, shape: AttentionShape, *, batch_invariant: bool = False) -> DecodeLaunch:
    """Return the launch of a config for tensors of this shape; arguments as of `decode_launch`."""
    launch = decode_launch(config, shape, batch_invariant=batch_invariant)
    return replace(
        launch,
        function=flash_decode8_kernel,
        leading=partial(_leading, workspace_elements(config, shape)),
        options={**launch.options, **_most_registers(config, shape)},
    )


def _most_registers(config: KernelConfig, shape: AttentionShape) -> dict[str, int]:
    """Return the option that keeps the registers of small tiles to what RESIDENT_WARPS leave each: a few more, which
    the compiler would take, and a multiprocessor holds a program less. Larger tiles would spill."""
    small = config.block_m == 16 and config.block_n <= RESIDENT_WARPS * config.num_warps
    return {"maxnreg": REGISTERS} if small and max(operand_widths(shape)) <= 128 else {}


def _leading(
    workspace: int, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS
) -> tuple[Any, ...]:
    scales = extras.scale_k, extras.scale_v
    strides = (stride for one in scales for stride in scale_strides(one))
    return *leading(workspace, q, k, v, out, lse, scale, extras), *scales, *strides


def scale_strides(scales: Any) -> tuple[int, int, int]:
    """Return the strides (entry or page, row, head) of scales [batch or 1, num_heads_kv or 1] or, of tokens, [entries
    or pages, rows, num_heads_kv]: 0 where one number is for all."""
    if scales is None:
        return 0, 0, 0
    if scales.dim() == 3:
        entry, row, head = scales.stride()
        return entry, row, head
    entry, head = (0 if size == 1 else stride for size, stride in zip(scales.shape, scales.stride(), strict=True))
    return entry, 0, head
