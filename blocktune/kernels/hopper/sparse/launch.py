"""A launch of the Hopper backward under a block mask."""

from dataclasses import dataclass
from typing import Any

from blocktune.kernels.hopper.backward.launch import BackwardLaunch
from blocktune.kernels.hopper.sparse.lists import list_strides, walk_lists
from blocktune.kernels.portable.forward.sparse import fitting_mask
from blocktune.kernels.values.feature_tensors import Extras


@dataclass(frozen=True, slots=True)
class HopperSparseBackwardLaunch(BackwardLaunch):
    """What `bind` returns: a `BackwardLaunch` with a `BlockMask` among the extras."""

    def listed(self, extras: Extras, query: Any) -> tuple[Any, ...]:
        """Return the lists that the kernel walks, and their strides.

        Raises:
            UsageError: the block mask is missing, belongs to another shape, or has blocks that tiles do not make up.
        """
        mask = fitting_mask(extras, self.shape, query)
        lists = walk_lists(mask, self.shape)
        return lists, *list_strides(mask, lists)
