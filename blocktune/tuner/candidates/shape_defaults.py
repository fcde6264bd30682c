"""The shape that a user means by a sequence length and a head dimension.

The defaults follow the usual benchmark of attention papers: batch * seqlen = 16384 tokens and heads * head_dim = 2048,
bfloat16, not causal, as many key/value heads as query heads. Where there are more keys than queries, as in decoding,
the keys are the tokens: one query over 8192 of them is a batch of 2, not of 16384.
"""

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import ELEMENT_BYTES, SHORT_DTYPES, AttentionShape, Causal

DEFAULT_TOKENS = 16384
"""batch * max(seqlen_q, seqlen_k) of a shape whose batch is not given."""

DEFAULT_WIDTH = 2048
"""num_heads * head_dim of a shape whose heads are not given."""

_DTYPE_NAMES = {name: name for name in ELEMENT_BYTES} | {short: name for name, short in SHORT_DTYPES.items()}


def complete_shape(
    seq: int,
    dim: int,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    seq_k: int | None = None,
    dim_v: int | None = None,
    dtype: str = "bfloat16",
    causal: bool | str | Causal = False,
) -> AttentionShape:
    """Return the shape with every size that was not given filled in.

    Args:
        seq: query rows, and key rows unless `seq_k` is given, which a single query has to have: one that sees itself
            alone does not occur in practice.
        dim: head dimension, and that of the values unless `dim_v` is given.
        batch: default `DEFAULT_TOKENS / max(seq, seq_k)`, at least 1.
        heads: default `DEFAULT_WIDTH / dim`, at least 1 and a multiple of `kv_heads`.
        kv_heads: default `heads`.
        seq_k: key rows.
        dim_v: head dimension of the values.
        dtype: `bfloat16`, `float16`, `float32` or `float8_e4m3fn`, or their short names `bf16`, `fp16`, `fp32`, `fp8`.
        causal: False, True (upper-left, as in PyTorch) or the name of an alignment.

    Raises:
        UsageError: a size is not a positive integer, or heads are not a multiple of kv_heads, or a name is unknown, or
            seq is 1 without seq_k.
    """
    given = {
        "seq": seq,
        "dim": dim,
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "seq_k": seq_k,
        "dim_v": dim_v,
    }
    for name, value in given.items():
        if value is not None and (type(value) is not int or value <= 0):
            raise UsageError(f"`{name} > 0` must hold, but got {name}={value!r:.80}. Give a positive integer.")
    if seq == 1 and seq_k is None:
        raise UsageError(
            "A single query needs `seq_k`, the number of keys that it reads, but got seq=1 alone. "
            "For example: --seq 1 --seq-k 8192."
        )
    keys = seq if seq_k is None else seq_k
    if heads is None:
        heads = _default_heads(dim, kv_heads)
    return AttentionShape(
        batch=batch if batch is not None else max(1, DEFAULT_TOKENS // max(seq, keys)),
        num_heads=heads,
        num_heads_kv=kv_heads if kv_heads is not None else heads,
        seqlen_q=seq,
        seqlen_k=keys,
        head_dim=dim,
        head_dim_v=dim_v if dim_v is not None else dim,
        dtype=_full_dtype(dtype),
        causal=_alignment(causal),
    )


def _default_heads(dim: int, kv_heads: int | None) -> int:
    heads = max(1, DEFAULT_WIDTH // dim)
    return heads if kv_heads is None else max(1, heads // kv_heads) * kv_heads


def _full_dtype(name: str) -> str:
    try:
        return _DTYPE_NAMES[name.lower()]
    except KeyError:
        raise UsageError(f"`dtype` must be one of {', '.join(_DTYPE_NAMES)}, but got {name!r:.80}.") from None


def _alignment(causal: bool | str | Causal) -> Causal:
    if isinstance(causal, bool):
        return Causal.UPPER_LEFT if causal else Causal.NONE
    try:
        return Causal(causal.replace("-", "_"))
    except ValueError:
        raise UsageError(f"`causal` must be one of {', '.join(Causal)}, but got {causal!r:.80}.") from None
