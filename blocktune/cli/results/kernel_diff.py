"""`tune diff MODULE:KERNEL VERSION`: sources, winners and machine code of a kernel in another version and today."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.render import microseconds, note, print_json, print_table, say
from blocktune.cli.shared.kernel_arguments import importable_from_here
from blocktune.cli.shared.kernels import stored_kernels
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError

if TYPE_CHECKING:
    from blocktune.db.records.records import KernelBest
    from blocktune.kernels.hardware.device import DeviceSpec

Facts = dict[str, Any]
BEFORE, AFTER = "before", "after"
SHOWN = {
    "config": "config",
    "registers": "registers",
    "spill_bytes": "spilled bytes of a thread",
    "shared_bytes": "shared bytes",
    "blocks_per_sm": "blocks/SM",
}


@dataclass(frozen=True, slots=True)
class _Version:
    """A kernel, and the digest and the text of its sources."""

    kernel: Any
    digest: str
    text: str

    @classmethod
    def of(cls, kernel: Any) -> "_Version":
        from blocktune.kernels.base.source_hash import hash_of_sources, source_text
        from blocktune.runtime.autotuned.call import jitted_function

        function = jitted_function(kernel)
        return cls(kernel, hash_of_sources(function), source_text((function,)))


def diff_kernel(name: str, place: str, device: "DeviceSpec", db: str | None, *, as_json: bool) -> None:
    """Compare a kernel of a git revision or a file with today's: its sources, and for each key that was tuned the
    winners, their times and what they compile to.

    Raises:
        UsageError: there is no such kernel, revision or file.
    """
    from blocktune.tuner.offline.specialization import object_named
    from blocktune.tuner.offline.versions import kernel_version

    with importable_from_here(), kernel_version(name, place) as earlier:
        versions = {BEFORE: _Version.of(earlier), AFTER: _Version.of(object_named(name))}
        known = [best for best, _ in stored_kernels(db, device, name)]
        keys = {label: _compared(versions, own, device) for label, own in _by_key(known, versions).items()}
    old, new = (version.text.splitlines() for version in versions.values())
    source = list(difflib.unified_diff(old, new, place, "today", lineterm=""))
    if as_json:
        found = [{"key": label, **facts} for label, facts in keys.items()]
        print_json({"kernel": name, "device": device.name, "source": source, "keys": found})
        return
    say("\n".join(source) or f"{name} has the same source in {place}.")
    for label, facts in keys.items():
        _show(f"\n{label} on {device.name}", place, facts)
    if not keys:
        note(f"No winner of either version is known on {device.name}, so only the sources are compared.")


def _by_key(known: "Iterable[KernelBest]", versions: Mapping[str, _Version]) -> "dict[str, dict[str, KernelBest]]":
    """Return the winners of the versions that have one, by their key."""
    found: dict[str, dict[str, KernelBest]] = {}
    for best in known:
        for which, version in versions.items():
            if best.kernel_hash == version.digest:
                found.setdefault(best.shape.full_label, {})[which] = best
    return found


def _compared(
    versions: Mapping[str, _Version], winners: "Mapping[str, KernelBest]", device: "DeviceSpec"
) -> dict[str, Facts]:
    """Return the facts of each version with its winner, or with the other one's where only that was tuned."""
    other = next(iter(winners.values()))
    return {
        which: {"time_us": winners[which].time_us if which in winners else None}
        | _compiled(version.kernel, winners.get(which, other), device)
        for which, version in versions.items()
    }


def _compiled(kernel: Any, best: "KernelBest", device: "DeviceSpec") -> Facts:
    """Return what a version of a kernel compiles to with a config, or why it does not."""
    from blocktune.tuner.offline.code import compiled_offline, spec_offline
    from blocktune.tuner.offline.signature import call_of_problem
    from blocktune.tuner.profile.instruction_mix import mix_of

    found: dict[str, Any] = {"config": best.config.label}
    try:
        types, constants = call_of_problem(kernel, best.shape.problem)
        constants |= best.config.parameters
        code = compiled_offline(kernel, types, constants, device.limits)
    except (UsageError, NoFeasibleConfigError) as error:  # such as other arguments
        return found | {"problem": str(error)}
    mix = mix_of(spec_offline(kernel, types, constants), device.limits.cc)
    return found | {
        "registers": code.resources.registers,
        "spill_bytes": code.resources.spill_bytes,
        "shared_bytes": code.resources.shared_bytes,
        "blocks_per_sm": code.occupancy.blocks_per_sm,
        "code": code.resources.code_sha256,
        "instructions": mix.total,
    }


def _show(title: str, place: str, facts: Mapping[str, Facts]) -> None:
    """Print a row for each fact of the two versions."""
    both = facts[BEFORE], facts[AFTER]
    mixes = [one.get("instructions", {}) for one in both]
    rows = [("time of the winner", *(microseconds(one["time_us"]) for one in both))]
    rows += [(words, *(str(one.get(name, "-")) for one in both)) for name, words in SHOWN.items()]
    rows += [
        (f"instructions: {kind}", *(str(mix.get(kind, "-")) for mix in mixes))
        for kind in max(mixes, key=len)
        if any(mix.get(kind) for mix in mixes)
    ]
    say(title)
    print_table(("", place, "today"), rows)
    for which, one in zip((place, "today"), both, strict=True):
        if "problem" in one:
            say(f"{which}: {one['problem']}")
    if both[0].get("code") and both[0].get("code") == both[1].get("code"):
        say("Both compile to the same machine code.")
