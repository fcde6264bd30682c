"""`tune verify MODULE:KERNEL`: which winners of autotuned kernels still serve, and how they do today."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.render import microseconds, print_json, print_table, say
from blocktune.cli.shared.kernel_arguments import Sizes, grid_of, importable_from_here, requests_for
from blocktune.cli.shared.kernels import require_kernels
from blocktune.db.records.records import problem_json
from blocktune.kernels.values.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from blocktune.db.records.records import KernelBest
    from blocktune.db.store import ResultStore
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.tuner.drop_in.request import LaunchRequest
    from blocktune.tuner.upkeep.verify_launch import LaunchVerification


def show_validity(name: str, device: "DeviceSpec", db: str | None, *, as_json: bool) -> None:
    """Say of each winner on which rung it serves with the source and the software that are here.

    Raises:
        NothingMeasuredError: there are none.
    """
    found = require_kernels(db, device, name)
    with importable_from_here():
        rows = [(best, _serves_as(best, device)) for best, _ in found]
    if as_json:
        kernels = [problem_json(best.shape) | {"serves_as": rung} for best, rung in rows]
        print_json({"device": device.name, "kernels": kernels})
        return
    cells = [(best.shape.full_label, best.config.label, _software(best), rung) for best, rung in rows]
    print_table(("kernel and key", "config", "measured with", "serves as"), cells)


def measure_again(
    name: str, make: str | None, grid: str | None, param: Sequence[str], db: str | None, *, as_json: bool
) -> None:
    """Measure a kernel's configs again for each size of a grid, and say whether the winner stays.

    Raises:
        UsageError: a name is none, or the arguments do not fit.
        NoDeviceError: there is no GPU.
        VerificationError: a winner computes something else than the list's first config.
    """
    from blocktune.db.store import ResultStore
    from blocktune.kernels.hardware.device import current_device
    from blocktune.tuner.drop_in.decide import needing_a_gpu
    from blocktune.tuner.upkeep.verify_launch import verify_launch

    requests = requests_for(name, make, grid_of(grid), param)
    with needing_a_gpu(name):
        device, wrong, found = current_device(), [], []
    with ResultStore.open(db) as store:
        known = [_known(request, device, store) for request in requests]  # sizes of a bucket share one
        for request, before in zip(requests, known, strict=True):
            with request.open_call() as call:
                again = verify_launch(call, device, store, before)
            found.append(again.report.to_json() | {"sizes": dict(request.sizes)} | _before_json(again))
            wrong += [again.problem] if again.problem else []
            if not as_json:
                say(_words(dict(request.sizes), again))
    if as_json:
        print_json({"device": device.name, "kernel": name, "verified": found})
    if wrong:
        raise VerificationError(
            f"A winner of {name} must compute what the first config of its list does, but {wrong[0]}. Take the "
            "config out of the list, or correct the kernel."
        )


def _known(request: "LaunchRequest", device: "DeviceSpec", store: "ResultStore") -> "KernelBest | None":
    from blocktune.tuner.upkeep.verify_launch import stored_winner

    with request.open_call() as call:
        return stored_winner(call, device, store)


def _words(sizes: Sizes, again: "LaunchVerification") -> str:
    best, before = again.report.best, again.before
    words = " ".join(f"{name}={value}" for name, value in sizes.items()) or best.shape.label
    now = f"{best.config.label}, {microseconds(best.time_us)}"
    if before is None:
        return f"{words}: {now}; nothing was known before"
    if before.config == best.config:
        return f"{words}: the winner stays: {now}, {microseconds(before.time_us)} before"
    was = f"{before.config.label}, {microseconds(before.time_us)}"
    return f"{words}: the winner is now {now}; it was {was}" + (
        f", and takes {again.loss:.1%} longer" if again.loss else ""
    )


def _before_json(again: "LaunchVerification") -> dict[str, Any]:
    before = again.before
    known = None if before is None else {"config": before.config.parameters, "time_us": before.time_us}
    return {"before": None if known is None else known | {"loss": again.loss}, "problem": again.problem}


def _serves_as(best: "KernelBest", device: "DeviceSpec") -> str:
    """Return the rung on which a winner serves here, or why it serves no call."""
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
