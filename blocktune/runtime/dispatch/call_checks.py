"""Checks a call's numbers and the values in its tensors: lengths, pages, shares.

Kernels trust them. The values in tensors on a GPU are looked at once for every kind of call, since that waits for it.
"""

from itertools import pairwise

from torch import Tensor, aminmax, arange, float32
from torch import bool as bool_

from blocktune.kernels.values.errors import TooFewDimensionsError, UsageError, WrongTypeError, require_type
from blocktune.runtime.dispatch.call import Call


def check_values(query: Tensor, key: Tensor, call: Call) -> None:
    """Check the values of a call.

    Raises:
        UsageError: cu_seqlens do not begin with 0, do not ascend, end beyond the tokens or hold a sequence that is
            longer than said; cache_seqlens are negative or beyond the cache; a block table names a page that is not
            there for keys that are.
    """
    extras = call.extras
    if call.lengths is None:
        return
    _, seqlen_q, seqlen_k = call.lengths
    if extras.cu_seqlens_q is not None:
        _check_bounds("q", extras.cu_seqlens_q, query.shape[2], seqlen_q)
    if extras.cu_seqlens_k is not None:
        _check_bounds("k", extras.cu_seqlens_k, key.shape[2], seqlen_k)
    if extras.cache_seqlens is None:
        return
    _check_lengths(extras.cache_seqlens, seqlen_k)
    if extras.block_table is not None:
        _check_table(extras.block_table, extras.cache_seqlens, call.features.page_size, key.shape[0])


def check_dimensions(layout: str, **tensors: Tensor) -> None:
    """Check that every argument is a tensor with the dimensions of a layout, such as `[tokens, heads, dim]`.

    Raises:
        WrongTypeError: one is no tensor.
        TooFewDimensionsError: one has fewer dimensions.
        UsageError: one has more.
    """
    count = layout.count(",") + 1
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise WrongTypeError(f"`{name}` must be a tensor, but got {type(tensor).__name__}. Convert it.")
        if tensor.dim() != count:
            error = TooFewDimensionsError if tensor.dim() < count else UsageError
            raise error(f"`{name}` must be {layout}, but got {tuple(tensor.shape)}. Reshape it to {count} dimensions.")


def check_sizes(query: Tensor, key: Tensor, value: Tensor, *, names: str = "query, key and value") -> None:
    """Check that query [batch, num_heads, seqlen_q, head_dim], key and value [batch, num_heads_kv, seqlen_k,
    head_dim(_v)] fit each other; `check_dimensions` has seen them.

    Raises:
        UsageError: they do not.
    """
    tensors = (query, key, value)
    if any(tensor.dtype != query.dtype or tensor.device != query.device for tensor in tensors):
        kinds = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise UsageError(
            f"{names} must have one data type and be on one device, but got {kinds}. Convert or move them."
        )
    if not query.is_floating_point():
        raise UsageError(f"{names} must be of a floating-point type, but got {query.dtype}. Convert them.")
    check_fit(query, key, value, names=names)


def check_fit(query: Tensor, key: Tensor, value: Tensor, *, names: str) -> None:
    """Check the sizes alone, as `check_sizes` does.

    Raises:
        UsageError: they do not fit each other.
    """
    tensors = (query, key, value)
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise UsageError(
            f"{names} must agree in batch, head_dim of queries and keys, and heads and length of keys and values, but "
            f"got [batch, heads, length, dim] {_shapes(tensors)}. Check which is which."
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise UsageError(
            f"`num_heads % num_heads_kv == 0` must hold, but got {query.shape[1]} query heads and {key.shape[1]} key "
            "heads. Each key head serves an equal group of query heads."
        )


def _shapes(tensors: tuple[Tensor, ...]) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


def check_dropout(dropout_p: float) -> None:
    """Check the probability of dropout.

    Raises:
        UsageError: dropout_p is outside [0, 1).
    """
    if not 0.0 <= dropout_p < 1.0:
        raise UsageError(
            f"`0 <= dropout_p < 1` must hold, but got dropout_p={dropout_p}. Give the share of the pairs to drop."
        )


def check_mask(mask: Tensor, query: Tensor, key: Tensor) -> None:
    """Check that a mask has a type and a shape that PyTorch takes. Which ones it takes with queries or keys of more or
    fewer dimensions than four is its own matter, and differs: it computes such calls itself.

    Raises:
        TooFewDimensionsError: the mask has fewer than two dimensions.
        UsageError: the mask is no boolean or floating-point tensor that broadcasts to [batch, num_heads, seqlen_q,
            seqlen_k].
    """
    if query.dim() != 4 or key.dim() != 4:
        return
    if mask.dtype not in (bool_, query.dtype, float32):
        added = " or ".join(map(str, dict.fromkeys((query.dtype, float32))))
        raise UsageError(
            f"`attn_mask` must be boolean (True where the query sees the key) or {added} (added to the scores), but "
            f"got {mask.dtype}. Convert it, such as with `attn_mask != 0`."
        )
    leading = (max(sizes) for sizes in zip(query.shape[:2], key.shape[:2], strict=True))
    given, wanted = tuple(mask.shape), (*leading, query.shape[2], key.shape[2])
    last = wanted[len(wanted) - len(given) :]
    if 2 <= len(given) <= len(wanted) and all(size in (1, most) for size, most in zip(given, last, strict=True)):
        return
    error = TooFewDimensionsError if len(given) < 2 else UsageError
    raise error(
        f"`attn_mask` must broadcast to {wanted}, but got {given}. The last two dimensions are queries and keys; give "
        "1 for a dimension that shares the mask."
    )


def check_softcap(softcap: float) -> None:
    """Check a soft cap.

    Raises:
        UsageError: softcap is negative, infinite or not a number.
    """
    if not 0.0 <= softcap < float("inf"):
        raise UsageError(f"`softcap >= 0` must hold, but got softcap={softcap}. Give 0 for none.")


def check_slopes(slopes: Tensor | None, batch: int, num_heads: int, query: Tensor) -> Tensor | None:
    """Return the slopes as [batch or 1, num_heads].

    Raises:
        WrongTypeError: they are no tensor.
        UsageError: they have another shape or data type, or are on another device.
    """
    if slopes is None:
        return None
    require_type("alibi_slopes", slopes, Tensor, "Give float32 slopes, one for every head.")
    if slopes.dtype is not float32 or tuple(slopes.shape) not in ((num_heads,), (batch, num_heads)):
        raise UsageError(
            f"`alibi_slopes` must be float32 [num_heads] or [batch, num_heads] with ({batch=}, {num_heads=}), but got "
            f"{slopes.dtype} {tuple(slopes.shape)}. Give a slope for every head."
        )
    if slopes.device != query.device:
        raise UsageError(
            f"`alibi_slopes` must be on the query's device, but got {slopes.device} and {query.device}. Move them."
        )
    return slopes if slopes.dim() == 2 else slopes[None]


def check_sinks(sinks: Tensor | None, num_heads: int, query: Tensor) -> Tensor | None:
    """Return the sinks [num_heads].

    Raises:
        WrongTypeError: they are no tensor.
        UsageError: they have another shape, are no floating-point numbers, or are on another device.
    """
    if sinks is None:
        return None
    require_type("s_aux", sinks, Tensor, "Give a logit for every head.")
    if not sinks.is_floating_point() or tuple(sinks.shape) != (num_heads,):
        raise UsageError(
            f"`s_aux` must be floating-point numbers [num_heads] with {num_heads=}, but got {sinks.dtype} "
            f"{tuple(sinks.shape)}. Give a logit for every head."
        )
    if sinks.device != query.device:
        raise UsageError(f"`s_aux` must be on the query's device, but got {sinks.device} and {query.device}. Move it.")
    return sinks


def _check_bounds(letter: str, bounds: Tensor, tokens: int, longest: int) -> None:
    values = bounds.tolist()
    steps = [after - before for before, after in pairwise(values)]
    if values[0] != 0 or min(steps, default=0) < 0:
        raise UsageError(
            f"`cu_seqlens_{letter}` must begin with 0 and ascend, but got {_some(values)}. Pass the cumulative sums "
            "of the lengths."
        )
    if values[-1] > tokens:
        raise UsageError(
            f"`cu_seqlens_{letter}[-1] <= tokens` must hold, but got {values[-1]} and {tokens} tokens. Give lengths "
            "that add up to no more."
        )
    if max(steps, default=0) > longest:
        raise UsageError(
            f"`max_seqlen_{letter}` must be no less than the longest sequence, but got {longest} and a sequence of "
            f"{max(steps)}. Give the length of the longest."
        )


def _check_table(table: Tensor, lengths: Tensor, page_size: int, pages: int) -> None:
    """Check the places of a table that the keys need; nothing reads the others."""
    places = arange(table.shape[1], device=table.device)
    used = table[places * page_size < lengths[:, None]]
    low, high = (int(bound) for bound in aminmax(used)) if used.numel() else (0, -1)
    if low < 0 or high >= pages:
        raise UsageError(
            f"`0 <= page < {pages}` must hold in the places of block_table that cache_seqlens need, and for the "
            f"entries that cache_batch_idx names, but got pages {low} to {high}. Fill these places."
        )


def _check_lengths(lengths: Tensor, capacity: int) -> None:
    if not lengths.numel():
        return
    shortest, longest = (int(bound) for bound in aminmax(lengths))
    if shortest < 0 or longest > capacity:
        raise UsageError(
            f"`0 <= cache_seqlens <= {capacity}` must hold, but got lengths from {shortest} to {longest}. "
            "The cache, or the pages in a row of block_table, hold no more; make it larger."
        )


def _some(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"{[*values[:8]]}..."


def check_capture(call: Call) -> None:
    """Check that a CUDA graph can capture the mathematics that stand in for the call.

    Raises:
        UsageError: it cannot.
    """
    if call.features.dropout:
        raise UsageError(
            "Dropout with other features cannot be captured in a CUDA graph: every replay would drop the same "
            f"pairs, but got dropout_p={call.extras.dropout_p}. Capture without dropout, or run this part eagerly."
        )
