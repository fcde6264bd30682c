"""A launch of the Hopper backward: descriptors, workspace, and its kernels."""

from dataclasses import dataclass
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any

from triton.experimental.gluon import language as gl

from blocktune.kernels.base.direct_launch import Describe
from blocktune.kernels.base.feature_arguments import check_extras, lse_strides, mask_bytes
from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.base.specialize import in_units
from blocktune.kernels.base.steps import BackwardLauncher, Step, Workspace, based, take_addresses
from blocktune.kernels.hopper.backward.arguments import Options
from blocktune.kernels.hopper.backward.device_kernel import flash_bwd_hopper_kernel
from blocktune.kernels.hopper.backward.layout import (
    BLOCK_M,
    FORM_ARGUMENTS,
    LIST_ARGUMENTS,
    Rows,
    added_rows,
    adds_registers,
    bounds_of,
    descriptor_width,
    is_deferred,
    is_plain,
    is_wide,
    key_rows,
    keys_of_block,
    mask_bounds,
    scale_arguments,
    sums_part,
    width_of,
)
from blocktune.kernels.hopper.backward.pre_and_post import (
    finish_kernel,
    finish_rows_kernel,
    join_parts_kernel,
    prepare_kernel,
    prepare_rows_kernel,
)
from blocktune.kernels.hopper.backward.wide.device_kernel import flash_bwd_hopper_wide_kernel
from blocktune.kernels.hopper.backward.wide.join import join_step
from blocktune.kernels.hopper.biases.arguments import (
    NO_KEY_BIASES,
    NO_MASK,
    MaskPass,
    key_biases,
    mask_code,
    row_biases,
)
from blocktune.kernels.hopper.common.descriptors import (
    describe,
    describe_packed,
    descriptor,
    is_describable,
    swizzled,
)
from blocktune.kernels.values.dropout import share_kept
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape

WARPS = 4
"""Of a warpgroup; also what the copying warp takes: itself, and three idle ones up to a whole warpgroup."""
PASS_ROWS = 32
"""Rows of a program of the pass before."""
GRADIENT_ROWS = 64
"""Rows of dk and dv that leave at once: a warpgroup's."""
MAX_SPACES = 64
"""Numbers of packed tokens whose workspace a launch keeps the layout of."""


@dataclass(frozen=True, slots=True)
class BackwardLaunch(BackwardLauncher):
    """What `bind` returns. Every launch has a workspace and a tile counter of its own, so that launches of several
    streams and captured graphs do not meet.

    sizes: the integers `SIZES` of the kernel between the passes. options: its constants; with PARTS above 1 a fourth
    kernel adds the gradients of keys and values up.
    """

    binds_tokens = False

    shape: AttentionShape
    sizes: tuple[int, ...]
    options: Options

    def fits(self, dout: Any) -> bool:
        return is_describable(dout)

    def prepared(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
        extras: Extras = NO_EXTRAS, *, pins: bool,
    ) -> Launch:  # fmt: skip
        """Return a launch that enqueues the kernels.

        Raises:
            UsageError: a gradient lies in memory as the copy engine cannot write it, or the tensor of a feature is
                missing.
        """
        del lse, scale
        shape = self.shape
        check_extras(shape.features, extras)
        _check_describable(q, k, v, dout, dk, dv)
        plain, device = is_plain(shape), q.device
        before, middle, after = self._before(out, dout, pins), self._middle(device, pins), self._after(dq, pins)
        join, places = self._join(dk, dv, pins), self._part_places()
        strides, _ = in_units((*out.stride()[:3], *dout.stride()[:3]))
        strides_dq, _ = in_units(dq.stride()[:3])
        upper, lower = bounds_of(shape)
        sizes, heads = self.sizes, (shape.num_heads, shape.seqlen_q)
        registers = adds_registers(shape, self.options.PERSISTENT)
        ahead, wide = self.options.AHEAD, is_wide(shape)
        mask = MaskPass.of(extras.mask, mask_bounds(shape), pins=pins) if mask_code(shape) else NO_MASK
        spaces: dict[int, tuple[Rows, Workspace]] = {}

        def launch(
            q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
            extras: Extras = NO_EXTRAS,
        ) -> None:  # fmt: skip
            found = spaces.get(q.shape[2])
            rows, space = self._space(spaces, q.shape[2], mask) if found is None else found
            memory = space.new(device)
            addressed = take_addresses(before, middle, after, *join, *mask.steps)
            lse_log2, delta, sums, counter, turns, tiles, *partial_sums = space.parts(memory, as_addresses=addressed)
            scale, scale_log2, cap_in = scale_arguments(shape, scale, extras)
            lse_factor = start_factor(scale_log2, cap_in) if ahead else None
            grad_lse = grad_lse_of(shape, extras, ahead)
            left = zip(partial_sums, places, strict=True) if join else (dk, dv)
            described = q, k, v, dout, (sums, rows.count), *left, (lse_log2, rows.count), (delta, rows.count)
            added = sums if registers else None
            if plain:
                before(out, dout, lse, lse_log2, delta, sums, counter, lse_factor)
                if extras.grad_lse is not None:
                    subtract_rows(row_sums_in(space, memory), grad_lse, rows, None)
                middle(*described, counter, added, scale, scale_log2)
                after(sums, dq, scale)
                for step in join:
                    step(*partial_sums, dk, dv, None, scale)
                return
            cu_q, padded = extras.cu_seqlens_q, rows.of_head
            rest = *strides, *lse_strides(out), *heads, padded
            of_rows, of_keys = row_biases(shape, extras), key_biases(shape, extras, (tiles, *mask.place))
            before(out, dout, lse, lse_log2, delta, sums, counter, turns, cu_q, lse_factor, *of_rows, *rest)
            if extras.grad_lse is not None:
                subtract_rows(row_sums_in(space, memory), grad_lse, rows, cu_q)
            bounds = padded, upper, lower, cap_in, cu_q, extras.cu_seqlens_k, turns
            for lay_out in mask.steps:
                lay_out(extras.mask if addressed else mask_bytes(extras.mask), tiles)  # both have one address
            middle(*described, counter, added, scale, scale_log2, *sizes, *bounds, *self.listed(extras, q), *of_keys)
            after(sums, dq, cu_q, scale, *strides_dq, *heads, padded)
            for step in join:
                step(*partial_sums, dk, dv, *(() if wide else (extras.cu_seqlens_k, scale)))  # wide parts are scaled

        return launch

    def listed(self, extras: Extras, query: Any) -> tuple[Any, ...]:
        """Return what the kernel takes of a block mask: here there is none."""
        del extras, query
        return (None,) * len(LIST_ARGUMENTS)

    def _before(self, out: Any, dout: Any, pins: bool) -> Step:
        shape, options = self.shape, {"num_warps": WARPS}
        rows = Rows.of(shape, shape.seqlen_q)
        if is_plain(shape):
            rest = *out.stride()[:3], *dout.stride()[:3], shape.num_heads, shape.seqlen_q, shape.head_dim, PASS_ROWS
            return Step(prepare_kernel, (rows.count // PASS_ROWS,), rest, options, pins=pins)
        programs = rows.longest // PASS_ROWS
        additive = shape.features.mask is MaskKind.ADDITIVE
        _, unit = in_units((*out.stride()[:3], *dout.stride()[:3]))
        rest = programs, shape.head_dim_v, width_of(shape), PASS_ROWS, BLOCK_M, additive, unit
        grid = (programs * shape.num_heads * shape.batch,)
        return Step(prepare_rows_kernel, grid, rest, options, pins=pins)

    def _middle(self, device: Any, pins: bool) -> Step:
        shape, keys = self.shape, keys_of_block(self.shape)
        kernel = flash_bwd_hopper_wide_kernel if is_wide(shape) else flash_bwd_hopper_kernel
        form = *(None for _ in (*FORM_ARGUMENTS, *LIST_ARGUMENTS)), *NO_KEY_BIASES
        rest = (*self.sizes, *form, self.options) if is_plain(shape) else (self.options,)
        rows = {0: BLOCK_M, 1: keys, 2: keys, 3: BLOCK_M}
        described: list[tuple[int, Describe]] = [
            (slot, partial(_described, count, shape)) for slot, count in rows.items()
        ]
        gradient = self._describe_gradient()
        described += [(4, partial(_described_sums, shape)), (5, gradient), (6, gradient)]
        described += [(7, _described_statistic), (8, _described_statistic)]
        options = {"num_warps": WARPS}
        return Step(kernel, self._grid(device), rest, options, sorted(described, key=itemgetter(0)), pins=pins)

    def _describe_gradient(self) -> Describe:
        """Return what describes dk and dv, or what the parts of a group leave of them."""
        if self.options.PARTS == 1:
            return partial(_described, GRADIENT_ROWS, self.shape)
        return partial(_described_part if is_wide(self.shape) else _described_sums, self.shape)

    def _after(self, dq: Any, pins: bool) -> Step:
        shape, part, options = self.shape, sums_part(self.shape), {"num_warps": WARPS}
        rows = Rows.of(shape, shape.seqlen_q)
        if is_plain(shape):
            rest = *dq.stride()[:3], shape.num_heads, shape.seqlen_q, shape.head_dim, part, is_deferred(shape)
            return Step(finish_kernel, (rows.count // BLOCK_M * 2,), rest, options, pins=pins)
        programs = rows.longest // BLOCK_M
        parts = 2 if is_deferred(shape) else width_of(shape) // part
        grid = (programs * parts * shape.num_heads * shape.batch,)
        _, unit = in_units(dq.stride()[:3])
        rest = programs, shape.head_dim, width_of(shape), part, is_deferred(shape), unit
        return Step(finish_rows_kernel, grid, rest, options, pins=pins)

    def _join(self, dk: Any, dv: Any, pins: bool) -> tuple[Step, ...]:
        """Return the kernel that adds up what the parts leave; none where there is one part."""
        shape = self.shape
        if self.options.PARTS == 1:
            return ()
        strides, unit = in_units((*dk.stride()[:3], *dv.stride()[:3]))
        if is_wide(shape):
            return (join_step(shape, self.options.PARTS, strides, unit, pins=pins),)
        blocks = gradient_blocks(shape)
        constants = shape.head_dim, shape.head_dim_v, width_of(shape), self.options.PARTS, unit
        rest = *strides, shape.num_heads_kv, shape.seqlen_k, blocks, *constants
        grid = width_of(shape) // sums_part(shape) * blocks * shape.num_heads_kv * shape.batch, 2
        return (Step(join_parts_kernel, grid, rest, {"num_warps": WARPS}, pins=pins),)

    def _space(self, spaces: dict[int, tuple[Rows, Workspace]], tokens: int, mask: MaskPass) -> tuple[Rows, Workspace]:
        """Return rows and workspace of queries of this length, which only packed sequences have several of; they are
        kept."""
        import torch

        shape = self.shape
        rows = Rows.of(shape, tokens)
        turns = rows.count // BLOCK_M if shape.features.deterministic else 0
        statistics = (rows.count, torch.float32)
        sums = (rows.count * width_of(shape), torch.float32)
        integers = (1, torch.int32), (turns, torch.int32)
        tiles, parts = mask.tiles or (0, torch.int32), self._parts_in_workspace()
        made = rows, Workspace(statistics, statistics, sums, *integers, tiles, *parts)
        if len(spaces) >= MAX_SPACES:
            spaces.clear()
        spaces[tokens] = made
        return made

    def _part_places(self) -> tuple[Any, Any]:
        """Return what describes the parts of dk and of dv next to their memory: rows, or sizes of wide heads."""
        shape, parts = self.shape, self.options.PARTS
        if not is_wide(shape):
            return (key_rows(shape, parts),) * 2
        leading = shape.batch, shape.num_heads_kv * parts, shape.seqlen_k
        return (*leading, shape.head_dim), (*leading, shape.head_dim_v)

    def _parts_in_workspace(self) -> list[tuple[int, Any]]:
        """Return elements and type of the parts of dk and of dv; no elements where there is one part."""
        import torch

        shape = self.shape
        if self.options.PARTS == 1:
            return [(0, torch.float32)] * 2
        if is_wide(shape):
            return [(prod(sizes), getattr(torch, shape.dtype)) for sizes in self._part_places()]
        return [(key_rows(shape, self.options.PARTS) * width_of(shape), torch.float32)] * 2

    def _grid(self, device: Any) -> tuple[int]:
        import torch

        heads = self.shape.batch * self.shape.num_heads_kv * self.options.PARTS
        tiles = -(-self.shape.seqlen_k // keys_of_block(self.shape)) * heads
        if not self.options.PERSISTENT:
            return (tiles,)
        return (min(tiles, torch.cuda.get_device_properties(device).multi_processor_count),)


def start_factor(scale_log2: float, cap_in: float | None) -> float:
    """Return what a log-sum-exp is multiplied by where scores run ahead: products begin with it, unless a soft cap
    bends them."""
    return -1.0 / scale_log2 if cap_in is None else 1.0


def gradient_blocks(shape: AttentionShape) -> int:
    """Return the blocks of gradients of a key head, in whole tiles of keys."""
    return key_rows(shape, 1) // (shape.batch * shape.num_heads_kv * GRADIENT_ROWS)


def grad_lse_of(shape: AttentionShape, extras: Extras, ahead: bool) -> Any:
    """Return the gradient of the log-sum-exp in the unit of the workspace's row sums, if there is one."""
    factor = (share_kept(extras.dropout_p) if shape.features.dropout else 1.0) * (-1.0 if ahead else 1.0)
    if extras.grad_lse is None or factor == 1.0:
        return extras.grad_lse
    return extras.grad_lse * factor


def row_sums_in(space: Workspace, memory: Any) -> Any:
    """Return the row sums of out * dout in memory of a workspace."""
    return space.parts(memory, as_addresses=False)[1]


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
    """Return the descriptor of the float32 sums of dq, as rows of 64 values that are stored without a swizzle."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return descriptor(sums, [elements // 64, 64], [64, 1], [part, 64], layout)


def statistic_descriptor(values: Any, count: int) -> Any:
    return descriptor(values, [count], [1], [BLOCK_M], gl.NVMMASharedLayout.get_default_for([BLOCK_M], gl.float32))


def _described_sums(shape: AttentionShape, part: tuple[Any, int]) -> Any:
    sums, rows = part
    return sums_descriptor(based(sums), rows * width_of(shape), added_rows(shape))


def _described_statistic(part: tuple[Any, int]) -> Any:
    values, rows = part
    return statistic_descriptor(based(values), rows)


def _described_part(shape: AttentionShape, part: tuple[Any, tuple[int, ...]]) -> Any:
    import torch

    memory, (batch, heads, length, dim) = part
    rows, columns = GRADIENT_ROWS, descriptor_width(shape)
    strides = [heads * length * dim, length * dim, dim, 1]
    layout = swizzled(rows, columns, getattr(torch, shape.dtype))
    return descriptor(based(memory), [batch, heads, length, dim], strides, [1, 1, rows, columns], layout)


def _check_describable(*tensors: Any) -> None:
    """Check that the copy engine can address the tensors.

    Raises:
        UsageError: the copy engine cannot address one of the tensors.
    """
    for tensor in tensors:
        if not is_describable(tensor):
            raise UsageError(
                "Rows of a gradient must be contiguous, and 16 must divide its address and its strides in bytes, but "
                f"got strides {tensor.stride()} and address {tensor.data_ptr():#x}. Allocate it with torch.empty_like."
            )


def _described(block_rows: int, shape: AttentionShape, tensor: Any) -> Any:
    make = describe_packed if shape.features.varlen else describe
    return make(tensor, block_rows, descriptor_width(shape))
