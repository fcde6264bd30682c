"""`tune buckets`: one config for neighbouring shapes, where it costs little."""

import math
from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.output.render import note, percent, print_json, print_table
from blocktune.cli.shared.options import AsJson, Database, OnlyDevice
from blocktune.cli.shared.stores import existing_store
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.text import counted
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.tuner.upkeep.shape_buckets import Bucket

COLUMNS = ("device", "shapes", "from", "to", "config", "largest loss")


def buckets(
    loss: Annotated[float, typer.Option("--loss", help="Percent that a shape may lose at most.")] = 3.0,
    apply: Annotated[
        bool, typer.Option("--apply", help="Store each bucket's config; without this flag it is only reported.")
    ] = False,
    device: OnlyDevice = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Merge winners of neighbouring shapes that one config serves.

    A shape joins a bucket only when the bucket's config was timed on that very shape and loses no more than --loss
    against its winner. So complete searches merge best: tune run --exhaustive.

    \b
    tune buckets
    tune buckets --loss 1 --device h200
    tune buckets --apply
    """
    if not 0 <= loss < math.inf:
        raise UsageError(f"`--loss` must be a percentage from 0 on, but got {loss}.")
    only = choose_device(device) if device else None

    from blocktune.tuner.upkeep.shape_buckets import choose_buckets

    with existing_store(db, writes=apply) as store:
        bests = store.bests(only) if store else []
        found = choose_buckets(bests, store.trials(only) if store else (), max_loss=loss / 100)
        if store and apply:
            for best in (best for bucket in found for best in bucket.merge_winners()):
                store.set_best(best)
    if as_json:
        print_json(_summary(found, apply) | {"buckets": [bucket.to_json() for bucket in found]})
        return
    print_table(COLUMNS, [_row(bucket) for bucket in found])
    sums, members = _summary(found, apply), sum(len(bucket.members) for bucket in found)
    note(
        f"{counted(members, 'winner')} in {counted(len(found), 'bucket')}; configs: {sums['configs_before']} before, "
        f"{sums['configs_after']} after; the largest loss kept is {percent(sums['largest_loss'])}"
    )
    if len(bests) > members:
        note(f"left out, since not measured with the present kernels: {counted(len(bests) - members, 'winner')}")
    if not apply:
        note("nothing was changed; `tune buckets --apply` does it")


def _summary(found: "list[Bucket]", applied: bool) -> dict[str, int | float]:
    members = [member for bucket in found for member in bucket.members]
    return {
        "applied": applied,
        "shapes": len(members),
        "configs_before": len({member.best.config for member in members}),
        "configs_after": len({bucket.config for bucket in found}),
        "largest_loss": max((bucket.largest_loss for bucket in found), default=0.0),
    }


def _row(bucket: "Bucket") -> tuple[object, ...]:
    first, last = bucket.members[0].best, bucket.members[-1].best
    return (
        first.device.name,
        len(bucket.members),
        first.shape.label,
        last.shape.label if last is not first else "-",
        bucket.config.label,
        percent(round(bucket.largest_loss, 6)),
    )
