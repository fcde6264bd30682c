"""Attention over parts of the keys, merged: what ring attention, cascades and shared prefixes are made of."""

import torch
from torch import Tensor

from blocktune.kernels.values.errors import UsageError, require_type
from blocktune.runtime.dispatch.call_checks import check_dimensions


def merge_partial(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention of the same queries over two disjoint sets of keys into attention over both. Differentiable.

    Outputs and log-sum-exps are as `flash_attn_func` and its relatives return them: [batch, seqlen, heads, dim] with
    [batch, heads, seqlen], or packed [tokens, heads, dim] with [heads, tokens]. A row whose log-sum-exp is -inf, or inf
    as FlashAttention-2 writes it, saw no key: whatever its output holds, NaN included, changes nothing. The weights are
    computed in float32, or in float64 of such outputs.

    Returns:
        the output, like out_a, and the log-sum-exp.

    Raises:
        UsageError: the tensors do not fit each other.
        WrongTypeError: an argument is no tensor.
    """
    _check(out_a, lse_a, out_b, lse_b)
    empty_a, empty_b = lse_a.isinf(), lse_b.isinf()
    empty = empty_a & empty_b
    # -inf minus -inf is no number, nor its gradient
    a, b = (
        lse.masked_fill(own, float("-inf")).masked_fill(empty, 0.0) for lse, own in ((lse_a, empty_a), (lse_b, empty_b))
    )
    lse = torch.logaddexp(a, b)
    wide = torch.promote_types(out_a.dtype, torch.float32)
    part_a = out_a.to(wide).masked_fill(_of_outputs(empty_a), 0.0) * _of_outputs((a - lse).exp())
    part_b = out_b.to(wide).masked_fill(_of_outputs(empty_b), 0.0) * _of_outputs((b - lse).exp())
    return (part_a + part_b).to(out_a.dtype), lse.masked_fill(empty, float("-inf"))


def _of_outputs(rows: Tensor) -> Tensor:
    """Return numbers of rows [..., heads, seqlen] as outputs [..., seqlen, heads, 1] have them."""
    return rows.mT[..., None]


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Check the arguments.

    Raises:
        UsageError: as `merge_partial` says.
    """
    for name, tensor in {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}.items():
        require_type(name, tensor, Tensor, "flash_attn_func returns it with `return_attn_probs=True`.")
    check_dimensions("[batch, seqlen, heads, dim]" if out_a.dim() == 4 else "[tokens, heads, dim]", out_a=out_a)
    *leading, seqlen, heads, _ = out_a.shape
    rows = (*leading, heads, seqlen)
    if out_b.shape != out_a.shape or tuple(lse_a.shape) != rows or tuple(lse_b.shape) != rows:
        found = ", ".join(str(tuple(tensor.shape)) for tensor in (out_a, lse_a, out_b, lse_b))
        raise UsageError(
            "Only two outputs [..., seqlen, heads, dim] of one size, with their log-sum-exps [..., heads, seqlen], "
            f"can be merged, but got {found}. Pass them as flash_attn_func returns them."
        )
