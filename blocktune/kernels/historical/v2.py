"""FlashAttention-2 forward as a textbook has it: one loop over the keys, and nothing that a library adds.

`flash_fwd` computes the same, and once more, exactly, the rows whose scores are too large for the first way. That
second loop rarely runs, but its registers are the block's: on compute capability 7.5, where operands of products are
held in registers, 196 a thread instead of 80 at blocks of 32, which is 2 resident blocks instead of 5. A preset of the
ladder shows what the algorithm itself does, so it takes this kernel, which is the padded one without its padding.
"""

from collections.abc import Mapping
from typing import ClassVar

from blocktune.kernels.base.kernel import MAX_HEAD_DIM
from blocktune.kernels.historical.padded import FlashForwardPadded
from blocktune.kernels.values.shape import AttentionShape


class FlashV2(FlashForwardPadded):
    """FlashAttention-2 without padding, in order."""

    name = "flash_v2"
    ladder_steps = ()
    largest_head_dim = MAX_HEAD_DIM
    parameters: ClassVar[Mapping[str, tuple[int, ...]]] = {
        **FlashForwardPadded.parameters,
        "block_m": (32, 64, 128),
    }

    def multiplied(self, shape: AttentionShape) -> AttentionShape:
        """Return the shape itself: tiles are as wide as its rows, up to a power of two."""
        return shape
