"""Batches of serving engines: prompts and single tokens together, over keys that lie in pages.

Sequences of one query are decoded, and longer ones take forward kernels, whatever else is in the batch: with
`num_splits` the result of a sequence is then equal to the bit in every batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import UNLIMITED
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.api.cache.paged_sequences import check_pages, over_pages
from blocktune.runtime.api.cache.rows import CacheRows
from blocktune.runtime.api.flash_arguments import splits_of, window_of
from blocktune.runtime.dispatch.call_checks import check_sinks
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.engine import NotServedError
from blocktune.runtime.dispatch.launches.layout import Layout


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Sequences of packed queries, and the pages of their keys.

    begins: int32 [sequences + 1], where the queries of each sequence begin. lengths: int32 [sequences], how many keys
    each has, those of its queries included. table: int32 [sequences, max_pages]. longest: no sequence has more queries.
    singles: how many sequences at the beginning have one query each.
    """

    begins: Tensor
    lengths: Tensor
    table: Tensor
    longest: int
    singles: int = 0

    def __post_init__(self) -> None:
        count = self.lengths.shape[0]
        for name, sizes in (
            ("begins", (count + 1,)),
            ("lengths", (count,)),
            ("table", (count, *self.table.shape[1:2])),
        ):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype is not torch.int32 or tensor.shape != sizes:
                raise UsageError(
                    f"`{name}` must be int32 {list(sizes)} for {count} lengths, but got {tensor.dtype} "
                    f"{list(tensor.shape)}. Pass one entry for each sequence."
                )
        if not 0 <= self.singles <= self.lengths.shape[0]:
            raise UsageError(
                f"`0 <= singles <= {self.lengths.shape[0]}` must hold, but got {self.singles}. Count the sequences of "
                "one query at the beginning of the batch."
            )


@dataclass(frozen=True, slots=True)
class BatchAttention:
    """Attention of a layer over paged batches, causal from the last key of each sequence.

    window: keys before and after a query's own, -1 for no bound. sinks: one logit for each head. num_splits: 0 takes
    the tuned configs; 1 to 128, rounded up to a power of two, fixes them and the parts of the keys of single queries.
    dispatcher: whose configs serve the calls.
    """

    scale: float
    causal: bool = True
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    softcap: float = 0.0
    sinks: Tensor | None = None
    num_splits: int = 0
    dispatcher: Dispatcher = attention

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_splits", splits_of(self.num_splits))

    def write(self, out: Tensor, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch) -> bool:
        """Write the output [tokens, num_heads, head_dim_v] of q [tokens, num_heads, head_dim], and return whether our
        kernels served the batch; if not, the caller computes it. Inference only.

        Args:
            k_pages, v_pages: [pages, page_size, num_heads_kv, head_dim(_v)], with any strides between rows.

        Raises:
            UsageError: the tensors do not fit each other.
        """
        count = batch.singles
        try:
            if count:
                own = batch.lengths[:count], batch.table[:count]
                out[:count] = self._singles(q[:count], k_pages, v_pages, *own)
            if count < batch.lengths.shape[0]:
                out[count:] = self._longer(q[count:], k_pages, v_pages, batch)
        except NotServedError:
            return False
        return True

    def _singles(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """Return the output of one query for each sequence [sequences, num_heads, head_dim].

        Raises:
            NotServedError: no kernel of ours serves it.
        """
        q = q.unsqueeze(1)
        sinks = check_sinks(self.sinks, q.shape[2], q)
        way = ("BatchAttention", self.scale, self.causal, self.window, self.softcap, self.num_splits)
        tensors = (q, k_pages, v_pages, lengths, table, sinks)
        bound = self.dispatcher.find_call(way, *tensors)
        if bound is not None:
            return bound(*(tensor for tensor in tensors if tensor is not None))[0].squeeze(1)
        rows = CacheRows.of(lengths, None, None, table)
        keys, values, pages = rows.as_pages(k_pages, v_pages)
        query, keys, values = (tensor.transpose(1, 2) for tensor in (q, keys, values))
        places: dict[str, Any] = {"cache_seqlens": lengths, "block_table": pages, "page_size": keys.shape[2]}
        places["lengths"] = (q.shape[0], 1, rows.capacity(k_pages))
        remember = None
        if pages is table:
            remember = lambda fast_path, bound: fast_path.add(way, tensors, bound.with_layout(Layout.LENGTH_FIRST))  # noqa: E731
        asked = self._asked(sinks) | places | {"num_splits": self.num_splits}
        out, _ = self.dispatcher.attend(query, keys, values, remember=remember, **asked)
        return out.transpose(1, 2).squeeze(1)

    def _longer(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch) -> Tensor:
        """Return the output of the queries after those of single sequences.

        Raises:
            NotServedError: no kernel of ours serves it.
        """
        begins, lengths, table = batch.begins, batch.lengths, batch.table
        if batch.singles:
            begins = begins[batch.singles :] - batch.singles
            lengths, table = lengths[batch.singles :], table[batch.singles :]
        # a plan for every length of a chunk would be too many, and one query alone is another call: no mask
        longest = 1 << max(batch.longest - 1, 1).bit_length()
        sinks = check_sinks(self.sinks, q.shape[1], q)
        asked = self._asked(sinks) | {"cu_seqlens_q": begins, "num_splits": min(self.num_splits, 1)}
        check_pages(q.transpose(0, 1)[None], k_pages, v_pages, table, lengths, self.dispatcher)
        out, _ = over_pages(q, k_pages, v_pages, table, lengths, longest, asked, lse=False, dispatcher=self.dispatcher)
        return out

    def _asked(self, sinks: Tensor | None) -> dict[str, Any]:
        return {
            "causal": Causal.LOWER_RIGHT if self.causal else Causal.NONE,
            "scale": self.scale,
            "window": window_of(self.window),
            "softcap": self.softcap,
            "sinks": sinks,
            "only_ours": True,
        }
