"""The arguments of an op: its tensors, and the numbers besides them."""

from typing import NamedTuple

from torch import Tensor

from blocktune.kernels.values.features import MAX_SIZE, UNLIMITED, bounded_side
from blocktune.kernels.values.shape import Causal

PLAIN, PACKED, LENGTH_FIRST = "[batch, heads, length, dim]", "[tokens, heads, dim]", "[batch, length, heads, dim]"
"""Layouts of an op's tensors, as `Layout` names them."""


class OpCall(NamedTuple):
    """A call's numbers, all of them constants: they are a part of the key of the fast path.

    layout: of query, key, value and output. causal: a value of `Causal`. scale: None is 1 / sqrt(head_dim). sums:
    whether the log-sum-exp is wanted. longest: the lengths of the longest packed sequences. num_splits: 1 makes a
    sequence's result independent of the batch.
    """

    layout: str
    causal: str
    scale: float | None
    sums: bool = True
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    longest: tuple[int, int] | None = None
    num_splits: int = 0


class OpTensors(NamedTuple):
    """The call's tensors that decide what serves it, in the op's layout.

    begins_q, begins_k: where packed sequences of queries and of keys begin, int32 [sequences + 1].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    begins_q: Tensor | None = None
    begins_k: Tensor | None = None

    @property
    def extras(self) -> tuple[Tensor, ...]:
        """The tensors besides query, key and value, as a `KernelCall` takes them."""
        return tuple(tensor for tensor in self[3:] if tensor is not None)


def upper_left(is_causal: bool) -> str:
    """Return the diagonal of scaled_dot_product_attention, which cuDNN has."""
    return Causal.UPPER_LEFT.value if is_causal else Causal.NONE.value


def lower_right(is_causal: bool) -> str:
    """Return the diagonal of FlashAttention."""
    return Causal.LOWER_RIGHT.value if is_causal else Causal.NONE.value


def bounded_window(left: int | None, right: int | None) -> tuple[int, int]:
    """Return a window as calls have it; a side that is not given or negative has no bound."""
    first, second = (UNLIMITED if side is None or side < 0 else bounded_side(side) for side in (left, right))
    return first, second


def longest_of(max_q: int, max_k: int) -> tuple[int, int]:
    """Return the lengths of the longest sequences, none of which is longer than `MAX_SIZE`."""
    return min(max_q, MAX_SIZE), min(max_k, MAX_SIZE)


def splits(asked: int | None) -> int:
    """Return the splits that a plan is looked up with: a number promises results that do not depend on the batch, and
    packed keys are not split."""
    return 0 if asked is None else 1
