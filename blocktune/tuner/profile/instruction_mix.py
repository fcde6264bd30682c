"""The instruction mix of a compiled config's loop, and where it reloads spilled registers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.base.kernel import AttentionKernel, CompileSpec
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.compiler import compiled_code
from blocktune.tuner.profile.machine_code import Instruction, disassemble, product_loop

KINDS = {
    "special function": ("MUFU", "I2F", "F2I", "F2F", "FRND"),
    "shared memory": ("LDS", "STS", "LDSM", "STSM", "ATOMS"),
    "spilled registers": ("LDL", "STL"),
    "global memory": ("LDG", "STG", "LD", "ST", "LDGSTS", "RED", "ATOM", "ATOMG", "UTMALDG", "UTMASTG", "UTMAREDG"),
    "floating point": (
        "FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSET", "FSETP", "FCHK", "FADD2", "FMUL2", "FFMA2", "FMNMX3", "F2FP",
        "HADD2", "HMUL2", "HFMA2", "HMNMX2", "HSET2", "HSETP2",
    ),
    "control": (
        "BRA", "BRX", "JMP", "CALL", "RET", "EXIT", "BSSY", "BSYNC", "BREAK", "BAR", "SYNCS", "UCGABAR", "WARPSYNC",
        "WARPGROUP", "WARPGROUPSET", "DEPBAR", "LDGDEPBAR", "ARRIVES", "FENCE", "MEMBAR", "ERRBAR", "CCTL", "ELECT",
        "NANOSLEEP", "YIELD", "NOP", "UTMACMDFLUSH", "UTMACCTL", "UTMAPF", "ACQBULK", "PREEXIT",
    ),
}  # fmt: skip
"""Instructions by kind. Products on tensor cores end in MMA; what is left are integers, addresses and moves."""

TENSOR, INTEGER = "tensor", "integer and moves"
ORDER = (TENSOR, *KINDS, INTEGER)

_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionMix:
    """The instructions that one warp issues.

    loop: by kind, in a round of the loop of the products; empty where nothing loops.
    total: by kind, in the whole code, as it stands there.
    reloads, stores: of spilled registers in that loop, or in the whole code, by source line, the most first.
    """

    loop: dict[str, int]
    total: dict[str, int]
    reloads: tuple[tuple[str, int], ...]
    stores: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, code: Sequence[Instruction]) -> "InstructionMix":
        """Count a listing."""
        loop = product_loop(code)
        return cls(
            loop=_by_kind(loop) if len(loop) < len(code) else {},
            total=_by_kind(code),
            reloads=_by_line(loop, "LDL"),
            stores=_by_line(loop, "STL"),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "loop": self.loop,
            "total": self.total,
            "reloads": [{"line": line, "count": count} for line, count in self.reloads],
            "stores": [{"line": line, "count": count} for line, count in self.stores],
        }


def instruction_mix(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits
) -> InstructionMix:
    """Return the mix of a config's longest launch, compiled here or taken from Triton's cache. Needs no GPU.

    Raises:
        triton.errors.TritonError: the compiler rejects the config.
        RuntimeError: the code cannot be listed.
    """
    return mix_of(kernel.compile_spec(config, shape), limits.cc)


def mix_of(spec: CompileSpec, cc: tuple[int, int]) -> InstructionMix:
    """Return the mix of what a spec compiles to; raises what `instruction_mix` does."""
    from triton import knobs

    return InstructionMix.of(disassemble(compiled_code(spec, cc).asm["cubin"], knobs.nvidia.nvdisasm.path))


def kind_of(instruction: Instruction) -> str:
    """Return which of `ORDER` an instruction is."""
    return TENSOR if instruction.multiplies else _KIND_OF.get(instruction.base, INTEGER)


def _by_kind(code: Sequence[Instruction]) -> dict[str, int]:
    counted = Counter(map(kind_of, code))
    return {kind: counted[kind] for kind in ORDER}


def _by_line(code: Sequence[Instruction], base: str) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(one.line or "unknown line" for one in code if one.base == base).most_common())
