"""Evidence of why the winner of an autotuned kernel takes its time: its tensors, bank conflicts, instructions and
spills."""

from dataclasses import dataclass
from typing import Any

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.runtime.autotuned.call import LaunchSize
from blocktune.runtime.autotuned.config import LaunchProblem
from blocktune.tuner.compile.compiler import compiled_code
from blocktune.tuner.cost.text import bank_conflict_text
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses, shared_accesses
from blocktune.tuner.profile.instruction_mix import InstructionMix, mix_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEvidence:
    """Facts of a launch and its code. tensor_bytes: of all its tensors; None where they are not known. least_us: what
    the device takes to move these once; None where its rates are not known."""

    mix: InstructionMix
    shared: SharedAccesses
    tensor_cores: str
    tensor_bytes: int | None
    least_us: float | None

    @classmethod
    def of(cls, spec: CompileSpec, problem: LaunchProblem, device: DeviceSpec, tensor_cores: str) -> "LaunchEvidence":
        """Read compiled code, which is in Triton's cache or made here, and the size of a stored launch."""
        compiled, size = compiled_code(spec, device.limits.cc), LaunchSize.stored(problem)
        tensor_bytes = None if size is None else size.tensor_bytes
        rate = device.memory_gbs
        return cls(
            mix=mix_of(spec, device.limits.cc),
            shared=shared_accesses(compiled.asm["ptx"]),
            tensor_cores=tensor_cores,
            tensor_bytes=tensor_bytes,
            least_us=None if tensor_bytes is None or rate is None else tensor_bytes / rate / 1e3,
        )

    def words(self, time_us: float | None) -> str:
        """Return the roofline of a measured time and the conflicts of banks."""
        lines = [bank_conflict_text(self.shared, self.tensor_cores)]
        if self.least_us is not None:
            share = f", {self.least_us / time_us:.0%} of the measured time" if time_us else ""
            lines.insert(
                0,
                f"Its tensors hold {self.tensor_bytes:,} bytes. To move them once takes {self.least_us:.1f} us at the "
                f"device's rate{share}.",
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "instructions": self.mix.to_json(),
            "shared_accesses": self.shared.report(),
            "tensor_bytes": self.tensor_bytes,
            "least_us": self.least_us,
        }
