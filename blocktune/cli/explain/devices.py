"""`tune devices`: the GPUs in this machine and those that the catalogue knows."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.output.render import note, print_json, print_table, say
from blocktune.cli.shared.options import AsJson
from blocktune.tuner.cluster.connection import resources_of

if TYPE_CHECKING:
    from blocktune.kernels.hardware.device import CatalogueEntry, DeviceSpec


def devices(
    as_json: AsJson = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Print the GPUs here as resources of a Ray node, for `ray start --resources`.")
    ] = False,
) -> None:
    """List the GPUs here and those known by name. One that only NVML sees is hidden from CUDA.

    \b
    tune devices
    tune devices --json
    ray start --address=head:6379 --resources="$(blocktune devices --ray)"
    """
    from blocktune.kernels.hardware.device import catalogue, present_devices
    from blocktune.tuner.measure.telemetry import nvml_devices

    present = present_devices()
    if ray:
        say(json.dumps(resources_of(present)))
        return
    usable = {device.uuid for device in present}
    present += tuple(device for device in nvml_devices() if device.uuid not in usable)
    known = catalogue()
    if as_json:
        print_json(
            {"present": [device.to_json() for device in present], "catalogue": [entry.to_json() for entry in known]}
        )
        return
    if present:
        print_table(_COLUMNS, [_present_row(device) for device in present], title="In this machine")
    else:
        note("No GPU or driver in this machine. Predict for one of these: tune run --device NAME --seq 8192 --dim 64")
    print_table((*_COLUMNS, "sure"), [_catalogue_row(entry) for entry in known], title="Catalogue", optional=_OPTIONAL)
    note(
        "sure: D read from a device, W from an NVIDIA document, S from two lists that agree, M from memory, unverified"
    )


_COLUMNS = ("name", "device", "cc", "SMs", "memory GiB", "GB/s", "tensor TFLOP/s")
_OPTIONAL = ("device", "tensor TFLOP/s", "memory GiB")
"""Columns of the catalogue that a narrow terminal leaves out; `name` says which device it is."""


def _present_row(device: "DeviceSpec") -> tuple[object, ...]:
    memory_gib = None if device.memory_bytes is None else device.memory_bytes / (1 << 30)
    rates = map(_round_number, (memory_gib, device.memory_gbs, device.tensor_tflops))
    return ("NVML only" if device.source == "nvml" else "here", device.name, device.limits.name, device.num_sms, *rates)


def _catalogue_row(entry: "CatalogueEntry") -> tuple[object, ...]:
    rates = map(_round_number, (entry.memory_gib, entry.memory_gbs, entry.tensor_tflops))
    return (entry.id, entry.name, f"{entry.cc[0]}.{entry.cc[1]}", entry.num_sms, *rates, entry.confidence)


def _round_number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
