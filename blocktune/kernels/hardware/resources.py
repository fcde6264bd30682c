"""What one compiled config takes from a multiprocessor."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from blocktune.kernels.values.column_kinds import Whole, Word

_INSTRUCTION = Word(32, "[a-z0-9_]{1,32}", "the name of an instruction or `none`")
_SHA256 = Word(64, "([0-9a-f]{64})?", "64 hexadecimal digits or empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """Resources of one compiled config, as the compiler reports them.

    registers: per thread.
    shared_bytes: dynamic shared memory per block, without the system's 1 KiB reserve.
    static_shared_bytes: shared memory fixed at compile time, without the reserve.
    stack_bytes: local memory per thread, spills included.
    spill_bytes: bytes per thread stored by register spills.
    num_warps: warps per block, those of a warp-specialised kernel's partitions included.
    barriers: named barriers.
    tensor_cores: the instruction of the matrix products (`wgmma`, `mma`, `tcgen05`) or `none`.
    code_sha256: hash of the machine code; equal code is measured once.
    """

    registers: Annotated[int, Whole()]
    shared_bytes: Annotated[int, Whole()]
    static_shared_bytes: Annotated[int, Whole()] = 0
    stack_bytes: Annotated[int, Whole()] = 0
    spill_bytes: Annotated[int, Whole()] = 0
    num_warps: Annotated[int, Whole()]
    barriers: Annotated[int, Whole()] = 1
    tensor_cores: Annotated[str, _INSTRUCTION]
    code_sha256: Annotated[str, _SHA256] = ""

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
