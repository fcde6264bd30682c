"""What a call's ALiBi, mask and dropout become for the Hopper backward, on the host: constants, arguments, the pass."""

from dataclasses import dataclass
from typing import Any, Self

from blocktune.kernels.base.feature_arguments import (
    DROPOUT_WORDS,
    MASK_CODES,
    broadcast_strides,
    run_time_numbers,
)
from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.base.specialize import TensorArgument, specialize
from blocktune.kernels.base.steps import Step
from blocktune.kernels.hopper.biases.mask_pass import KEYS, ROWS, Bounds, LaidMask, lay_out_mask_kernel
from blocktune.kernels.hopper.biases.of_keys import KeyBiases
from blocktune.kernels.values.dropout import share_kept
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal

MASK_OPTIONS = {"num_warps": 4}
NO_KEY_BIASES = (None,) * len(KeyBiases._fields)
ROW_BIASES = ("slopes", "slope_batch", "slope_head", "kept_share")
"""What the launch before the backward takes."""


def mask_code(shape: AttentionShape) -> int:
    """Return 1 for a boolean mask, 2 for an additive one, 0 without a mask tensor."""
    return MASK_CODES.get(shape.features.mask, 0)


def alibi_code(shape: AttentionShape) -> int:
    """Return 0 without ALiBi, 2 where a query may see keys past its place, else 1."""
    features = shape.features
    one_side = shape.causal is not Causal.NONE or (features.window is not None and features.window[1] == 0)
    return (1 if one_side else 2) if features.alibi else 0


def is_biased(shape: AttentionShape) -> bool:
    """Return whether the shape has ALiBi, a mask tensor or dropout: work for every score of every block."""
    return shape.features.alibi or shape.features.dropout or mask_code(shape) > 0


def key_biases(shape: AttentionShape, extras: Extras, mask: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of `KeyBiases`. mask: as it is laid out, its strides and whether its columns move.

    Raises:
        UsageError: dropout_p is outside [0, 1).
    """
    slopes: tuple[Any, ...] = (None,) * 4
    if shape.features.alibi:
        anchor = 0 if shape.features.varlen else shape.diagonal
        slopes = extras.alibi_slopes, *broadcast_strides(extras.alibi_slopes, 2), anchor
    words = run_time_numbers(extras, 1.0)[3:] if shape.features.dropout else (None,) * len(DROPOUT_WORDS)
    return *slopes, *mask, *words


def row_biases(shape: AttentionShape, extras: Extras) -> tuple[Any, ...]:
    """Return the arguments `ROW_BIASES`: slopes only where the log-sum-exp takes up a part of ALiBi."""
    slopes: tuple[Any, ...] = (None,) * 3
    if alibi_code(shape) == 1:
        slopes = extras.alibi_slopes, *broadcast_strides(extras.alibi_slopes, 2)
    return *slopes, share_kept(extras.dropout_p) if shape.features.dropout else None


# ---- masks with keys as rows


def turned(mask: Any) -> Any:
    """Return the mask with its keys as rows. Where all queries have the same, a tile of them is left."""
    if mask.shape[2] == 1 or mask.stride(2) == 0:
        mask = mask[:, :, :1].expand(-1, -1, KEYS, -1)
    return mask.mT


def seen_by_keys(bounds: Bounds) -> Bounds:
    """Return bounds of the same pairs as seen from the keys: key j is seen by the queries j - upper .. j - lower."""
    upper, lower = bounds
    return None if lower is None else -lower, None if upper is None else -upper


@dataclass(frozen=True, slots=True)
class MaskPass:
    """The launch that lays a mask out with keys as rows, if there is one: how many elements of which type it writes,
    and the arguments that place them: strides of (batch, head, 64 keys) in tiles, and whether columns move."""

    steps: tuple[Step, ...]
    tiles: tuple[int, Any] | None
    place: tuple[int | None, ...]

    @classmethod
    def of(cls, mask: Any, bounds: Bounds, *, pins: bool) -> Self:
        """Take a mask that others have the sizes and strides of. bounds: (upper, lower) of the pairs that the attention
        reads of it: query i sees keys i + lower .. i + upper."""
        import torch

        rows = turned(mask)
        laid = LaidMask.of(rows)
        tiles = laid.programs * laid.tile, torch.int32 if laid.boolean else mask.dtype
        moves = rows.stride(3) != 0
        arguments = laid.arguments(rows, seen_by_keys(bounds) if moves else (None, None))
        step = Step(lay_out_mask_kernel, (laid.programs,), arguments, MASK_OPTIONS, pins=pins)
        return cls((step,), tiles, (*laid.strides(rows), int(moves)))


NO_MASK = MaskPass((), None, (None,) * 4)


# ---- compiled offline


def example_key_biases(shape: AttentionShape) -> dict[str, Any]:
    """Return what compiles the backward offline for the biases of a shape: a mask and slopes for all of the batch."""
    features, values = shape.features, dict.fromkeys(KeyBiases._fields)
    if features.alibi:
        slopes = TensorArgument("float32")
        values |= {"slopes": slopes, "slope_batch": 0, "slope_head": int(shape.num_heads > 1), "anchor": 0}
    if mask_code(shape):
        laid = TensorArgument("int32" if features.mask is MaskKind.BOOLEAN else shape.dtype)
        values |= {"mask": laid, "mask_batch": 0, "mask_head": 0, "mask_tile": 0, "mask_column": 1}
    return values | (dict.fromkeys(DROPOUT_WORDS, 0) if features.dropout else {})


def example_row_biases(shape: AttentionShape) -> dict[str, Any]:
    """Return what compiles the launch before the backward offline."""
    values: dict[str, Any] = dict.fromkeys(ROW_BIASES)
    if alibi_code(shape) == 1:
        values |= {"slopes": TensorArgument("float32"), "slope_batch": 0, "slope_head": int(shape.num_heads > 1)}
    return values | ({"kept_share": 0.5} if shape.features.dropout else {})


def turned_spec(shape: AttentionShape) -> CompileSpec:
    """Return the pass over a mask [seqlen_q, seqlen_k] for all of the batch, with keys as rows."""
    boolean = shape.features.mask is MaskKind.BOOLEAN
    kinds = ("uint8", "int32") if boolean else (shape.dtype,) * 2
    strides = 0, 0, 1, 0 if shape.seqlen_q == 1 else shape.seqlen_k
    columns = KEYS if shape.seqlen_q == 1 else shape.seqlen_q
    sizes = 1, shape.seqlen_k, columns, -(-shape.seqlen_k // ROWS), -(-columns // KEYS), 0, 0
    values = (*map(TensorArgument, kinds), *strides, *sizes, boolean, ROWS, KEYS)
    return specialize(lay_out_mask_kernel, dict(zip(lay_out_mask_kernel.arg_names, values, strict=True)), MASK_OPTIONS)
