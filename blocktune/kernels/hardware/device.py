"""A GPU as the rest of the house sees it: its limits, which are facts, and its rates, which may be unknown.

Three ways lead to a `DeviceSpec`: `present_devices` and `current_device` ask the driver, `device_named` looks into the
catalogue and needs no GPU.
"""

import sys
import warnings
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.hardware.catalogue import (
    CATALOGUE_FILE,
    CatalogueEntry,
    catalogue,
    entry_by_driver_name,
    find_entry,
    normalise_name,
)
from blocktune.kernels.hardware.driver import DriverReport, LiveDevice, read_driver, read_torch
from blocktune.kernels.hardware.limits import WARP_SIZE, ComputeLimits, limits_for, parse_cc
from blocktune.kernels.values.errors import NoDeviceError, UnknownDeviceError, UsageError, require_type

__all__ = [
    "CatalogueEntry",
    "ComputeLimits",
    "DeviceFactsWarning",
    "DeviceSpec",
    "catalogue",
    "current_device",
    "device_named",
    "device_of",
    "limits_for",
    "parse_cc",
    "present_devices",
]

_GIB = 1 << 30
_MIB = 1 << 20
_HIGHEST = 1 << 50  # no count, size or rate of a GPU comes near it
_WHOLE_NUMBERS = ("memory_bytes", "clock_mhz", "l2_bytes", "tensor_flops_per_clock")
_RATES = ("memory_gbs", "tensor_tflops")
_SOURCES = ("driver", "torch", "nvml", "catalogue")


class DeviceFactsWarning(UserWarning):
    """A present GPU differs from the tables of blocktune; its own word is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One kind of GPU; None is unknown, never a guess.

    name: as the driver spells it. clock_mhz: boost clock. memory_gbs: peak bandwidth in GB/s. tensor_flops_per_clock:
    dense fp16 FLOP with fp32 accumulation per SM and clock. tensor_tflops: the same for the device at its advertised
    clock, in 1e12 FLOP/s. uuid: which piece of hardware, None for a catalogue entry. source: `driver`, `torch`, `nvml`
    or `catalogue`.

    Raises:
        UsageError: the name is empty or a number is not positive.
    """

    name: str
    limits: ComputeLimits
    num_sms: int
    memory_bytes: int | None = None
    clock_mhz: int | None = None
    memory_gbs: float | None = None
    l2_bytes: int | None = None
    tensor_flops_per_clock: int | None = None
    tensor_tflops: float | None = None
    uuid: str | None = None
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= 256:
            raise UsageError(f"The name of a device must have 1 to 256 characters, but got {self.name!r}.")
        if type(self.num_sms) is not int or not 0 < self.num_sms <= 4096:
            raise UsageError(f"`1 <= num_sms <= 4096` must hold, but got num_sms={self.num_sms!r} for {self.name!r}.")
        for names, types in ((_WHOLE_NUMBERS, (int,)), (_RATES, (int, float))):
            for name in names:
                value = getattr(self, name)
                if value is not None and (type(value) not in types or not 0 < value < _HIGHEST):
                    raise UsageError(f"`{name}` must be positive or unknown, but got {value!r} for {self.name!r}.")
        if self.source not in _SOURCES:
            raise UsageError(f"The source of a device must be one of {', '.join(_SOURCES)}, but got {self.source!r}.")
        if self.uuid is not None and (not isinstance(self.uuid, str) or len(self.uuid) > 64):
            raise UsageError(f"The UUID of a device must be a short text or None, but got {self.uuid!r}.")

    @property
    def key(self) -> str:
        """Which results belong together: normalised name, compute capability and SM count, `nvidia h200|9.0|132`."""
        return f"{normalise_name(self.name)}|{self.limits.name}|{self.num_sms}"

    def to_json(self) -> dict[str, Any]:
        """Return the spec as plain values. `limits` holds only what differs from the table of its compute
        capability."""
        table = asdict(limits_for(self.limits.cc))
        overlay = {name: value for name, value in asdict(self.limits).items() if value != table[name]}
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "limits"}
        return plain | {"cc": self.limits.name, "limits": overlay}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the spec that `to_json` wrote.

        Raises:
            UsageError: a field is unknown, missing or out of range.
        """
        if not isinstance(data, dict) or not isinstance(data.get("cc"), str):
            raise UsageError(f"A device must be an object with a compute capability `cc`, but got {data!r:.100}.")
        plain = {name: value for name, value in data.items() if name not in ("cc", "limits")}
        limits = _with_overlay(limits_for(parse_cc(data["cc"])), data.get("limits", {}))
        try:
            return cls(limits=limits, **plain)
        except TypeError as error:
            raise UsageError(f"A device must have the fields of `to_json`: {shown(str(error), 200)}.") from None


def _with_overlay(limits: ComputeLimits, overlay: dict[str, Any]) -> ComputeLimits:
    """Return the limits with some numbers replaced, after checking that they are numbers of limits."""
    if not isinstance(overlay, dict):
        raise UsageError(f"`limits` must be an object of limits that differ from the table, but got {overlay!r}.")
    for name, value in overlay.items():
        if name not in _LIVE_LIMITS or type(value) is not int or not 0 <= value < _HIGHEST:
            raise UsageError(f"`limits` may replace {', '.join(_LIVE_LIMITS)} by integers, but got {name}={value!r}.")
    return replace(limits, **overlay)


# The limits that the driver tells; what it does not tell stays as in the table.
_LIVE_LIMITS = (
    "max_warps_per_sm",
    "max_blocks_per_sm",
    "registers_per_sm",
    "registers_per_block",
    "shared_per_sm_bytes",
    "shared_per_block_optin_bytes",
    "shared_reserved_bytes",
)


def device_named(name: str) -> DeviceSpec:
    """Return the device of the catalogue with this id, alias or driver name; upper case and separators do not matter.

    Raises:
        UnknownDeviceError: no device has this name; the message lists the nearest names and the file to edit.
        WrongTypeError: it is no name.
    """
    require_type("device", name, str, "Give a name such as 'h200', or a DeviceSpec; `tune devices` lists the names.")
    entry = find_entry(name)
    return DeviceSpec(
        name=entry.name,
        limits=limits_for(entry.cc),
        num_sms=entry.num_sms,
        memory_bytes=round(entry.memory_gib * _GIB),
        clock_mhz=entry.boost_mhz,
        memory_gbs=entry.memory_gbs,
        l2_bytes=_l2_bytes(entry),
        tensor_flops_per_clock=entry.tensor_flops_per_clock,
        tensor_tflops=entry.tensor_tflops,
        source="catalogue",
    )


def device_of(device: DeviceSpec | str | None) -> DeviceSpec:
    """Return the device that a caller means: itself, the one of this name, or by default the current GPU.

    Raises:
        UnknownDeviceError: no device has this name.
        WrongTypeError: it is neither.
        NoDeviceError: None was given and there is no GPU.
    """
    if device is None:
        return current_device()
    return device if isinstance(device, DeviceSpec) else device_named(device)


def present_devices() -> tuple[DeviceSpec, ...]:
    """Return the GPUs of this machine, in the order of CUDA; empty without a GPU or driver.

    Warns:
        DeviceFactsWarning: a GPU differs from the tables, or is of a kind that they do not know and is left out.
    """
    report = _read()
    found = []
    for live in report.devices:
        try:
            found.append(_spec(live, report.source))
        except UnknownDeviceError as error:
            warnings.warn(f"{live.name} is left out. {error}", DeviceFactsWarning, stacklevel=2)
    return tuple(found)


def current_device(index: int | None = None) -> DeviceSpec:
    """Return the GPU with this CUDA index; None is torch's current device, or the first one before torch has used CUDA.

    Raises:
        NoDeviceError: there is no GPU, no driver, or no such index; the message says which.
        UnknownDeviceError: the table has no row for its compute capability.
    """
    report = _read()
    if not report.devices:
        raise NoDeviceError(
            f"A GPU is required here. {report.problem} Use a machine with one; without it `tune run --device h200` and "
            '`best_config(shape, device="h200")` predict.'
        )
    chosen = _current_index() if index is None else index
    if not 0 <= chosen < len(report.devices):
        raise NoDeviceError(
            f"A CUDA index must be 0 to {len(report.devices) - 1} here, but got {chosen}. "
            "CUDA_VISIBLE_DEVICES decides which GPUs are counted."
        )
    return _spec(report.devices[chosen], report.source)


def _read() -> DriverReport:
    report = read_driver()
    if report.devices:
        return report
    by_torch = read_torch()
    return by_torch if by_torch.devices else report


def _current_index() -> int:
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0


def _spec(live: LiveDevice, source: str) -> DeviceSpec:
    """Return the live attributes over the table of its compute capability, and rates from the catalogue where it is
    listed."""
    entry = entry_by_driver_name(live.name)
    limits = _overlaid(limits_for(live.cc), live)
    same_size = entry is not None and entry.num_sms == live.num_sms
    if entry is not None and not same_size:
        _warn_difference(live.name, f"kernels/hardware/{CATALOGUE_FILE}", "num_sms", entry.num_sms, live.num_sms)
    return DeviceSpec(
        name=live.name,
        limits=limits,
        num_sms=live.num_sms,
        memory_bytes=live.memory_bytes,
        clock_mhz=round(live.clock_khz / 1000) if live.clock_khz else (entry.boost_mhz if entry else None),
        memory_gbs=entry.memory_gbs if entry is not None and same_size else live.memory_gbs,
        l2_bytes=live.l2_bytes or (_l2_bytes(entry) if entry else None),
        tensor_flops_per_clock=entry.tensor_flops_per_clock if entry else None,
        tensor_tflops=entry.tensor_tflops if entry is not None and same_size else None,
        uuid=live.uuid,
        source=source,
    )


def _l2_bytes(entry: CatalogueEntry) -> int | None:
    return None if entry.l2_mib is None else round(entry.l2_mib * _MIB)


def _overlaid(limits: ComputeLimits, live: LiveDevice) -> ComputeLimits:
    """Return the limits as the device tells them, with a warning for every one that differs from the table."""
    max_warps = None if live.max_threads_per_sm is None else live.max_threads_per_sm // WARP_SIZE
    told = {"max_warps_per_sm": max_warps} | {name: getattr(live, name) for name in _LIVE_LIMITS[1:]}
    different = {name: value for name, value in told.items() if value is not None and value != getattr(limits, name)}
    for name, value in different.items():
        _warn_difference(live.name, "kernels/hardware/limits.py", name, getattr(limits, name), value)
    return replace(limits, **different)


def _warn_difference(device: str, file: str, name: str, expected: int, told: int) -> None:
    warnings.warn(
        f"{device} has {name} = {told}, but {file} says {expected}. The device's own value is used; please report it.",
        DeviceFactsWarning,
        stacklevel=4,
    )
