"""The tiles of a FlashAttention-2 forward that take shared memory."""

from dataclasses import dataclass

from blocktune.kernels.hardware.limits import MatrixUnit
from blocktune.kernels.layouts.register_layouts import WARP_LANES

FLOAT32_BYTES = 4
VECTOR_BYTES = 16
KNOWN_ALIGNMENT = 16
"""What Triton specialises integers by: 16-bit rows of another number of elements are copied when they are needed."""
BARRIER_BYTES = 8
LEAST_COPY_BYTES = 4
"""That a thread copies asynchronously."""
ROWS_PER_WARP, GROUP_WARPS = 16, 4
TENSOR_MEMORY_ROWS = 128
TILE_ALIGNMENT_BYTES = 1024
"""Of a tile that `tcgen05` reads: what lies in front of it may be smaller."""
PRODUCTS_BARRIERS_BYTES, LOCAL_BARRIERS_BYTES = 32, 24
"""Of the products of `tcgen05` in a loop of several stages, and in one that copies nothing ahead."""
FACTOR_BYTES = 512
"""In such a loop, of the rows' factors on their way between 8 warps."""
EXCHANGED_AT_ONCE_BYTES = 4096
"""Of P, between the same warps."""


@dataclass(frozen=True, slots=True)
class ForwardTiles:
    """The tiles of a config.

    num_stages: of the loads of K and V; ahead: whether the next scores are computed ahead of a product with V.
    barrier_bytes: of the loads by the copy engine.
    k_aligned, v_aligned: whether Triton knows that rows begin at multiples of 16 elements. Of 16-bit types it copies
        no others ahead.
    mask_element_bytes: of a mask tensor's tiles, whose rows are aligned; 0 without one.
    mask_checked: whether a loop checks them for the end of the keys, which fills no buffers with them.
    dropout: whether pairs of queries and keys are dropped.
    one_product: whether a float32 product is one of TF32 numbers: `tcgen05` reads it from shared memory.
    keys_whole: whether K is in shared memory as a whole before `mma` multiplies it: the copy engine leaves it there,
        and so is it turned round in advance.
    """

    block_m: int
    block_n: int
    width: int
    width_v: int
    element_bytes: int
    num_warps: int
    num_stages: int
    unit: MatrixUnit
    cc: tuple[int, int]
    ahead: bool = False
    barrier_bytes: int = 0
    k_aligned: bool = True
    v_aligned: bool = True
    keys_whole: bool = False
    mask_element_bytes: int = 0
    mask_checked: bool = False
    dropout: bool = False
    one_product: bool = False

    @property
    def q_bytes(self) -> int:
        return self.block_m * self.width * self.element_bytes

    @property
    def k_bytes(self) -> int:
        return self.block_n * self.width * self.element_bytes

    @property
    def v_bytes(self) -> int:
        return self.block_n * self.width_v * self.element_bytes

    @property
    def p_bytes(self) -> int:
        return self.block_m * self.block_n * self.element_bytes

    @property
    def split(self) -> bool:
        """Whether an operand is two tiles of TF32 numbers."""
        return self.element_bytes == FLOAT32_BYTES

    @property
    def by_columns(self) -> bool:
        """Whether warps of `mma` stand next to each other, so that they exchange P."""
        return self.block_m < self.width_v

    @property
    def shares_rows(self) -> bool:
        """Whether a block has more warps than groups of rows that a warp multiplies."""
        return self.block_m < ROWS_PER_WARP * self.num_warps

    @property
    def k_depth(self) -> int:
        """The tiles of K that loads fill ahead of a product."""
        return self._depth(self.k_bytes, aligned=self.k_aligned)

    @property
    def v_depth(self) -> int:
        """The same of V."""
        return self._depth(self.v_bytes, aligned=self.v_aligned)

    @property
    def mask_buffer_bytes(self) -> int:
        """The tiles of a mask that loads fill ahead: in a loop that checks them those of 4 bytes alone."""
        copied = not self.mask_checked or self.mask_element_bytes == FLOAT32_BYTES
        return (self.num_stages - 1) * self.block_m * self.block_n * self.mask_element_bytes * copied

    def _depth(self, tile_bytes: int, *, aligned: bool) -> int:
        few = tile_bytes < WARP_LANES * self.num_warps * LEAST_COPY_BYTES and self.unit != "wgmma"
        if self.num_stages == 1 or few or not (aligned or self.split):
            return 0
        return self.num_stages - (self.unit == "mma" or self.split)

    def vector(self, *, aligned: bool) -> int:
        """Return the elements that a thread loads at a time; tiles of one size are all loaded as the aligned one is."""
        alike = self.width == self.width_v and (self.k_aligned or self.v_aligned)
        return VECTOR_BYTES // self.element_bytes if aligned or alike else 1
