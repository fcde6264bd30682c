"""`tune occupancy MODULE:KERNEL` and `tune explain MODULE:KERNEL`: a kernel that is compiled here, and explained."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from blocktune.cli.offline.tables import print_config_tables, print_mix
from blocktune.cli.output.render import microseconds, print_json, say
from blocktune.cli.shared.kernel_arguments import importable_from_here, parameter
from blocktune.cli.shared.kernels import print_trials, require_kernels

if TYPE_CHECKING:
    from blocktune.db.records.records import KernelBest
    from blocktune.kernels.hardware.device import ComputeLimits, DeviceSpec
    from blocktune.tuner.offline.code import OfflineCode


def compile_by_name(
    name: str, signature: str | None, options: Mapping[str, int | None], param: Sequence[str], limits: "ComputeLimits"
) -> "OfflineCode":
    """Return a function of `triton.jit`, found by its name, compiled with these types and constants.

    Raises:
        UsageError: there is no such function, or a type or constant is missing.
        NoFeasibleConfigError: it does not compile.
    """
    from blocktune.tuner.offline.code import compiled_offline
    from blocktune.tuner.offline.signature import positional_signature
    from blocktune.tuner.offline.specialization import object_named

    with importable_from_here():
        kernel = object_named(name)
        types = positional_signature(kernel, signature or "")
        return compiled_offline(kernel, types, _key_values(options, param), limits)


def has_list(name: str) -> bool:
    """Return whether a kernel has a list of configs of its own.

    Raises:
        UsageError: there is no such kernel.
    """
    from blocktune.runtime.autotuned.call import tuner_in
    from blocktune.tuner.offline.specialization import object_named

    with importable_from_here():
        return tuner_in(object_named(name)) is not None


def show_configs(
    name: str, signature: str | None, limits: "ComputeLimits", device: "DeviceSpec | None", *, as_json: bool
) -> None:
    """Compile every config of a kernel's list, and print what each takes and how many of its blocks fit.

    Raises:
        UsageError: a type is missing.
    """
    from blocktune.tuner.dry_run.explain import CompileTarget, listed_launch, tables_of
    from blocktune.tuner.offline.specialization import object_named

    with importable_from_here():
        launch = listed_launch(object_named(name), signature or "", {}, limits.cc)
        tables = tables_of([launch], CompileTarget(limits, device))
    if as_json:
        print_json(tables[0].to_json())
    else:
        print_config_tables(tables)


def explain_kernel(
    name: str,
    device: "DeviceSpec",
    db: str | None,
    signature: str | None,
    options: Mapping[str, int | None],
    param: Sequence[str],
    *,
    as_json: bool,
) -> None:
    """Compile the winner of each key of a kernel and say what limits it, what its code consists of, and what the others
    took.

    Raises:
        NothingMeasuredError: no winner is known.
        NoFeasibleConfigError: one does not compile.
        UsageError: the kernel cannot be imported, or a type or constant of the call is not known.
    """
    from blocktune.tuner.offline.code import compiled_offline, spec_offline
    from blocktune.tuner.offline.specialization import object_named
    from blocktune.tuner.profile.launch_evidence import LaunchEvidence
    from blocktune.tuner.report.importance import importance_text, kernel_importance

    found = require_kernels(db, device, name, with_trials=True)
    with importable_from_here():
        kernel, given = object_named(name), _key_values(options, param)
    explained = []
    for best, trials in found:
        types, constants = _winning_call(kernel, best, signature, given)
        code = compiled_offline(kernel, types, constants, device.limits)
        spec = spec_offline(kernel, types, constants)
        evidence = LaunchEvidence.of(spec, best.shape.problem, device, code.resources.tensor_cores)
        key = {"key": dict(best.shape.problem.arguments), "time_us": best.time_us}
        importance = kernel_importance(trials)
        explained.append(key | code_json(code) | evidence.to_json() | {"importance": importance})
        if not as_json:
            say(f"{best.shape.full_label} on {device.name}: {_source(best, given)}")
            say(str(code))
            say(evidence.words(None if _changes(best, given) else best.time_us))
            print_mix(evidence.mix)
            print_trials(trials)
            if importance:
                say(f"What decides whether a config is among the fastest tenth: {importance_text(importance)}.")
            say("")
    if as_json:
        print_json({"device": device.name, "winners": explained})


def _winning_call(
    kernel: Any, best: "KernelBest", signature: str | None, given: Mapping[str, Any]
) -> tuple[Mapping[str, str], dict[str, Any]]:
    """Return the types and constants of a winner's calls, with the values given in place of its own."""
    from blocktune.tuner.offline.signature import call_of_problem, positional_signature

    if signature is None:
        types, constants = call_of_problem(kernel, best.shape.problem)
    else:
        types, constants = positional_signature(kernel, signature), {}
    return types, constants | best.config.parameters | dict(given)


def _source(best: "KernelBest", given: Mapping[str, Any]) -> str:
    if _changes(best, given):
        return "the winner with the values given, which were not measured"
    return f"{best.config.label} took {microseconds(best.time_us)}"


def _changes(best: "KernelBest", given: Mapping[str, Any]) -> bool:
    """Return whether values given differ from those of a winner."""
    own = best.config.parameters
    return any(own.get(name, value) != value for name, value in given.items())


def _key_values(options: Mapping[str, int | None], param: Sequence[str]) -> dict[str, Any]:
    """Return options and constants by name; a constant may be a data type, a jitted function or a tuple.

    Raises:
        UsageError: a word has another form, or names nothing.
    """
    from blocktune.tuner.offline.arguments import UNKNOWN, constant_of

    found: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    for key, value in map(parameter, param):
        constant = constant_of(value) if isinstance(value, str) else value
        found[key] = value if constant is UNKNOWN else constant
    return found


def code_json(code: "OfflineCode") -> dict[str, Any]:
    """Return compiled code and its occupancy as plain values."""
    kernel = {"kernel": code.kernel, "parameters": dict(code.parameters)}
    return kernel | code.occupancy.to_json() | {"explanation": str(code)}
