"""`tune verify MODULE:KERNEL`: which winners of autotuned kernels still serve, and how they do today."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from blocktune.cli.output.render import print_json, print_table
from blocktune.cli.shared.kernel_arguments import grid_of, importable_from_here, requests_for
from blocktune.cli.shared.kernels import require_kernels
from blocktune.db.records.records import problem_json
from blocktune.kernels.values.errors import UsageError

if TYPE_CHECKING:
    from blocktune.db.records.records import KernelBest
    from blocktune.db.store import ResultStore
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.tuner.drop_in.request import LaunchRequest
    from blocktune.tuner.upkeep.verification import Verification


def show_validity(name: str, device: "DeviceSpec", db: str | None, *, as_json: bool) -> None:
    """Say what each winner is worth with the source and the software that are here.

    Raises:
        NothingMeasuredError: there are none.
    """
    found = require_kernels(db, device, name)
    with importable_from_here():
        rows = [(best, _served_rung(best, device)) for best, _ in found]
    if as_json:
        kernels = [problem_json(best.shape) | {"serves_as": worth} for best, worth in rows]
        print_json({"device": device.name, "kernels": kernels})
        return
    cells = [(best.shape.full_label, best.config.label, _software(best), worth) for best, worth in rows]
    print_table(("kernel and key", "config", "measured with", "serves as"), cells)


def verified_launches(
    name: str, make: str | None, grid: str | None, param: Sequence[str], db: str | None
) -> "Iterator[Verification]":
    """Measure a kernel's configs again, and yield what was found for each size of a grid.

    Raises:
        UsageError: a name is none, or the arguments do not fit.
        NoDeviceError: there is no GPU.
        NoFeasibleConfigError: no config runs and computes what the first one of its list does.
    """
    from blocktune.db.store import ResultStore
    from blocktune.kernels.hardware.device import current_device
    from blocktune.tuner.drop_in.decide import needing_a_gpu
    from blocktune.tuner.upkeep.verify_launch import verify_launch

    requests = requests_for(name, make, grid_of(grid), param)
    with needing_a_gpu(name):
        device = current_device()
    with ResultStore.open(db) as store:
        known = [_stored_winner(request, device, store) for request in requests]  # sizes of a bucket share one
        for request, before in zip(requests, known, strict=True):
            with request.open_call() as call:
                yield verify_launch(call, request.label, device, store, before)


def _stored_winner(request: "LaunchRequest", device: "DeviceSpec", store: "ResultStore") -> "KernelBest | None":
    from blocktune.tuner.upkeep.verify_launch import stored_winner

    with request.open_call() as call:
        return stored_winner(call, device, store)


def _served_rung(best: "KernelBest", device: "DeviceSpec") -> str:
    """Return what a winner is worth here, or why it serves no call."""
    from blocktune.kernels.base.source_hash import hash_of_sources
    from blocktune.runtime.store_reader.provenance import Identity, present_identity, reuse_of
    from blocktune.tuner.offline.specialization import function_named

    try:
        source = hash_of_sources(function_named(best.config.kernel))
    except UsageError:
        return "unknown: its module cannot be imported from here"
    if source != best.kernel_hash:
        return f"nothing: the source is {source} now"
    environment = best.environment
    measured = Identity(
        device_key=best.device.key,
        kernel_hash=source,
        triton=environment.triton,
        ptxas=environment.ptxas,
        driver=environment.driver,
    )
    return str(reuse_of(measured, present_identity(device, source)) or "nothing")


def _software(best: "KernelBest") -> str:
    return f"triton {best.environment.triton}, ptxas {best.environment.ptxas}"
