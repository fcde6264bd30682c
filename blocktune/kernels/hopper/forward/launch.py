"""A launch of the Hopper forward: the arguments that a call's features become, and the pass over its mask."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.base.direct_launch import Describe
from blocktune.kernels.base.feature_arguments import (
    DROPOUT_WORDS,
    broadcast_strides,
    check_extras,
    mask_bytes,
    run_time_numbers,
    sinks_of,
)
from blocktune.kernels.base.flash_kernel import LOG2_E
from blocktune.kernels.base.kernel import CompileSpec, Launch
from blocktune.kernels.base.specialize import TensorArgument, specialize
from blocktune.kernels.base.steps import Launcher, Step, Workspace, take_addresses
from blocktune.kernels.hopper.biases.arguments import mask_code
from blocktune.kernels.hopper.biases.mask_pass import KEYS, ROWS, Bounds, LaidMask, lay_out_mask_kernel
from blocktune.kernels.hopper.common.descriptors import rows_between
from blocktune.kernels.hopper.common.persistent_blocks import tile_counter
from blocktune.kernels.hopper.forward.arguments import Biases
from blocktune.kernels.hopper.forward.device_kernel import flash_fwd_hopper_kernel
from blocktune.kernels.hopper.forward.layout import bounds_of, has_own_lengths
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape

MASK_OPTIONS = {"num_warps": 4}
NO_BIASES = (None,) * len(Biases._fields)
"""The arguments of `Biases` without any."""
NO_MASK = (None,) * 4
NO_CACHE = (None,) * 5


def example_biases(shape: AttentionShape) -> dict[str, Any]:
    """Return what compiles the kernel offline for the biases of a shape: a mask and slopes for all of the batch."""
    features, values = shape.features, dict.fromkeys(Biases._fields)
    if features.alibi:
        slopes = TensorArgument("float32")
        values |= {"slopes": slopes, "slope_batch": 0, "slope_head": int(shape.num_heads > 1), "diagonal": 0}
    if mask_code(shape):
        laid = TensorArgument("int32" if features.mask is MaskKind.BOOLEAN else shape.dtype)
        values |= {"mask": laid, "mask_batch": 0, "mask_head": 0, "mask_tile": 0}
    if features.alibi or features.mask is MaskKind.ADDITIVE:
        values |= {"unit": 1.0}
    if features.dropout:
        values |= {"kept_share": 1.0} | dict.fromkeys(DROPOUT_WORDS, 0)
    return values


def mask_spec(shape: AttentionShape) -> CompileSpec:
    """Return the pass over a mask [seqlen_q, seqlen_k] for all of the batch, to be compiled offline."""
    boolean = shape.features.mask is MaskKind.BOOLEAN
    kinds = ("uint8", "int32") if boolean else (shape.dtype,) * 2
    names = lay_out_mask_kernel.arg_names
    strides = 0, 0, 0 if shape.seqlen_q == 1 else shape.seqlen_k, 1
    sizes = 1, shape.seqlen_q, shape.seqlen_k, -(-shape.seqlen_q // ROWS), -(-shape.seqlen_k // KEYS), 0, 0
    values = (*map(TensorArgument, kinds), *strides, *sizes, boolean, ROWS, KEYS)
    return specialize(lay_out_mask_kernel, dict(zip(names, values, strict=True)), MASK_OPTIONS)


def seen_bounds(shape: AttentionShape) -> Bounds:
    """Return the bounds of the pairs that the attention reads of a mask; none where each sequence has its own."""
    return (None, None) if has_own_lengths(shape) else bounds_of(shape)


def leading(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> tuple[Any, ...]:
    """Return the leading arguments of a call without features."""
    return q, k, v, out, lse, tile_counter(q.device), None, None, None, *NO_BIASES, scale * LOG2_E, 0.0


def leading_with_extras(
    shape: AttentionShape, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras,
    mask: tuple[Any, ...] = NO_MASK,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the leading arguments with those of features. mask: as it is laid out, with its strides.

    Raises:
        UsageError: the tensor of a feature is missing.
    """
    features = shape.features
    check_extras(features, extras)
    given = extras.cu_seqlens_q, extras.cu_seqlens_k, sinks_of(extras)
    bend, unit = (scale / extras.softcap, extras.softcap) if features.softcap else (0.0, scale)
    scale_log2 = LOG2_E if features.mask is MaskKind.ADDITIVE else unit * LOG2_E
    biases = _alibi(shape, unit, extras) + mask + _dropout(shape, extras)
    rows = q.shape[2]  # of a head
    cache = _cache(extras, k, v) if features.cached else NO_CACHE
    return q, k, v, out, lse, tile_counter(q.device), *given, *biases, scale_log2, bend, rows, *cache


def _cache(extras: Extras, k: Any, v: Any) -> tuple[Any, ...]:
    """Return the lengths and the table of a cache, the rows between its entries or pages, and the table's stride."""
    table, between = extras.block_table, (rows_between(k), rows_between(v))
    return extras.cache_seqlens, table, *between, None if table is None else table.stride(0)


def _alibi(shape: AttentionShape, unit: float, extras: Extras) -> tuple[Any, ...]:
    """Return the slopes with their strides, the diagonal and the unit of scores, None for each that no feature asks
    for."""
    features = shape.features
    unit_or_none = unit if features.alibi or features.mask is MaskKind.ADDITIVE else None
    if not features.alibi:
        return None, None, None, None, unit_or_none
    diagonal = 0 if has_own_lengths(shape) else shape.diagonal
    return extras.alibi_slopes, *broadcast_strides(extras.alibi_slopes, 2), diagonal, unit_or_none


def _dropout(shape: AttentionShape, extras: Extras) -> tuple[Any, ...]:
    """Return the share of pairs that are kept, and the words that say which."""
    if not shape.features.dropout:
        return (None,) * 5
    _, _, *numbers = run_time_numbers(extras, 1.0)
    return tuple(numbers)


@dataclass(frozen=True, slots=True)
class MaskedLaunch(Launcher):
    """What `bind` returns for shapes with a mask: launch(q, k, v, out, lse, scale, extras) of two kernels, the second
    of which reads what the first one makes of the mask.

    grid: of the attention. fixed: its arguments after those of `leading_with_extras`.
    """

    shape: AttentionShape
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]
    options: Mapping[str, int]
    descriptors: Sequence[tuple[int, Describe]]

    def prepared(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS, *, pins: bool
    ) -> Launch:
        """Return the launch of tensors like these.

        Raises:
            UsageError: the tensor of a feature is missing.
        """
        import torch

        del q, k, v, out, lse, scale
        check_extras(self.shape.features, extras)
        mask: Any = extras.mask
        laid = LaidMask.of(mask)
        dtype = torch.int32 if laid.boolean else mask.dtype
        space = Workspace((laid.programs * laid.tile, dtype))
        arguments = laid.arguments(mask, seen_bounds(self.shape))
        lay_out = Step(lay_out_mask_kernel, (laid.programs,), arguments, MASK_OPTIONS, pins=pins)
        attend = Step(flash_fwd_hopper_kernel, self.grid, self.fixed, self.options, self.descriptors, pins=pins)
        strides = laid.strides(mask)

        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, extras: Extras = NO_EXTRAS) -> None:
            addressed = take_addresses(lay_out, attend)
            memory = space.new(q.device)  # lives until both kernels are enqueued: between them zeros are allocated
            (tiles,) = space.parts(memory, as_addresses=addressed)
            lay_out(extras.mask if addressed else mask_bytes(extras.mask), tiles)  # both have one address
            attend(*leading_with_extras(self.shape, q, k, v, out, lse, scale, extras, (tiles, *strides)))

        return launch
