"""Attention over parts of the keys, merged: what ring attention, cascades and shared prefixes are made of."""

import torch
from torch import Tensor

from blocktune.kernels.dispatch.call_checks import check_dimensions
from blocktune.kernels.values.errors import UsageError, require_type


def merge_partial(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention of the same queries over two disjoint sets of keys into attention over both. Differentiable.

    Outputs and log-sum-exps are as `flash_attn_func` and its relatives return them: [batch, seqlen, heads, dim] with
    [batch, heads, seqlen], or packed [tokens, heads, dim] with [heads, tokens]. A row whose log-sum-exp is -inf saw no
    key. The weights are computed in float32, or in float64 of such outputs.

    Returns:
        the output, like out_a, and the log-sum-exp.

    Raises:
        UsageError: the tensors do not fit each other.
        WrongTypeError: an argument is no tensor.
    """
    _check(out_a, lse_a, out_b, lse_b)
    empty = lse_a.isneginf() & lse_b.isneginf()
    a, b = (lse.masked_fill(empty, 0.0) for lse in (lse_a, lse_b))  # -inf minus -inf is no number, nor its gradient
    lse = torch.logaddexp(a, b)
    wide = torch.promote_types(out_a.dtype, torch.float32)
    parts = (out.to(wide) * (own - lse).exp().mT[..., None] for out, own in ((out_a, a), (out_b, b)))
    return sum(parts, start=out_a.new_zeros((), dtype=wide)).to(out_a.dtype), lse.masked_fill(empty, float("-inf"))


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
