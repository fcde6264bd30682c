"""Every config of the kernels that a function launches, compiled for devices that need not be here."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from triton.runtime.autotuner import Config

from blocktune.db.records.records import Outcome
from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.device import ComputeLimits, DeviceSpec, device_of
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call import jitted_function, tuner_in
from blocktune.runtime.autotuned.config import LaunchConfig, launch_config
from blocktune.tuner.compile.answers import Compiled
from blocktune.tuner.compile.compiler import compiled_code
from blocktune.tuner.compile_server.compile_ahead import CompileAhead
from blocktune.tuner.drop_in.request import LaunchRequest, importable_from
from blocktune.tuner.dry_run.config_row import rows_of
from blocktune.tuner.dry_run.config_table import NO_TIME, OfflineTable
from blocktune.tuner.dry_run.own_process import run_in_own_process
from blocktune.tuner.dry_run.recorder import DryConfig, DryLaunch, dry_launches
from blocktune.tuner.offline.code import name_of, spec_offline
from blocktune.tuner.offline.counts import counts_in
from blocktune.tuner.offline.signature import positional_signature
from blocktune.tuner.offline.specialization import object_named, specialization_from
from blocktune.tuner.profile.instruction_mix import mix_of
from blocktune.tuner.subject.costs import Costs


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """The resources of a program's kernels on a device: a table for each kind of launch."""

    tables: tuple[OfflineTable, ...]

    def to_json(self) -> dict[str, Any]:
        return {"tables": [table.to_json() for table in self.tables]}

    def __str__(self) -> str:
        """Return the tables as text."""
        return "\n\n".join([*map(str, self.tables), NO_TIME])

    def __repr__(self) -> str:
        """Return the tables as text, as `print` shows them."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return the tables for a notebook."""
        return "".join([*(table._repr_html_() for table in self.tables), f"<p>{NO_TIME}</p>"])


def explain(call: Callable[[], object] | str, *, device: DeviceSpec | str) -> OfflineReport:
    """Return what every config of the Triton kernels that a function launches takes on a device. Nothing is launched.

    The function finds the device, and its tensors there, which are on the CPU; of those that it makes on `meta`, no
    memory is taken. What kernels would have computed is zeros.

    Many libraries look for a GPU when they are imported. Give such a function by its name: another process imports it,
    with the device in place. What the function itself imports stays imported here as it is there.

    Args:
        call: the function, which takes no arguments, or its name, `module:function`.
        device: a DeviceSpec or a name, as `tune devices` lists them; it need not be here.

    Raises:
        UnknownDeviceError: no device has this name.
        UsageError: there is no such function, it raises an error, or it launches no kernel.
    """
    spec = device_of(device)
    return explain_by_name(call, spec) if isinstance(call, str) else _report(call, spec, str(call))


def explain_by_name(call: str, device: DeviceSpec, variables: Mapping[str, str] | None = None) -> OfflineReport:
    """Return the report of a function with a name `module:function`, which another process imports: libraries decide by
    the GPU that they find when they are imported.

    Args:
        call: the name.
        device: it need not be here.
        variables: of the environment of that process, besides those of this one.

    Raises:
        UsageError: there is no such function, it fails, launches no kernel, or ends its process.
    """
    return _report_apart(report_by_name, call, device, variables or {})


def explain_request(request: LaunchRequest, device: DeviceSpec) -> OfflineReport:
    """Return the report of one launch of a kernel on arguments that a function makes, in another process.

    Raises:
        UsageError: a name is none, the arguments do not fit, or their function fails or ends its process.
    """
    return _report_apart(report_of_request, request, device, {})


def report_of_request(request: LaunchRequest, device: DeviceSpec) -> OfflineReport:
    """Return the report of a launch that is made in this process, with the device in place."""

    def launch() -> None:
        with request.open_call() as call:
            call.tuner.run(*call.args, **call.kwargs)

    with importable_from(request.folder):
        return _report(launch, device, request.label)


def _report_apart(
    report: Callable[..., OfflineReport], subject: Any, device: DeviceSpec, variables: Mapping[str, str]
) -> OfflineReport:
    """Return a report that another process makes of a subject.

    Raises:
        UsageError: the process ends without an answer, or the report cannot be made.
    """
    try:
        made: OfflineReport = run_in_own_process(report, subject, device, variables=variables)
    except EOFError as error:
        name = subject if isinstance(subject, str) else subject.label
        raise UsageError(
            f"{name} must not end its process, but did so on {device.name}. Its last words are above."
        ) from error
    return made


def report_by_name(call: str, device: DeviceSpec) -> OfflineReport:
    """Return the report of a function that is imported in this process, with the device in place."""
    return _report(lambda: object_named(call)(), device, call)


def _report(step: Callable[[], object], device: DeviceSpec, name: str) -> OfflineReport:
    """Return the report of a function that runs in this process; its name is for messages.

    Raises:
        UsageError: it raises an error, or launches no kernel.
    """
    launches = dry_launches(step, device)
    if not launches:
        raise UsageError(
            f"The function must launch Triton kernels, but {name} launches none on "
            f"{device.name}. Call a public function of the library on tensors of `cuda`."
        )
    return OfflineReport(tables_of(launches, CompileTarget(device.limits, device), found=device))


def table(
    kernel: Any, signature: str, parameters: Mapping[str, Any] | None = None, *, device: DeviceSpec | str
) -> OfflineTable:
    """Return what every config of an autotuned kernel's list takes on a device, for arguments of these types.

    Args:
        kernel: the kernel, with its list of configs.
        signature: the types or values of its arguments in their order: `*bf16, *bf16, i32=1, none`.
        parameters: its constants that are neither in the list nor computed by heuristics.
        device: a DeviceSpec or a name, as `tune devices` lists them; it need not be here.

    Raises:
        UnknownDeviceError: no device has this name.
        UsageError: the kernel has no list, or a type or a constant is missing or names nothing.
    """
    spec = device_of(device)
    launch = listed_launch(kernel, signature, parameters or {}, spec.limits.cc)
    return tables_of([launch], CompileTarget(spec.limits, spec))[0]


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """The target of a compile: a compute capability, or a device."""

    limits: ComputeLimits
    device: DeviceSpec | None = None


def listed_launch(kernel: Any, signature: str, parameters: Mapping[str, Any], cc: tuple[int, int]) -> DryLaunch:
    """Return what the configs of a kernel's list compile for arguments of these types.

    Raises:
        UsageError: the kernel has no list, or a type or a constant is missing or names nothing.
    """
    tuner, types = tuner_in(kernel), positional_signature(kernel, signature)
    name = name_of(jitted_function(kernel))
    if tuner is None:
        raise UsageError(
            f"{name} has no list of configs to make a table of. Compile it by `compile`, with its constants."
        )
    configs = {}
    for listed in tuner.configs:
        config = launch_config(name, listed)
        spec = spec_offline(kernel, types, {**parameters, **_given_options(config, listed)})
        configs[config] = DryConfig(specialization_from(name, config, spec, cc))
    return DryLaunch(kernel=name, label="", listed=len(tuner.configs), configs=configs)


def _given_options(config: LaunchConfig, listed: Config) -> dict[str, Any]:
    """Return the parameters of a config, with those values that are not plain as they are."""
    return {**config.parameters, **listed.kwargs}


def tables_of(
    launches: Sequence[DryLaunch], target: CompileTarget, found: DeviceSpec | None = None
) -> tuple[OfflineTable, ...]:
    """Return the table of each launch, all of whose configs are compiled; found: the GPU that libraries find then."""
    ahead = CompileAhead(found=found)
    try:
        ended = _compiled(ahead, launches, target.limits.cc)
    finally:
        ahead.close()
    return tuple(_table(launch, compiled, target) for launch, compiled in zip(launches, ended, strict=True))


def _compiled(
    ahead: CompileAhead, launches: Sequence[DryLaunch], cc: tuple[int, int]
) -> list[dict[LaunchConfig, Compiled]]:
    """Return how the compiles of each launch's configs ended; all are under way at once."""

    def begun(kernel: str, recorded: DryConfig) -> Callable[[], Compiled]:
        if recorded.specialization is None:
            refused = Compiled(outcome=Outcome.COMPILE_ERROR, error=recorded.problem)
            return lambda: refused
        return ahead.begin(kernel, recorded.specialization, cc)

    waiting = [
        {config: begun(launch.kernel, recorded) for config, recorded in launch.configs.items()} for launch in launches
    ]
    with ThreadPoolExecutor(ahead.workers, "blocktune-compile") as threads:
        ended = [{config: threads.submit(wait) for config, wait in waits.items()} for waits in waiting]
        return [{config: future.result() for config, future in futures.items()} for futures in ended]


def _table(launch: DryLaunch, compiled: Mapping[LaunchConfig, Compiled], target: CompileTarget) -> OfflineTable:
    """Return the table of a launch."""
    limits, cc = target.limits, target.limits.cc
    specs = {
        config: recorded.specialization.spec
        for config, recorded in launch.configs.items()
        if recorded.specialization is not None and compiled[config].outcome is Outcome.OK
    }
    programs = {config: recorded.programs for config, recorded in launch.configs.items()}
    costs = {config: found for config, spec in specs.items() if (found := _costs(spec, programs[config], cc))}
    rows = rows_of(compiled, limits, programs, costs)
    first = min(rows, key=lambda row: row.rank).config
    return OfflineTable(
        kernel=launch.kernel,
        label=launch.label,
        limits=limits,
        device=target.device,
        rows=rows,
        listed=launch.listed,
        mix=mix_of(specs[first], cc) if first in specs else None,
    )


def _costs(spec: CompileSpec, programs: int | None, cc: tuple[int, int]) -> Costs | None:
    """Return the bytes and products of a launch, where its code tells them."""
    compiled = compiled_code(spec, cc)
    counts = counts_in(compiled.asm["ptx"], compiled.metadata.num_warps)
    if counts is None or programs is None:
        return None
    return Costs(bytes=counts.bytes * programs, flops=counts.flops * programs, source="its compiled code")
