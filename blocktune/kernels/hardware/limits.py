"""What one multiprocessor (SM) of each compute capability can hold.

The table covers compute capability 7.0 to 12.1. Its numbers come from the CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability" (warps, shared memory, opt-in, reserve), from NVIDIA/cccl `arch_traits.h` (the
same, and 7.0, 8.7, 8.8, 12.1; they agree wherever both have a row), and from the behaviour of NVIDIA's
`cuda_occupancy.h` (blocks per SM, allocation units, carve-outs, sub-partitions, barriers), with which
`tests/tuner/occupancy/test_occupancy_differential.py` compares it. The opt-in of 7.2 is from memory.

Never mix "per SM" with "per block, opted in": the first is larger by the reserve.
"""

import re
from dataclasses import dataclass
from typing import Literal

from blocktune.kernels.values.errors import UnknownDeviceError, UsageError

KIB = 1024
WARP_SIZE = 32
MAX_THREADS_PER_BLOCK = 1024
MAX_REGISTERS_PER_THREAD = 255  # the compiler's bound; the launch check lets 256 pass
REGISTER_UNIT = 256  # registers are handed to a warp in units of this many
MULTIPROCESSORS = 132
"""Of a large GPU (H100, H200), which defaults are to fill: they know the compute capability and not the device."""

MatrixUnit = Literal["none", "mma", "wgmma", "tcgen05"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeLimits:
    """The limits of one compute capability.

    registers_per_sm and registers_per_block count 32-bit registers. shared_per_sm_bytes is what all blocks share, the
    reserve included; shared_per_block_optin_bytes is the most that one block can ask for, without the reserve.
    shared_reserved_bytes is taken by the system for every block, and shared_unit_bytes is the allocation unit.
    sub_partitions: schedulers of an SM, each with its own share of the registers. carveouts_kib: the shared-memory
    sizes that an SM can be set to; the rest is L1 cache. barriers_per_sm is None where barriers never limit.
    tensor_memory_columns is 0 where there is no tensor memory. exp_per_clock: exponentials an SM computes per clock.
    """

    cc: tuple[int, int]
    max_warps_per_sm: int
    max_blocks_per_sm: int
    shared_per_sm_bytes: int
    shared_per_block_optin_bytes: int
    shared_reserved_bytes: int
    shared_unit_bytes: int
    carveouts_kib: tuple[int, ...]
    registers_per_sm: int = 64 * KIB
    registers_per_block: int = 64 * KIB
    sub_partitions: int = 4
    barriers_per_sm: int | None = None
    tensor_memory_columns: int = 0
    exp_per_clock: int = 16

    @property
    def name(self) -> str:
        """The compute capability as people write it, such as `9.0`."""
        return f"{self.cc[0]}.{self.cc[1]}"

    @property
    def sm_arch(self) -> int:
        """The number in `sm_90`, as the compiler's target wants it."""
        return 10 * self.cc[0] + self.cc[1]

    @property
    def mma(self) -> MatrixUnit:
        """The instruction of matrix products that Triton uses here; below 8.0 it falls back to plain arithmetic."""
        if self.cc < (8, 0):
            return "none"
        if self.cc[0] == 9:
            return "wgmma"
        return "tcgen05" if self.cc[0] in (10, 11) else "mma"

    @property
    def multiply_adds_per_clock(self) -> int:
        """Float32 multiply-adds an SM issues a clock: 64 on Volta, Turing and the A100, 128 on all others."""
        return 64 if self.cc <= (8, 0) else 128


_VOLTA_CARVEOUTS = (0, 8, 16, 32, 64, 96)
_SMALL_CARVEOUTS = (0, 8, 16, 32, 64, 100)
_AMPERE_CARVEOUTS = (0, 8, 16, 32, 64, 100, 132, 164)
_HOPPER_CARVEOUTS = (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)


def _before_ampere(
    cc: tuple[int, int], warps: int, blocks: int, shared_kib: int, carveouts: tuple[int, ...]
) -> ComputeLimits:
    """Return the limits of Volta and Turing: no reserve, so one block can have all the shared memory."""
    return ComputeLimits(
        cc=cc,
        max_warps_per_sm=warps,
        max_blocks_per_sm=blocks,
        shared_per_sm_bytes=shared_kib * KIB,
        shared_per_block_optin_bytes=shared_kib * KIB,
        shared_reserved_bytes=0,
        shared_unit_bytes=256,
        carveouts_kib=carveouts,
    )


def _since_ampere(
    cc: tuple[int, int],
    warps: int,
    blocks: int,
    carveouts: tuple[int, ...],
    *,
    barriers: int | None = None,
    tensor_memory_columns: int = 0,
    exp_per_clock: int = 16,
) -> ComputeLimits:
    """Return the limits of Ampere and later: 1 KiB of shared memory is reserved for every block."""
    return ComputeLimits(
        cc=cc,
        max_warps_per_sm=warps,
        max_blocks_per_sm=blocks,
        shared_per_sm_bytes=carveouts[-1] * KIB,
        shared_per_block_optin_bytes=(carveouts[-1] - 1) * KIB,
        shared_reserved_bytes=KIB,
        shared_unit_bytes=128,
        carveouts_kib=carveouts,
        barriers_per_sm=barriers,
        tensor_memory_columns=tensor_memory_columns,
        exp_per_clock=exp_per_clock,
    )


_TABLE: dict[tuple[int, int], ComputeLimits] = {
    row.cc: row
    for row in (
        _before_ampere((7, 0), 64, 32, 96, _VOLTA_CARVEOUTS),  # V100
        _before_ampere((7, 2), 64, 32, 96, _VOLTA_CARVEOUTS),  # Xavier
        _before_ampere((7, 5), 32, 16, 64, (32, 64)),  # T4, RTX 20
        _since_ampere((8, 0), 64, 32, _AMPERE_CARVEOUTS),  # A100, A30
        _since_ampere((8, 6), 48, 16, _SMALL_CARVEOUTS),  # RTX 30, A10, A40
        _since_ampere((8, 7), 48, 16, _AMPERE_CARVEOUTS),  # Orin
        _since_ampere((8, 8), 48, 16, _SMALL_CARVEOUTS),  # new in CUDA 13
        _since_ampere((8, 9), 48, 24, _SMALL_CARVEOUTS),  # RTX 40, L4, L40S
        _since_ampere((9, 0), 64, 32, _HOPPER_CARVEOUTS, barriers=64),  # H100, H200, GH200
        _since_ampere((10, 0), 64, 32, _HOPPER_CARVEOUTS, barriers=64, tensor_memory_columns=512),  # B200, GB200
        # B300 and GB300 double the rate of exponentials.
        _since_ampere((10, 3), 64, 32, _HOPPER_CARVEOUTS, barriers=64, tensor_memory_columns=512, exp_per_clock=32),
        _since_ampere((11, 0), 48, 24, _HOPPER_CARVEOUTS, barriers=24, tensor_memory_columns=512),  # Thor
        _since_ampere((12, 0), 48, 24, _SMALL_CARVEOUTS, barriers=24),  # RTX 50, RTX PRO Blackwell
        _since_ampere((12, 1), 48, 24, _SMALL_CARVEOUTS, barriers=24),  # GB10
    )
}
_ALIASES = {(10, 1): (11, 0)}  # CUDA 12 calls Thor 10.1, CUDA 13 calls it 11.0


def known_ccs() -> tuple[tuple[int, int], ...]:
    """Return the compute capabilities of the table, ascending."""
    return tuple(sorted(_TABLE))


def limits_for(cc: tuple[int, int]) -> ComputeLimits:
    """Return the limits of a compute capability; (10, 1) is the old name of (11, 0).

    Raises:
        UnknownDeviceError: the table has no such row. A neighbour's row would be a guess.
    """
    try:
        return _TABLE[_ALIASES.get(cc, cc)]
    except KeyError:
        known = ", ".join(f"{major}.{minor}" for major, minor in known_ccs())
        raise UnknownDeviceError(
            f"The compute capability must be one of {known}, but got {cc[0]}.{cc[1]}. "
            "Add a row to kernels/hardware/limits.py if your GPU is newer than this table."
        ) from None


def parse_cc(text: str) -> tuple[int, int]:
    """Return the compute capability in `9.0`, `9`, `90` or `sm_90a`. Whether the table holds it is the question of
    `limits_for`.

    Raises:
        UsageError: the text has none of these forms.
    """
    short = text.strip().lower()
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)[af]?", f"{short}.0" if re.fullmatch(r"\d", short) else short)
    if match is None:
        raise UsageError(f"A compute capability must be written as 9.0, 90 or sm_90, but got {text!r}.")
    return int(match[1]), int(match[2])
