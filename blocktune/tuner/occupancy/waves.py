"""How often the blocks of a grid fill the GPU."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """How often a grid fills the GPU. Below one wave the occupancy is not reached, whatever the limits allow."""

    grid_blocks: int
    resident_blocks: int  # on all SMs together

    @property
    def count(self) -> float:
        return self.grid_blocks / self.resident_blocks

    @property
    def efficiency(self) -> float:
        """The mean fill of the waves, 1.0 if the last one is full."""
        return self.count / -(-self.grid_blocks // self.resident_blocks)
