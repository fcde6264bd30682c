"""A launch of the split Hopper forward: the attention of every part of the keys, and the merge of these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from blocktune.kernels.base.direct_launch import Describe
from blocktune.kernels.base.flash_kernel import contiguous_strides, padded_width
from blocktune.kernels.base.kernel import CompileSpec, Launch
from blocktune.kernels.base.specialize import TensorArgument, in_units, named_in_units, specialize
from blocktune.kernels.base.steps import Launcher, Step, Workspace, based, take_addresses
from blocktune.kernels.hopper.common.descriptors import descriptor, swizzled
from blocktune.kernels.hopper.forward.device_kernel import flash_fwd_hopper_kernel
from blocktune.kernels.hopper.forward.launch import leading, leading_with_extras
from blocktune.kernels.hopper.forward.split.merge import ROWS, WARPS, merge_parts_kernel
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import AttentionShape

OUT = 3
"""The place of the output among the descriptors."""


@dataclass(frozen=True, slots=True)
class SplitForwardLaunch(Launcher):
    """What `bind` returns: launch(q, k, v, out, lse, scale[, extras]) of two kernels.

    parts: that the keys are cut into. grid: of the attention. fixed: its arguments after those of `leading`, or of
    `leading_with_extras` where the shape has features. block: (rows, columns) of a copy of the output. described: what
    makes the descriptors of q, k and v.
    """

    shape: AttentionShape
    parts: int
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]
    options: Mapping[str, int]
    block: tuple[int, int]
    described: Sequence[tuple[int, Describe]]

    def prepared(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS, *, pins: bool
    ) -> Launch:
        """Return the launch of tensors like these.

        Raises:
            UsageError: the tensor of a feature is missing.
        """
        import torch

        del k, v, lse, scale, extras
        shape, rows = self.shape, q.shape[0] * q.shape[1] * self.parts * q.shape[2]
        space = Workspace((rows * shape.head_dim_v, q.dtype), (rows, torch.float32))
        of_parts = OUT, partial(describe_parts, shape, self.parts, self.block, q.dtype)
        attend = Step(
            flash_fwd_hopper_kernel, self.grid, self.fixed, self.options, (*self.described, of_parts), pins=pins
        )
        strides, unit = in_units(out.stride()[:3])
        constants = merge_constants(shape, self.parts, unit).values()
        rest = *strides, shape.num_heads, shape.seqlen_q, *constants
        grid = -(-shape.seqlen_q // ROWS), shape.batch * shape.num_heads
        merge = Step(merge_parts_kernel, grid, rest, {"num_warps": WARPS}, pins=pins)

        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> None:
            memory = space.new(q.device)  # lives until both kernels are enqueued
            outputs, sums = space.parts(memory, as_addresses=take_addresses(attend, merge))
            tensors = q, k, v, (outputs, rows), sums, scale
            attend(*(leading_with_extras(shape, *tensors, extras) if shape.features else leading(*tensors)))
            merge(outputs, sums, out, lse)

        return launch


def describe_parts(
    shape: AttentionShape, parts: int, block: tuple[int, int], dtype: Any, described: tuple[Any, int]
) -> Any:
    """Return the descriptor of the parts' outputs [batch, num_heads * parts, seqlen_q, head_dim_v] in a workspace."""
    memory, _ = described
    heads, length, dim = shape.num_heads * parts, shape.seqlen_q, shape.head_dim_v
    strides = [heads * length * dim, length * dim, dim, 1]
    return descriptor(
        based(memory), [shape.batch, heads, length, dim], strides, [1, 1, *block], swizzled(*block, dtype)
    )


def merge_constants(shape: AttentionShape, parts: int, unit: int) -> dict[str, int]:
    """Return the constants of the merge. unit: elements that the strides of the output count in."""
    width = padded_width(shape.head_dim_v)
    return {"PARTS": parts, "HEAD_DIM_V": shape.head_dim_v, "WIDTH": width, "ROWS": ROWS, "UNIT": unit}


def merge_spec(shape: AttentionShape, parts: int) -> CompileSpec:
    """Return the merge into a contiguous output, to be compiled offline."""
    outputs, sums = TensorArgument(shape.dtype), TensorArgument("float32")
    arguments: dict[str, Any] = {"Parts": outputs, "LseParts": sums, "Out": outputs, "Lse": None}
    strides = named_in_units(contiguous_strides(shape, "o"))
    unit = strides.pop("UNIT")
    arguments |= strides | {"num_heads": shape.num_heads, "seqlen_q": shape.seqlen_q}
    return specialize(merge_parts_kernel, arguments | merge_constants(shape, parts, unit), {"num_warps": WARPS})
