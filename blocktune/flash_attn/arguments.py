"""Arguments that the interfaces of FlashAttention-3 and -4 share."""

from typing import Any

from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import UNLIMITED
from blocktune.runtime.api.flash_attn import Attended, flash_attn_varlen_func
from blocktune.runtime.api.torch_varlen import used_keys
from blocktune.runtime.dispatch.obstacles import needs_gradients


def refuse(**given: Any) -> None:
    """Check that a call leaves arguments out.

    Raises:
        UsageError: it gives one.
    """
    for name, value in given.items():
        if value is not None and (isinstance(value, Tensor) or value):
            raise UsageError(
                f"`{name}` is not served by blocktune, but got {_short(value)}. Leave it out, or call flash-attention "
                "itself."
            )


def _short(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"


def window_pair(window: tuple[int | None, int | None]) -> tuple[int, int]:
    """Return a window of FlashAttention-4, where None means no bound, as ours have it."""
    left, right = (UNLIMITED if side is None else side for side in window)
    return left, right


def write_result(out: Tensor | None, result: Tensor) -> Tensor:
    """Return the result, in `out` where that is given.

    Raises:
        UsageError: a gradient is needed.
    """
    if out is None:
        return result
    if needs_gradients(out, result):
        raise UsageError("`out` must be left out where gradients are needed, but one is. Use the returned output.")
    return out.copy_(result)


def attend_used(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins_q: Tensor | None,
    begins_k: Tensor | None,
    longest: tuple[int | None, int | None],
    used: Tensor | None,
    table: Tensor | None,
    **options: Any,
) -> Attended:
    """Return `flash_attn_varlen_func` of sequences of which `used` keys take part, or all.

    Raises:
        UsageError: as that raises, or something is missing that says where sequences begin.
    """
    if begins_q is None or longest[0] is None:
        raise UsageError(
            "Packed sequences need cu_seqlens_q and max_seqlen_q, but one of them is None. Say where the sequences "
            "begin, or call flash_attn_func."
        )
    if used is not None:
        k, v, begins_k = used_keys(k, v, begins_q, begins_k, used, table)
    if begins_k is None:
        raise UsageError("Packed keys need cu_seqlens_k or seqused_k, but both are None. Say where the keys begin.")
    longest_k = longest[1]
    if longest_k is None:
        longest_k = k.shape[0] if table is None else table.shape[1] * k.shape[1]
    return flash_attn_varlen_func(q, k, v, begins_q, begins_k, longest[0], longest_k, block_table=table, **options)
