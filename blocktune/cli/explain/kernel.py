"""`tune occupancy MODULE:KERNEL` and `tune explain MODULE:KERNEL`: a kernel that is compiled here, and explained."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.render import microseconds, print_json, print_table, say
from blocktune.cli.shared.kernel_arguments import importable_from_here, parameter
from blocktune.cli.shared.kernels import print_trials, require_kernels
from blocktune.kernels.values.text import counted
from blocktune.runtime.autotuned.config import Plain

if TYPE_CHECKING:
    from blocktune.db.records.records import KernelBest
    from blocktune.kernels.hardware.device import ComputeLimits, DeviceSpec
    from blocktune.runtime.autotuned.config import LaunchConfig
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
    from blocktune.tuner.offline.specialization import function_named

    with importable_from_here():
        function = function_named(name)
    types = positional_signature(function, signature or "")
    return compiled_offline(function, types, _key_values(options, param), limits)


def listed_configs(name: str) -> "tuple[LaunchConfig, ...]":
    """Return the configs of a kernel's own list; none where it has no list.

    Raises:
        UsageError: there is no such kernel.
    """
    from blocktune.runtime.autotuned.call import tuner_in
    from blocktune.runtime.autotuned.config import launch_config
    from blocktune.tuner.offline.specialization import object_named

    with importable_from_here():
        tuner = tuner_in(object_named(name))
    return () if tuner is None else tuple(launch_config(name, config) for config in tuner.configs)


def show_configs(
    name: str, configs: "Sequence[LaunchConfig]", signature: str | None, limits: "ComputeLimits", *, as_json: bool
) -> None:
    """Compile every config of a kernel's list, and print what each takes and how many of its blocks fit.

    Raises:
        UsageError: a type is missing.
    """
    from blocktune.kernels.values.errors import NoFeasibleConfigError

    found: list[tuple[LaunchConfig, OfflineCode | str]] = []
    for config in configs:
        options = {str(key): value for key, value in config.parameters.items()}
        try:
            with importable_from_here():
                found.append((config, _compile_listed_configs(name, signature, options, limits)))
        except NoFeasibleConfigError as error:
            found.append((config, str(error)))
    if as_json:
        rows = [
            {"parameters": dict(config.parameters)} | ({"error": code} if isinstance(code, str) else code_json(code))
            for config, code in found
        ]
        print_json({"kernel": name, "cc": limits.name, "configs": rows})
        return
    title = f"{name}, compute capability {limits.name}: {counted(len(found), 'config')} of its list"
    print_table(CONFIG_COLUMNS, list(_config_rows(found)), title=title)


def _compile_listed_configs(
    name: str, signature: str | None, parameters: Mapping[str, Plain], limits: "ComputeLimits"
) -> "OfflineCode":
    from blocktune.tuner.offline.code import compiled_offline
    from blocktune.tuner.offline.signature import positional_signature
    from blocktune.tuner.offline.specialization import function_named

    function = function_named(name)
    return compiled_offline(function, positional_signature(function, signature or ""), parameters, limits)


def _config_rows(found: "Iterable[tuple[LaunchConfig, OfflineCode | str]]") -> Iterator[tuple[object, ...]]:
    """Yield a row for each config; code that an earlier config has too is said to be its."""
    first: dict[str | None, int] = {}
    for number, (config, code) in enumerate(found, 1):
        label = config.label.partition(" ")[2]
        if isinstance(code, str):
            yield number, label, "-", "-", "-", "-", "-", code
            continue
        taken, fit = code.resources, code.occupancy
        same = first.setdefault(taken.code_sha256, number)
        limits = " and ".join(str(name).replace("_", " ") for name in fit.binding)
        remark = f"the code of {same}" if same != number else f"limited by {limits}"
        cells = taken.registers, taken.spill_bytes, f"{taken.shared_bytes:,}", fit.blocks_per_sm
        yield number, label, *cells, f"{100 * fit.fraction:.0f} %", remark


CONFIG_COLUMNS = ("", "config", "registers", "spilled, B", "shared, B", "blocks/SM", "occupancy", "remark")


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
    """Compile the winner of each key of a kernel and say what limits it, next to what the others took.

    Raises:
        NothingMeasuredError: no winner is known.
        NoFeasibleConfigError: one does not compile.
        UsageError: the kernel cannot be imported, or a type or constant of the call is not known.
    """
    from blocktune.tuner.offline.specialization import function_named

    found = require_kernels(db, device, name, with_trials=True)
    with importable_from_here():
        function = function_named(name)
    given, explained = _key_values(options, param), []
    for best, trials in found:
        code = _compiled_winner(function, best, signature, given, device.limits)
        explained.append({"key": dict(best.shape.problem.arguments), "time_us": best.time_us, **code_json(code)})
        if not as_json:
            say(f"{best.shape.full_label} on {device.name}: {_source(best, given)}")
            say(str(code))
            print_trials(trials)
            say("")
    if as_json:
        print_json({"device": device.name, "winners": explained})


def _compiled_winner(
    function: Any, best: "KernelBest", signature: str | None, given: Mapping[str, Plain], limits: "ComputeLimits"
) -> "OfflineCode":
    from blocktune.tuner.offline.code import compiled_offline
    from blocktune.tuner.offline.signature import call_of_problem, positional_signature

    if signature is None:
        types, constants = call_of_problem(function, best.shape.problem)
    else:
        types, constants = positional_signature(function, signature), {}
    return compiled_offline(function, types, constants | best.config.parameters | dict(given), limits)


def _source(best: "KernelBest", given: Mapping[str, Plain]) -> str:
    own = best.config.parameters
    if any(own.get(name, value) != value for name, value in given.items()):
        return "the winner with the values given, which were not measured"
    return f"{best.config.label} took {microseconds(best.time_us)}"


def _key_values(options: Mapping[str, int | None], param: Sequence[str]) -> dict[str, Plain]:
    return {key: value for key, value in options.items() if value is not None} | dict(map(parameter, param))


def code_json(code: "OfflineCode") -> dict[str, Any]:
    """Return compiled code and its occupancy as plain values."""
    kernel = {"kernel": code.kernel, "parameters": dict(code.parameters)}
    return kernel | code.occupancy.to_json() | {"explanation": str(code)}
