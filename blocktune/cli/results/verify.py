"""`tune verify`: time the stored winners again after an upgrade, and see what changed."""

from concurrent.futures import wait
from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.output.progress import show_progress
from blocktune.cli.output.render import microseconds, note, print_json, print_table, say
from blocktune.cli.results.verify_kernel import show_validity, verified_launches
from blocktune.cli.shared.kernel_arguments import ArgumentsOf, Space
from blocktune.cli.shared.kernels import KernelName
from blocktune.cli.shared.options import AsJson, Database
from blocktune.cli.shared.stores import existing_store
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError, VerificationError
from blocktune.kernels.values.text import counted
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blocktune.db.records.records import Best, Environment
    from blocktune.db.store import ResultStore
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.tuner.compile_server.background import PreparingCompiler
    from blocktune.tuner.measure.measurement import Terms
    from blocktune.tuner.measure.runner import GpuRunner
    from blocktune.tuner.upkeep.verification import Verification

COLUMNS = ("", "config", "then", "now", "now / then", "")


def verify(
    autotuned: KernelName = None,
    make_args: ArgumentsOf = None,
    grid: Annotated[
        str | None, typer.Option("--grid", help="Sizes of MODULE:KERNEL, as in 'M=512,1024 N=4096'.")
    ] = None,
    param: Space = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also verify winners that were measured with the software in use.")
    ] = False,
    unknown_speedup: Annotated[
        bool, typer.Option("--unknown-speedup", help="Only winners that were not timed against today's default.")
    ] = False,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Check and time stored winners again on this GPU.

    Each meets its runners-up and the default, and who wins is stored. Without --all, only winners that are due:
    imported ones, and those measured with another driver, Triton, ptxas, torch or kernel source or against another
    default. Verified winners count as measured here. A winner that computes a wrong result is replaced, and the command
    ends with 7 after all shapes. A winner that failed by the machine, such as by a full disk or memory, stays, and the
    command ends with 3. Ctrl-C keeps what was verified. Configs that production found to be wrong at their first use
    are shown first.

    For autotuned kernels, it says which winners are still valid for the source and software in use. With --args, it
    measures all configs again for each size, and compares the results of each with those of the list's first config.

    \b
    tune verify
    tune verify --all --json
    tune verify --unknown-speedup
    tune verify 'fla.*'
    tune verify my_kernels:matmul --args my_kernels:make_args --grid "M=4096 N=4096 K=4096"
    """
    if autotuned is not None and make_args is None:
        show_validity(autotuned, choose_device(), db, as_json=as_json)
        return
    if autotuned is not None:
        done = _show_each(verified_launches(autotuned, make_args, grid, param or [], db), as_json)
        _conclude(done, len(done), as_json)
        return
    if every and unknown_speedup:
        raise UsageError("--all and --unknown-speedup exclude each other, but both are given. Leave one out.")
    _show_findings()
    from blocktune.kernels.hardware.device import current_device
    from blocktune.tuner.measure.environment import measuring_environment
    from blocktune.tuner.measure.telemetry import GpuMonitor

    device = current_device()
    environment = measuring_environment(device, GpuMonitor(device.uuid))
    with existing_store(db, writes=True) as store:
        due = _due(store.bests(device), environment, every, unknown_speedup) if store else []
        note(f"{counted(len(due), 'winner')} of {device.name} to verify")
        done = _show_each(_verifications(due, device, environment, store), as_json) if store and due else []
    _conclude(done, len(due), as_json)


def _show_each(found: "Iterator[Verification]", quiet: bool) -> "list[Verification]":
    """Return the verifications, each of which is shown once it is there."""
    done = []
    for each in found:
        done.append(each)
        if not quiet:
            _show(each)
    return done


def _conclude(done: "Sequence[Verification]", due: int, as_json: bool) -> None:
    """Print what was found as JSON where that is wanted, and judge it.

    Raises:
        VerificationError: a stored winner computes wrong results.
        NoFeasibleConfigError: fewer were verified than are due.
    """
    if as_json:
        print_json({"verified": [each.to_json() for each in done]})
    wrong = [each.label for each in done if each.wrong]
    if wrong:
        raise VerificationError(
            f"The stored winners of {'; '.join(wrong)} compute wrong results. They were replaced as shown above; "
            "`tune run` searches further."
        )
    missing = due - sum(each.verified for each in done)
    if missing:
        raise NoFeasibleConfigError(
            f"{missing} of {counted(due, 'winner')} could not be verified, for the reasons above. The store keeps "
            "what it has of them; run the command again when those are gone."
        )


def _show_findings() -> None:
    """Say which configs production found to compute wrong results."""
    from blocktune.kernels.files.findings import findings_path, stored_findings

    found = stored_findings()
    for finding in found:
        note(
            f"found wrong in production: {finding.config.label} for {finding.shape.label}, by "
            f"{finding.times_the_bound:.3g} times the bound of its rounding"
        )
    if found:
        note(f"remove {findings_path()} when their cause is fixed")


def _due(
    bests: "list[Best]", environment: "Environment", every: bool, unknown_speedup: bool
) -> "list[tuple[Best, str]]":
    """Return the winners to verify, each with the reason."""
    from blocktune.kernels.values.config import Origin
    from blocktune.tuner.upkeep.is_current import due_reason, speedup_reason

    if unknown_speedup:
        return [(best, why) for best in bests if (why := speedup_reason(best))]
    reasons = ((best, due_reason(best, environment)) for best in bests)
    return [
        (best, why or "requested") for best, why in reasons if why or (every and best.origin is not Origin.PREDICTED)
    ]


def _verifications(
    due: "list[tuple[Best, str]]", device: "DeviceSpec", environment: "Environment", store: "ResultStore"
) -> "Iterator[Verification]":
    """Yield what was found of each winner that could be measured."""
    from blocktune.tuner.measure.locked_runner import gpu_runner
    from blocktune.tuner.measure.telemetry import GpuMonitor
    from blocktune.tuner.search.run import farm_for
    from blocktune.tuner.upkeep.verify import verify

    first, monitor = due[0][0], GpuMonitor(device.uuid, own_processes=1)
    with farm_for(device) as compiler, gpu_runner(first.shape, device, monitor, note, _terms(first)) as runner:
        for best in _verify_in_turn(due, device, store, compiler, runner):
            try:
                with show_progress() as show:
                    found = verify(
                        best,
                        device=device,
                        environment=environment,
                        store=store,
                        compiler=compiler,
                        runner=runner,
                        on_progress=show,
                    )
            except NoFeasibleConfigError as error:
                note(f"error: {error}")
                continue
            yield found


def _verify_in_turn(
    due: "list[tuple[Best, str]]",
    device: "DeviceSpec",
    store: "ResultStore",
    compiler: "PreparingCompiler",
    runner: "GpuRunner",
) -> "Iterator[Best]":
    """Yield each winner once its configs are compiled and the runner has turned to its shape.

    The configs of all winners are handed to the compiler before the first is measured, so that the GPU waits for few.
    """
    from blocktune.tuner.upkeep.verify import compile_ahead

    runner.prepare()  # its process starts meanwhile
    compiles = [compile_ahead(best, device=device, store=store, compiler=compiler) for best, _ in due]
    for number, ((best, why), compiled) in enumerate(zip(due, compiles, strict=True), start=1):
        note(f"{number}/{len(due)} {best.shape.label}: {why}")
        if number > 1:
            runner.turn_to(best.shape, terms=_terms(best))
        wait(compiled)
        yield best


def _terms(best: "Best") -> "Terms":
    from blocktune.tuner.measure.measurement import Terms

    return Terms(regime=best.environment.regime)


def _show(found: "Verification") -> None:
    rows = [
        (
            each.role,
            each.config.label,
            microseconds(each.before_us),
            microseconds(each.after_us),
            "-" if each.ratio is None else f"{each.ratio:.3f}",
            each.problem,
        )
        for each in found.rechecks
    ]
    print_table(COLUMNS, rows, title=found.label)
    if found.after is None:
        say(f"no winner any more: {found.reason}\n")
    elif not found.verified:
        say(f"the winner stays, not verified: {found.reason}\n")
    elif found.before is not None and found.after.config == found.before.config:
        say(f"the winner stays: {found.reason}\n")
    else:
        say(f"the winner is now {found.after.config.label}: {found.reason}\n")
