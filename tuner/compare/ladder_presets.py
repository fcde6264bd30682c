"""Problems that the ladder is known to teach well, each with the device, the blocks and the kernels that show it.

ladder = climb(preset.shape, device, compiler=farm, preset=preset)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compare.ladder_ideas import V2


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A problem on a device.

    device: its name in the catalogue. blocks: (block_m, block_n, num_warps, num_stages) of the steps that share them.
    kernels: of the steps that take another kernel than usual. teaches: what to look at.
    """

    device: str
    shape: AttentionShape
    blocks: tuple[int, int, int, int]
    kernels: Mapping[str, tuple[str, ...]] = field(hash=False)
    teaches: str


PRESETS = {
    "rtx2070": Preset(
        device="rtx2070",
        shape=AttentionShape(
            batch=10, num_heads=64, num_heads_kv=64, seqlen_q=1024, seqlen_k=1024, head_dim=32, head_dim_v=32,
            dtype="float32",
        ),
        blocks=(32, 32, 4, 1),
        kernels={V2: ("flash_v2",)},
        teaches="v2 moves a small part of v1's bytes and fills the SMs with blocks, yet every load of a key waits for "
        "banks that its neighbours read: rows of 128 bytes begin in the same bank. Transposed keys end that.",
    ),
}  # fmt: skip
"""By name."""
