"""A driver for Triton that compiles for a GPU which need not be here, and launches nothing."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.limits import WARP_SIZE

INDEX = 100
"""The index under which Triton keeps what it binds for this GPU: that of no GPU of this machine."""


class StandInDriver:
    """Takes the place of Triton's driver.

    Args:
        device: the GPU that programs find.
    """

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device

    def get_current_device(self) -> int:
        return INDEX

    def set_current_device(self, device: int) -> None:
        """Do nothing, as there is only one."""

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.device.limits.sm_arch, WARP_SIZE)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    @property
    def utils(self) -> "StandInDriver":
        return self

    def get_device_properties(self, device: int) -> Mapping[str, int]:
        limits = self.device.limits
        return {
            "max_shared_mem": limits.shared_per_block_optin_bytes,
            "max_num_regs": limits.registers_per_block,
            "multiprocessor_count": self.device.num_sms,
            "warpSize": WARP_SIZE,
            "sm_clock_rate": 1000 * (self.device.clock_mhz or 0),
        }

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return what finds every launch to take a millisecond, without a launch."""
        return lambda launch, quantiles=(0.5,), **_: [1.0] * len(quantiles)

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Return what benchmarks overwrite between launches."""
        return torch.empty(1, dtype=torch.int32, device="cuda")

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Do nothing, as there is no cache."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[None, int, int, int, int]:
        """Return no module, which Triton 3.9 would unload when the code goes, after this GPU did; a handle that is not
        null; and resources that are not read here."""
        return None, 1, 32, 0, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """Return a launcher that does nothing."""
        return lambda *_: None
