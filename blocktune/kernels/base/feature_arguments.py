"""The arguments that a call's features become, for every kernel that serves features of dense scores."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from blocktune.kernels.base.direct_launch import DropoutWord, recorder
from blocktune.kernels.base.specialize import HINTED, TensorArgument
from blocktune.kernels.values.dropout import keep_arguments, share_kept
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import UNLIMITED, Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal

DENSE_FEATURES = frozenset(("window", "softcap", "alibi", "boolean", "additive", "dropout", "varlen"))
"""The features of dense scores whose arguments are here."""

CACHE_FEATURES = frozenset(("cached", "paged"))
"""Where the keys lie; their arguments are here as well."""

DECODED_QUERIES = 32
"""Of a call over a cache, up to which the decoding kernels compute it: nothing is packed into the tiles of others."""

MASK_CODES = {MaskKind.BOOLEAN: 1, MaskKind.ADDITIVE: 2}
"""The mask tensors as `score_tile` counts them; 0 is none."""

SIZES = (
    "num_heads", "group_size", "batch_heads", "head_group", "seqlen_q", "seqlen_k", "diagonal", "window_left",
    "window_right",
)  # fmt: skip
DROPOUT_WORDS = ("seed_lo", "seed_hi", "offset", "threshold")
RUN_TIME_INTEGERS = (*SIZES, *DROPOUT_WORDS, "stride_table")
"""Integers that are not compiled in."""


def check_extras(features: Features, extras: Extras) -> None:
    """Check that every feature has what it needs.

    Raises:
        UsageError: it has not.
    """
    misplaced = [name for name, wanted in _needed(features).items() if (getattr(extras, name) is not None) != wanted]
    if misplaced:
        raise UsageError(
            f"The extras must be the tensors of the shape's features and no others, but for {features.label!r} these "
            f"are missing or superfluous: {', '.join(misplaced)}. Pass what the features need."
        )
    if features.softcap and not extras.softcap > 0:
        raise UsageError(f"`softcap > 0` must hold, but got softcap={extras.softcap}. Leave the feature out for none.")


def few_queries_problem(kernel: str, shape: AttentionShape) -> str | None:
    """Return why a forward kernel leaves a shape over a cache to decoding, or None. Entry points pad few packed
    queries for decoding, so that packed ones that come here stay."""
    if not shape.features.cached or shape.features.varlen or shape.seqlen_q > DECODED_QUERIES:
        return None
    return f"`seqlen_q > {DECODED_QUERIES}` must hold over a cache for {kernel}, but got seqlen_q={shape.seqlen_q}"


@cache
def _needed(features: Features) -> Mapping[str, bool]:
    """Return which tensors the features need. A cache says how long its sequences are and where they begin."""
    return {
        "mask": features.mask in MASK_CODES,
        "alibi_slopes": features.alibi,
        "cu_seqlens_q": features.varlen,
        "cu_seqlens_k": features.varlen and not features.cached,
        "cache_seqlens": features.cached,
        "block_table": features.page_size > 0,
    }


def sinks_of(extras: Extras) -> Any:
    """Return the sinks as kernels read them, one after the other; None without any."""
    sinks = extras.sinks
    return sinks if sinks is None or sinks.is_contiguous() else sinks.contiguous()


def slopes_of(extras: Extras) -> Any:
    """Return the slopes with those of a batch entry one after the other; None without any."""
    slopes = extras.alibi_slopes
    return slopes if slopes is None or slopes.stride(-1) == 1 else slopes.contiguous()


def mask_bytes(mask: Any) -> Any:
    """Return the mask as the kernels read it: a boolean one as bytes, in the same memory."""
    import torch

    return mask.view(torch.uint8) if mask is not None and mask.dtype is torch.bool else mask


def broadcast_strides(tensor: Any, dims: int) -> tuple[int, ...]:
    """Return the tensor's strides in elements, 0 where it has one element for all; zeros without a tensor."""
    if tensor is None:
        return (0,) * dims
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def own_mask_sizes(mask: Any) -> tuple[int, ...]:
    """Return how many batch entries, heads and queries have a mask of their own."""
    return tuple(1 if stride == 0 else size for size, stride in zip(mask.shape[:3], mask.stride()[:3], strict=True))


def lse_strides(q: Any) -> tuple[int, int]:
    """Return the strides of (batch, head) of the log-sum-exp that belongs to the query."""
    heads, rows = q.shape[1], q.shape[2]
    return heads * rows, rows


def mask_element_bytes(shape: AttentionShape) -> int:
    """Return the bytes of an element of the mask tensor; 0 without one."""
    return {MaskKind.BOOLEAN: 1, MaskKind.ADDITIVE: shape.element_bytes}.get(shape.features.mask, 0)


def aligned_width(seqlen_k: int) -> int:
    """Return the elements from one row of a mask to the next where the compiler knows the alignment of all."""
    return -(-seqlen_k // HINTED) * HINTED


def run_time_numbers(extras: Extras, scale: float) -> tuple[float | int, ...]:
    """Return scale, softcap, kept_share and the four words of dropout. A recording knows those that change with each
    call.

    Raises:
        UsageError: dropout_p is outside [0, 1).
    """
    *words, threshold = keep_arguments(extras)
    if recorder.current is not None and extras.dropout_p:
        words = [*DropoutWord.all(words)]
    return scale, extras.softcap, share_kept(extras.dropout_p), *words, threshold


def run_time_sizes(shape: AttentionShape, batch_heads: int, head_group: int) -> dict[str, int]:
    """Return the integers `SIZES`. batch_heads: heads that the grid counts; head_group: of them, those worked on
    together."""
    window = shape.features.window or (UNLIMITED, UNLIMITED)
    heads = shape.num_heads, shape.group_size, batch_heads, head_group
    return dict(zip(SIZES, (*heads, shape.seqlen_q, shape.seqlen_k, shape.diagonal, *window), strict=True))


def feature_constants(shape: AttentionShape) -> dict[str, Any]:
    """Return the constants that say which features there are."""
    features = shape.features
    return {
        "CAUSAL": shape.causal is not Causal.NONE,
        "UPPER_LEFT": shape.causal is Causal.UPPER_LEFT,
        "WINDOW": features.window is not None,
        "SOFTCAP": features.softcap,
        "ALIBI": features.alibi,
        "MASK": MASK_CODES.get(features.mask, 0),
        "BIASED": features.softcap or features.alibi or features.mask is MaskKind.ADDITIVE,
        "DROPOUT": features.dropout,
        "PACKED": features.varlen,
        "CACHED": features.cached,
        "PAGE_SIZE": features.page_size,
    }


def example_arguments(shape: AttentionShape) -> dict[str, Any]:
    """Return what compiles a kernel offline for the features of the shape: a mask [seqlen_q, seqlen_k] and slopes
    [num_heads] for all of the batch, lengths, numbers, and the strides of log-sum-exps."""
    features, masked, integers = shape.features, shape.features.mask is not MaskKind.NONE, TensorArgument("int32")
    mask = TensorArgument("uint8" if features.mask is MaskKind.BOOLEAN else shape.dtype)
    arguments: dict[str, Any] = {"Mask": mask if masked else None}
    arguments |= {"CuQ": integers if features.varlen else None}
    arguments |= {"CuK": integers if features.varlen and not features.cached else None}
    arguments |= {"Lengths": integers if features.cached else None}
    arguments |= {"Table": integers, "stride_table": 1} if features.page_size else {"Table": None, "stride_table": None}
    arguments |= {"Slopes": TensorArgument("float32") if features.alibi else None}
    arguments |= {"scale": 1.0, "softcap": 1.0, "kept_share": 1.0} | dict.fromkeys(DROPOUT_WORDS, 0)
    rows = (0, 0, 0 if shape.seqlen_q == 1 else aligned_width(shape.seqlen_k), 1) if masked else (0,) * 4
    slopes = (0, 1) if features.alibi and shape.num_heads > 1 else (0, 0)
    strides = (*rows, *slopes, shape.num_heads * shape.seqlen_q, shape.seqlen_q)
    names = ("mb", "mh", "mm", "mn", "sb", "sh", "lb", "lh")
    return arguments | {f"stride_{name}": value for name, value in zip(names, strides, strict=True)}
