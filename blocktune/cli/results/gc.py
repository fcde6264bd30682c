"""`tune gc`: drop what the database no longer needs."""

from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.output.render import print_json, say
from blocktune.cli.shared.options import AsJson, Database
from blocktune.cli.shared.stores import existing_store
from blocktune.kernels.values.text import counted

if TYPE_CHECKING:
    from blocktune.db.tables.cleaning import CleanCounts, Rules


def gc(
    apply: Annotated[bool, typer.Option("--apply", help="Drop them; without this flag they are only counted.")] = False,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Drop trials that cannot be compared with new ones. All winners stay.

    Those are trials of a kernel whose source has changed since, and trials by an older measuring protocol. `tune
    verify` uses them once more after an upgrade, so run that first.

    \b
    tune gc
    tune gc --apply
    """
    with existing_store(db, writes=True) as store:
        if store and apply:
            store.back_up()
        counts = store.clean(present_rules(), dry_run=not apply) if store else None
    if as_json:
        print_json({"applied": apply} | (counts.to_json() if counts else {}))
    elif counts is not None:
        _show(counts, apply)


def present_rules() -> "Rules":
    """Return the kernels and the protocol as they are now."""
    from blocktune.db.tables.cleaning import Rules
    from blocktune.kernels.registry import KERNELS
    from blocktune.tuner.measure.protocol import PROTOCOL_VERSION

    hashes = {name: kernel.source_hash for name, kernel in KERNELS.items()}
    return Rules(source_hashes=hashes, protocol=PROTOCOL_VERSION)


def _show(counts: "CleanCounts", applied: bool) -> None:
    word = "dropped" if applied else "would drop"
    say(f"{word} {counted(counts.dead_kernel, 'trial')} of kernels whose source has changed")
    say(f"{word} {counted(counts.old_protocol, 'trial')} by an older measuring protocol")
    say(f"{word} {counts.unreferenced:,} devices, shapes, configs, kernels and environments of these alone")
    say(f"kept {counted(counts.trials, 'trial')} and {counted(counts.bests, 'winner')}")
    if applied and counts.bytes_before:
        say(f"the file has {counts.bytes_after / 1e6:.1f} MB, before {counts.bytes_before / 1e6:.1f} MB")
    elif not applied:
        say("nothing was changed; `tune gc --apply` does it")
