"""A call's arguments besides query, key and value, and the key of its plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.features import NO_FEATURES, UNLIMITED, Features, MaskKind, canonical
from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.kernels.values.short_numbers import CACHE_TYPES
from blocktune.runtime.dispatch.launches.kinds import (
    ALIGNMENT_BYTES,
    extra_kind,
    packed_kind,
    rounds_products,
    tensors_kind,
    tokens_kind,
)
from blocktune.runtime.dispatch.obstacles import DTYPE_NAMES, is_short_cache, layout_obstacle, tensor_obstacle

EXTRA_TENSORS = (
    "mask",
    "alibi_slopes",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "cache_seqlens",
    "block_table",
    "tree_mask",
    "scale_q",
    "scale_k",
    "scale_v",
    "sinks",
)
"""The extras that are tensors."""

LARGEST_SOFTCAP = 1e30
"""Its inverse is a normal number of float32."""

LONG = 1 << 20
"""Up to here `max_seqlen` is taken as it is, also with fewer tokens: callers give one for all calls of a model, and
capture them in CUDA graphs after the first."""

_NO_TENSORS = (None,) * len(EXTRA_TENSORS)


class PlanUse(NamedTuple):
    """How a call uses the plan for one direction.

    sums: a forward leaves the log-sum-exp. competes: PyTorch's kernel may serve the calls as well.
    """

    sums: bool
    competes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of attention without its query [batch, num_heads, seqlen_q, head_dim], key and value.

    lengths: (batch, longest seqlen_q, longest seqlen_k) where the tensors do not say them: packed sequences, caches.
    num_splits: a power of two takes a config with this number of splits that does not depend on the batch; 0 takes the
    best one.
    """

    causal: Causal
    scale: float
    features: Features = NO_FEATURES
    extras: Extras = NO_EXTRAS
    lengths: tuple[int, int, int] | None = None
    num_splits: int = 0

    @classmethod
    def of(
        cls,
        *,
        causal: str,
        scale: float,
        window: Sequence[int] = (UNLIMITED, UNLIMITED),
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        deterministic: bool = False,
        page_size: int = 0,
        block_mask: BlockMask | None = None,
        lengths: Sequence[int] | None = None,
        num_splits: int = 0,
        **tensors: Tensor | None,
    ) -> Self:
        """Return the call with these arguments; which features it has follows from them.

        Args:
            tensors: those of `EXTRA_TENSORS`.

        Raises:
            UsageError: a window reaches from nowhere.
        """
        left, right = window
        softcap = min(softcap, LARGEST_SOFTCAP)
        features = Features(
            window=(left, right),
            mask=_mask_kind(tensors.get("mask"), block_mask, tensors.get("tree_mask")),
            softcap=softcap != 0.0,
            alibi=tensors.get("alibi_slopes") is not None,
            dropout=dropout_p != 0.0,
            varlen=tensors.get("cu_seqlens_q") is not None,
            cached=tensors.get("cache_seqlens") is not None,
            page_size=page_size,
            deterministic=bool(deterministic),
        )
        given: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if softcap or dropout_p or block_mask is not None:
            given |= {"softcap": softcap, "dropout_p": dropout_p, "block_mask": block_mask}
        extras = Extras(**given) if given else NO_EXTRAS
        if lengths is not None:
            batch, seqlen_q, seqlen_k = lengths
            lengths = batch, seqlen_q, seqlen_k
        return cls(
            causal=Causal(causal), scale=scale, features=features, extras=extras, lengths=lengths, num_splits=num_splits
        )

    def over(self, query: Tensor, key: Tensor) -> Self:
        """Return the call in the form that all spellings of it over these tensors share: one plan, one tuning shape.

        Compiled graphs ask for it when they run, since it depends on sizes.
        """
        features, lengths = self.features, self.lengths
        if self.causal is not Causal.LOWER_RIGHT and features.window is None and not features.varlen:
            return self
        if lengths is not None and features.varlen:
            batch, *longest = lengths
            longest_q, longest_k = longest
            longest_q = _no_longer(longest_q, query.shape[2])
            if not features.cached:  # the capacity of the cache
                longest_k = _no_longer(longest_k, key.shape[2])
            lengths = batch, longest_q, longest_k
        _, seqlen_q, seqlen_k = lengths or (0, query.shape[2], key.shape[2])
        varies = features.varlen or features.cached
        causal, window = canonical(self.causal, features.window, seqlen_q, seqlen_k, varies=varies)
        if (causal, window, lengths) == (self.causal, features.window, self.lengths):
            return self
        return replace(self, causal=causal, features=replace(features, window=window), lengths=lengths)

    def features_of(self, direction: Direction) -> Features:
        """Return the features of one direction. Only a backward can be deterministic or not: every forward is."""
        if direction is Direction.FORWARD and self.features.deterministic:
            return replace(self.features, deterministic=False)
        return self.features

    def shape(self, query: Tensor, key: Tensor, value: Tensor, direction: Direction) -> AttentionShape:
        """Return the attention problem of tensors without an `obstacle`. Packed sequences count as the longest of them.

        Raises:
            UsageError: a size is invalid for attention.
        """
        features = self._features_over(query, key, direction)
        batch, seqlen_q, seqlen_k = self.lengths or (query.shape[0], query.shape[2], key.shape[2])
        return AttentionShape(
            batch=batch,
            num_heads=query.shape[1],
            num_heads_kv=key.shape[1],
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=query.shape[3],
            head_dim_v=value.shape[3],
            dtype=DTYPE_NAMES[query.dtype],
            causal=self.causal,
            direction=direction,
            features=features,
        )

    def _features_over(self, query: Tensor, key: Tensor, direction: Direction) -> Features:
        """Return the features of one direction over keys of this type."""
        features = self.features_of(direction)
        if not features.cached or not is_short_cache(query, key):
            return features
        scale = self.extras.scale_k
        return replace(features, kv=CACHE_TYPES[key.dtype], token_scales=scale is not None and scale.dim() == 3)

    def kind(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
        """Return all that a plan depends on besides lengths and direction.

        The values in tensors are no part of it, and of packed sequences hardly how many tokens there are.
        """
        if self.features.varlen:
            own: Any = *(packed_kind(tensor) for tensor in (query, key, value)), rounds_products(query)
            own = *own, tokens_kind(query.shape[2], query.shape[1])
            if self.features.cached:
                own = *own, key.shape[:3], value.shape[:3]
        else:
            own = tensors_kind(query, key, value)
        if self.extras is NO_EXTRAS:
            return own, self.causal, self.features
        kinds = tuple(
            (name, *extra_kind(tensor))
            for name, tensor in zip(EXTRA_TENSORS, self.tensors, strict=True)
            if tensor is not None
        )
        return own, self.causal, self.features, self.block_sizes, self.num_splits, kinds

    def plan_key(
        self, query: Tensor, key: Tensor, value: Tensor, direction: Direction, use: PlanUse
    ) -> tuple[Any, ...]:
        """Return the key of the plan."""
        return direction, use, self.lengths, self.kind(query, key, value)

    @property
    def block_sizes(self) -> tuple[int, int] | None:
        """Queries and keys of a block of the block mask, if there is one: not all tiles divide all of them."""
        mask = self.extras.block_mask
        return None if mask is None else (mask.block_q, mask.block_k)

    def obstacle(self, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        """Return why tensors of this kind go to PyTorch; or None. Everything checked here is in the plan's key."""
        if self.features.cached:  # pages are no batch entries: the entry point has compared the sizes
            problem = tensor_obstacle(query, key, value, cached=True)
        else:
            problem = layout_obstacle(query, key, value, True)
        if problem is None and 0 in (self.lengths or ()):
            return "a length is 0"
        for name, tensor in zip(EXTRA_TENSORS, self.tensors, strict=True):
            if problem is None and tensor is not None and tensor.device != query.device:
                return f"{name} is on {tensor.device}, but query on {query.device}"
        return problem

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The extras that are tensors, in the order of `EXTRA_TENSORS`."""
        extras = self.extras
        return _NO_TENSORS if extras is NO_EXTRAS else tuple(getattr(extras, name) for name in EXTRA_TENSORS)

    def with_seed(self, seed: int, offset: int) -> Self:
        """Return the call with the number that its dropped pairs are made from."""
        return replace(self, extras=replace(self.extras, seed=seed, offset=offset))

    def blank(self) -> Self:
        """Return the call with zeros in the tensors that say which memory its kernels access, laid out as they are."""
        extras = {
            name: _zeros_laid_out_as(tensor)
            for name in ("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "block_table", "tree_mask")
            if (tensor := getattr(self.extras, name)) is not None
        }
        blocks: BlockMask | None = self.extras.block_mask
        if blocks is not None:
            blocks = replace(blocks, mask=torch.zeros_like(blocks.mask))
        return replace(self, extras=replace(self.extras, **extras, block_mask=blocks))


def _zeros_laid_out_as(tensor: Tensor) -> Tensor:
    """Return zeros with the sizes, strides and alignment of a tensor."""
    begin = tensor.data_ptr() % ALIGNMENT_BYTES // tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.zeros(begin + last + 1, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), begin)


def _no_longer(longest: int, tokens: int) -> int:
    """Return the length of the longest packed sequence. One that only stands for no bound becomes the next power of two
    after all tokens: a plan for every number of tokens would be too many."""
    return longest if longest <= LONG else min(longest, 1 << max(tokens - 1, 0).bit_length())


def _mask_kind(mask: Tensor | None, block_mask: BlockMask | None, tree: Tensor | None) -> MaskKind:
    if block_mask is not None:
        return MaskKind.BLOCK_SPARSE
    if tree is not None:
        return MaskKind.TREE
    if mask is None:
        return MaskKind.NONE
    return MaskKind.ADDITIVE if mask.is_floating_point() else MaskKind.BOOLEAN
