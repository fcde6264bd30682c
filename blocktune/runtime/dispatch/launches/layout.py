"""Where entry points have the dimensions of their tensors."""

from enum import Enum

from torch import Tensor


class Layout(Enum):
    """Where an entry point's tensors have their dimensions. Plans have [batch, heads, length, dim]."""

    HEADS_FIRST = "[batch, heads, length, dim]"
    LENGTH_FIRST = "[batch, length, heads, dim]"
    PACKED = "[tokens, heads, dim]"

    def to_heads_first(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors as plans have them."""
        if self is Layout.HEADS_FIRST:
            return tensors
        if self is Layout.LENGTH_FIRST:
            return tuple([tensor.transpose(1, 2) for tensor in tensors])
        return tuple([tensor.transpose(0, 1).unsqueeze(0) for tensor in tensors])

    def from_heads_first(self, tensor: Tensor) -> Tensor:
        """Return a tensor of a plan as the entry point has it."""
        if self is Layout.HEADS_FIRST:
            return tensor
        return tensor.transpose(1, 2) if self is Layout.LENGTH_FIRST else tensor.squeeze(0).transpose(0, 1)

    def all_from_heads_first(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return tensors of a plan as the entry point has them."""
        return tensors if self is Layout.HEADS_FIRST else tuple([self.from_heads_first(tensor) for tensor in tensors])
