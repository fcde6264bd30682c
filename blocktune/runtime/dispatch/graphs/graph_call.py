"""A call as a graph holds it: a text with all that is no tensor and no length.

PyTorch converts every argument of an op on the way to Python, so an op with an argument for every feature costs more
than its launch. One text costs as little as one number, and a graph with it may be stored and loaded elsewhere.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Self

from torch import Tensor

from blocktune.kernels.values.block_mask import BlockMask
from blocktune.runtime.dispatch.autograd import NO_VALUES, CallValues
from blocktune.runtime.dispatch.call import EXTRA_TENSORS, Call

BLOCKS, DRAWN = "blocks", "drawn"
"""The tensor of a block mask, and on the CPU the seed and the offset that dropped pairs are made from."""
TENSORS = (*EXTRA_TENSORS, BLOCKS, DRAWN)
"""What an op may get besides query, key and value, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCall:
    """The part of a call, besides tensors and lengths, that a graph holds.

    dispatcher: the number of the engine that serves it. lse: whether the log-sum-exp is wanted. block_sizes: queries
    and keys of a block of the block mask. tensors: which of `TENSORS` come with it. The others are arguments of
    `Call.of`.
    """

    dispatcher: int
    lse: bool
    causal: str
    scale: float
    window: tuple[int, int]
    softcap: float
    dropout_p: float
    deterministic: bool
    page_size: int
    block_sizes: tuple[int, int]
    num_splits: int
    tensors: tuple[str, ...]

    @property
    def text(self) -> str:
        """All of it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the call that a `text` tells of."""
        values: dict[str, Any] = json.loads(text)
        lists = {name: tuple(value) for name, value in values.items() if type(value) is list}
        return cls(**values | lists)

    def parts(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], CallValues]:
        """Return the tensors of the call's extras, and what else of the tensors is its own."""
        named = self.tensors
        if not named or named[-1] in EXTRA_TENSORS:
            return tensors, NO_VALUES
        by_name = dict(zip(named, tensors, strict=True))
        blocks, drawn = by_name.pop(BLOCKS, None), by_name.pop(DRAWN, None)
        seed, offset = (0, 0) if drawn is None else drawn.tolist()
        return tuple(by_name.values()), (self._block_mask(blocks), seed, offset)

    def _block_mask(self, blocks: Tensor | None) -> BlockMask | None:
        return None if blocks is None else BlockMask(*self.block_sizes, blocks)

    def guarded(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors whose kind decides how the call is served."""
        return tensors[:-1] if DRAWN in self.tensors else tensors

    def call(self, tensors: Sequence[Tensor], lengths: Sequence[int] | None) -> Call:
        """Return the call with these tensors."""
        extras, (block_mask, seed, offset) = self.parts(tensors)
        call = Call.of(
            causal=self.causal,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            dropout_p=self.dropout_p,
            deterministic=self.deterministic,
            page_size=self.page_size,
            block_mask=block_mask,
            lengths=lengths,
            num_splits=self.num_splits,
            **dict(zip(self.tensors, extras, strict=False)),
        )
        return call.with_seed(seed, offset) if DRAWN in self.tensors else call


graph_call = lru_cache(maxsize=4096)(GraphCall.from_text)
"""`GraphCall.from_text`, once for every text."""
