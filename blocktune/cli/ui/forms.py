"""The forms of a page: a shape by the flags that commands take, and a config of a kernel."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_args, get_type_hints

from blocktune.cli.shared.compiled_config import CompileRequest, default_request
from blocktune.cli.shared.options import NEEDED, ShapeFlags
from blocktune.cli.ui.live_store import LiveStore
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.registry import kernels_for
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import SHORT_DTYPES, AttentionShape, Direction

CHOICES = {"dtype": tuple(SHORT_DTYPES.values()), "direction": tuple(map(str, Direction))}
"""Fields of a shape that are chosen from a list."""


@dataclass(frozen=True, slots=True)
class ShapeForm:
    """A shape as it was filled in, for a device: one that the database knows, or of the catalogue."""

    device: str
    flags: dict[str, int | str | bool]

    def shape(self) -> AttentionShape:
        """Return the shape that is meant.

        Raises:
            UsageError: a field is unknown or of another type, or the sizes do not fit together.
        """
        return ShapeFlags(**_check_fields(self.flags)).shape()


@dataclass(frozen=True, slots=True)
class KernelsForm:
    """A shape and a device whose kernels are wanted."""

    device: str
    shape: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ConfigForm:
    """A config to compile. parameters: block sizes and what else the kernel has; others are those of its default."""

    device: str
    shape: dict[str, Any]
    kernel: str
    parameters: dict[str, int] = field(default_factory=dict)

    def request(self, device: DeviceSpec) -> CompileRequest:
        """Return what is to be compiled.

        Raises:
            UsageError: the shape breaks a rule, the kernel does not compute it, or the config breaks one of its rules.
        """
        shape = AttentionShape.from_json(self.shape)
        return default_request(self.kernel, shape, device.limits).with_choices(self.parameters, [])


def chosen_device(store: LiveStore, name: str) -> DeviceSpec:
    """Return the device of this name.

    Raises:
        UnknownDeviceError: neither the database nor the catalogue knows it.
    """
    return store.device(name) or device_named(name)


def shape_fields() -> list[dict[str, Any]]:
    """Return the fields of a shape: name, help, kind, default and choices of each."""
    hints = get_type_hints(ShapeFlags, include_extras=True)
    return [
        {
            "name": each.name,
            "help": get_args(hints[each.name])[1].help.split("  [")[0],
            "kind": _kind(each.name, hints),
            "default": None if each.default is MISSING else each.default,
            "needed": each.name in NEEDED,
            "choices": list(CHOICES.get(each.name, ())),
        }
        for each in fields(ShapeFlags)
    ]


def kernel_choices(shape: AttentionShape, device: DeviceSpec) -> list[dict[str, Any]]:
    """Return the kernels that compute a shape on a device, with their parameters and default configs."""
    return [
        {
            "name": kernel.name,
            "default": kernel.default_config(shape, device.limits).parameters,
            "parameters": {name: list(values) for name, values in kernel.parameters.items()},
        }
        for kernel in kernels_for(shape, device.limits)
    ]


def _kind(name: str, hints: dict[str, Any]) -> str:
    """Return `int`, `bool` or `str`."""
    declared = get_args(hints[name])[0]
    return "int" if declared in (int, int | None) else declared.__name__


def _check_fields(flags: dict[str, int | str | bool]) -> dict[str, Any]:
    """Return the fields that were filled in.

    Raises:
        UsageError: a field is unknown, of another type, or missing.
    """
    kinds = {each["name"]: each["kind"] for each in shape_fields()}
    wrong = [name for name, value in flags.items() if kinds.get(name) != type(value).__name__]
    missing = [name for name in NEEDED if name not in flags]
    if wrong or missing:
        raise UsageError(
            f"A shape has the fields {', '.join(kinds)}, of which {' and '.join(NEEDED)} are needed, but "
            f"{', '.join([*missing, *wrong])!r:.200} is missing, unknown or of another type. Correct it."
        )
    return dict(flags)
