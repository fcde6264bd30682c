"""Facts that a compiled CUDA binary (cubin) holds about itself."""

import hashlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

RESERVED_SHARED_BYTES = 1024
"""From sm_90 on cuobjdump's SHARED holds the system's reserve too; before, it does not, and `ptxas -v` never does."""

_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+)")
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr: name, type, flags, addr, offset, size, link, info, align, entsize
_NO_BITS = 8  # SHT_NOBITS: a section without bytes in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class CubinUsage:
    """Resources that the machine code itself fixes; static_shared_bytes is without the system's reserve."""

    registers: int
    stack_bytes: int
    static_shared_bytes: int


def usage_of(cubin: bytes, sm_arch: int, cuobjdump: str) -> CubinUsage:
    """Return the registers, stack and static shared memory of the one kernel in a cubin.

    Args:
        cubin: the binary.
        sm_arch: the number in `sm_90`.
        cuobjdump: path of NVIDIA's tool; Triton's wheel brings one.

    Raises:
        RuntimeError: the tool failed or reports no kernel.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=False)
    match = _USAGE.search(report.stdout)
    if match is None:
        raise RuntimeError(f"cuobjdump reported no REG, STACK and SHARED: {(report.stdout + report.stderr)[:500]!r}")
    reserve = RESERVED_SHARED_BYTES if sm_arch >= 90 else 0
    return CubinUsage(
        registers=int(match["registers"]),
        stack_bytes=int(match["stack"]),
        static_shared_bytes=max(0, int(match["shared"]) - reserve),
    )


def code_sha256(cubin: bytes) -> str:
    """Return the hash of the instructions alone; the rest of a cubin holds debug information, which differs with every
    config."""
    digest = hashlib.sha256()
    for name, content in _sections(cubin):
        if name.startswith(".text."):
            digest.update(content)
    return digest.hexdigest()


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of every section of a 64-bit little-endian ELF file, which a cubin is."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [_SECTION.unpack_from(elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, size, *_ in headers:
        start = names + name
        yield elf[start : elf.index(b"\0", start)].decode(), b"" if kind == _NO_BITS else elf[offset : offset + size]
