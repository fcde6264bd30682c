"""`tune verify MODULE:KERNEL`: which winners of autotuned kernels still serve, and how they do today."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blocktune.cli.autotuned.arguments import Sizes, importable_from_here
from blocktune.cli.autotuned.rows import parameters, require_kernels
from blocktune.cli.autotuned.run import choice_json, kernel_and_arguments
from blocktune.cli.output.render import microseconds, print_json, print_table, say
from blocktune.cli.shared.stores import database_of_this_process
from blocktune.kernels.values.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from blocktune.db.records.records import KernelBest
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.tuner.tuned.named import Remeasured

_COLUMNS = ("kernel", "key", "config", "measured with", "serves as")


def show_validity(name: str, device: "DeviceSpec", db: str | None, *, as_json: bool) -> None:
    """Say of each winner on which rung it serves with the source and the software that are here.

    Raises:
        NoFeasibleConfigError: there are none.
    """
    found = require_kernels(db, device, name)
    with importable_from_here():
        rows = [(best, _serves_as(best, device)) for best, _ in found]
    if as_json:
        kernels = [
            {"kernel": best.config.kernel, "key": dict(best.shape.problem.arguments), "serves_as": rung}
            for best, rung in rows
        ]
        print_json({"device": device.name, "kernels": kernels})
        return
    print_table(
        _COLUMNS,
        [
            (best.config.kernel, best.shape.label, parameters(best.config.label), _software(best), rung)
            for best, rung in rows
        ],
    )


def measure_again(
    name: str, make: str | None, grid: str | None, param: Sequence[str], db: str | None, *, as_json: bool
) -> None:
    """Measure a kernel's configs again for each size of a grid, and say whether the winner stays.

    Raises:
        UsageError: a name is none, or the arguments do not fit.
        NoDeviceError: there is no GPU.
        VerificationError: a winner computes something else than the list's first config.
    """
    from blocktune.kernels.hardware.device import current_device
    from blocktune.tuner.tuned.decide import needing_a_gpu
    from blocktune.tuner.tuned.named import remeasured

    with importable_from_here(), database_of_this_process(db):
        kernel, all_sizes, arguments = kernel_and_arguments(name, make, grid, param, 0)
        with needing_a_gpu(kernel.name):
            device, wrong, found = current_device(), [], []
        known = [_stored(kernel, arguments(sizes), device) for sizes in all_sizes]  # a bucket's sizes have one winner
        for sizes, before in zip(all_sizes, known, strict=True):
            after = remeasured(kernel, arguments(sizes), device)
            found.append(
                choice_json(sizes, after.choice) | {"before": _before_json(before, after), "problem": after.problem}
            )
            wrong += [after.problem] if after.problem else []
            if not as_json:
                say(_words(sizes, before, after))
    if as_json:
        print_json({"device": device.name, "kernel": kernel.name, "verified": found})
    if wrong:
        raise VerificationError(
            f"A winner of {kernel.name} must compute what the first config of its list does, but {wrong[0]}. Take the "
            "config out of the list, or correct the kernel."
        )


def _stored(kernel: Any, arguments: Any, device: "DeviceSpec") -> "KernelBest | None":
    from blocktune.db.store import ResultStore
    from blocktune.kernels.tuned.config import KernelProblem
    from blocktune.tuner.tuned.known import listed_problem
    from blocktune.tuner.tuned.named import positional

    args, kwargs = positional(kernel, arguments)
    call = kernel.call_of(args, {"warmup": False, **kwargs})
    with ResultStore.open() as store:
        return store.best(device, KernelProblem(call.name, listed_problem(call)), kernel_hash=call.source_hash)


def _words(sizes: Sizes, before: "KernelBest | None", after: "Remeasured") -> str:
    words = " ".join(f"{name}={value}" for name, value in sizes.items()) or after.choice.subject
    now = f"{parameters(after.winner.label)}, {microseconds(after.choice.time_us)}"
    if before is None:
        return f"{words}: {now}; nothing was known before"
    if before.config == after.winner:
        return f"{words}: the winner stays: {now}, {microseconds(before.time_us)} before"
    loss = after.loss_of(before.config)
    was = f"{parameters(before.config.label)}, {microseconds(before.time_us)}"
    return f"{words}: the winner is now {now}; it was {was}" + (f", and takes {loss:.1%} longer" if loss else "")


def _before_json(before: "KernelBest | None", after: "Remeasured") -> dict[str, Any] | None:
    if before is None:
        return None
    loss = after.loss_of(before.config)
    return {"config": before.config.parameters, "time_us": before.time_us, "loss": loss}


def _serves_as(best: "KernelBest", device: "DeviceSpec") -> str:
    """Return the rung on which a winner serves here, or why it serves no call."""
    from blocktune.kernels.base.source_hash import hash_of_sources
    from blocktune.kernels.stored.provenance import Identity, present_identity, reuse_of
    from blocktune.tuner.jitted.specialization import function_named

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
