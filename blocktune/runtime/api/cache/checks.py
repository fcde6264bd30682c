"""Whether a query and the caches of a call fit each other."""

from collections.abc import Sequence

from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.api.cache.descales import Descales
from blocktune.runtime.dispatch.call_checks import check_fit, check_sizes
from blocktune.runtime.dispatch.obstacles import needs_gradients


def check_cache(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor | None,
    descales: Descales | None = None,
    others: Sequence[Tensor | None] = (),
) -> None:
    """Check query [batch, num_heads, seqlen_q, head_dim] and the caches as `flash_attn_with_kvcache` takes them.

    others: the call's other tensors of floating-point numbers.

    Raises:
        UsageError: they do not fit each other, a block table is invalid, or a gradient is needed.
    """
    if needs_gradients(query, k_cache, v_cache, *others):
        raise UsageError(
            "Attention over a cache computes no gradients, but a tensor requires one. Call it under torch.no_grad(), "
            "or another entry point."
        )
    caches = [cache.transpose(1, 2) for cache in (k_cache, v_cache)]
    if table is not None:
        caches = [cache[:1].expand(query.shape[0], -1, -1, -1) for cache in caches]
    if descales is None:
        check_sizes(query, *caches, names="queries and caches")
    else:
        descales.check(query, *caches)
        check_fit(query, *caches, names="queries and caches")
