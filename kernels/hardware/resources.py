"""What one compiled config takes from a multiprocessor."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """Resources of one compiled config, as the compiler reports them.

    registers: registers a thread. shared_bytes: dynamic shared memory a block, without the system's 1 KiB reserve.
    static_shared_bytes: shared memory fixed at compile time, without the reserve. stack_bytes: local memory a thread,
    spills included. spill_bytes: bytes a thread stored by register spills. num_warps: warps a block, those of a
    warp-specialised kernel's partitions included. barriers: named barriers. tensor_cores: the instruction of the matrix
    products (`wgmma`, `mma`, `tcgen05`) or `none`. code_sha256: hash of the machine code; equal code is measured once.
    """

    registers: int
    shared_bytes: int
    static_shared_bytes: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0
    num_warps: int
    barriers: int = 1
    tensor_cores: str
    code_sha256: str = ""

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
