"""A stand-in for libcuda: GPUs made of attribute numbers, and calls that fail on demand."""

import ctypes
import uuid
from dataclasses import dataclass, field

H200_UUID = "12345678-9abc-def0-1234-56789abcdef0"
H200_ATTRIBUTES = {
    12: 65536,
    13: 1_980_000,
    16: 132,
    36: 3_201_000,
    37: 6144,
    38: 62_914_560,
    39: 2048,
    75: 9,
    76: 0,
    81: 233_472,
    82: 65536,
    97: 232_448,
    106: 32,
    111: 1024,
}


@dataclass
class FakeGpu:
    name: str = "NVIDIA H200"
    attributes: dict[int, int] = field(default_factory=lambda: dict(H200_ATTRIBUTES))
    memory_bytes: int = 150_754_820_096
    uuid: str = H200_UUID


@dataclass
class FakeDriver:
    """Answers like libcuda; `failing` maps a function's name to the error code that it returns."""

    gpus: list[FakeGpu] = field(default_factory=list)
    version: int = 12080
    failing: dict[str, int] = field(default_factory=dict)

    def cuDriverGetVersion(self, out: ctypes.c_int) -> int:
        return self._answer("cuDriverGetVersion", out, self.version)

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self.failing.get("cuInit", 0)

    def cuDeviceGetCount(self, out: ctypes.c_int) -> int:
        return self._answer("cuDeviceGetCount", out, len(self.gpus))

    def cuDeviceGet(self, out: ctypes.c_int, index: int) -> int:
        return self._answer("cuDeviceGet", out, index)

    def cuDeviceGetAttribute(self, out: ctypes.c_int, attribute: int, device: int) -> int:
        value = self.gpus[device].attributes.get(attribute)
        return 1 if value is None else self._answer("cuDeviceGetAttribute", out, value)

    def cuDeviceGetName(self, out: ctypes.Array[ctypes.c_char], size: int, device: int) -> int:
        out.value = self.gpus[device].name.encode()[: size - 1]
        return self.failing.get("cuDeviceGetName", 0)

    def cuDeviceGetUuid_v2(self, out: ctypes.c_char, device: int) -> int:
        out._obj[:] = list(uuid.UUID(self.gpus[device].uuid).bytes)  # type: ignore[attr-defined]
        return self.failing.get("cuDeviceGetUuid_v2", 0)

    def cuDeviceTotalMem_v2(self, out: ctypes.c_size_t, device: int) -> int:
        return self._answer("cuDeviceTotalMem_v2", out, self.gpus[device].memory_bytes)

    def _answer(self, function: str, out: ctypes.c_int | ctypes.c_size_t, value: int) -> int:
        out._obj.value = value  # type: ignore[union-attr]
        return self.failing.get(function, 0)
