"""`tune run --executor ray`: many shapes on the GPUs of a Ray cluster."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.render import note
from blocktune.cli.tune.run_many import jobs_of, share
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.text import counted

if TYPE_CHECKING:
    from blocktune.cli.tune.target import Target


class FleetEngine(StrEnum):
    """The engine that distributes many shapes."""

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChoice:
    """Which cluster, and which of its nodes. address: None starts Ray here. device: a name, `any`, or None."""

    address: str | None
    device: str | None
    excluded: tuple[str, ...]


def cluster_of(
    engine: FleetEngine,
    address: str | None,
    excluded: Sequence[str] | None,
    *,
    device: str | None,
    gpus: str | None,
    study: str | None,
) -> ClusterChoice | None:
    """Return the cluster that flags mean; None is this machine.

    Raises:
        UsageError: flags do not go together, or an exclusion is none.
    """
    from blocktune.tuner.fleet.preparation import require_exclusion

    if engine is FleetEngine.LOCAL:
        if address is not None or excluded:
            raise UsageError("`--address` and `--exclude` concern a cluster, but there is none. Add --executor ray.")
        return None
    if gpus is not None:
        raise UsageError("`--gpus` counts GPUs of this machine, but Ray uses all of its cluster. Leave it out.")
    if study is not None and "://" not in study:
        raise UsageError(f"All nodes reach the study of a cluster, but {study} is a file. Give a URL by --study.")
    for text in excluded or ():
        require_exclusion(text)
    return ClusterChoice(address=address, device=device, excluded=tuple(excluded or ()))


def run_on_cluster(
    shapes: "Sequence[Target]", db: str | None, as_json: bool, search: dict[str, Any], choice: ClusterChoice
) -> bool:
    """Tune shapes or calls on a cluster, each once for every chosen kind of GPU; returns whether the user cut it short.

    Raises:
        NoFeasibleConfigError: some shapes have no result; the others were tuned all the same.
        NoDeviceError: the cluster has no GPU of a kind that is known.
        StoreError: the store takes no results.
        UsageError: no cluster answers, or it has several kinds of GPU and none was chosen, or its nodes cannot keep
            what they measure.
    """
    from blocktune.kernels.hardware.device import limits_for, parse_cc
    from blocktune.tuner.cluster.connection import connect_cluster
    from blocktune.tuner.cluster.executor import RayExecutor

    _require_reachable(shapes, db)
    budget = search["budget"]
    search = search | {"budget": replace(budget, seconds=None)}  # the time is the run's, and shared out
    with connect_cluster(choice.address):
        kinds = _kinds(choice.device)
        note(f"{counted(len(shapes), 'shape')} on {' and '.join(f'{count} {kind}' for kind, count in kinds.items())}")
        jobs = [
            job for kind in kinds for job in jobs_of(shapes, db, search, kind, limits_for(parse_cc(kind.split("|")[1])))
        ]
        return share(RayExecutor(excluded=choice.excluded, seconds=budget.seconds), jobs, db, as_json)


def _require_reachable(targets: "Sequence[Target]", db: str | None) -> None:
    """Check that all nodes can keep what they measure.

    Raises:
        UsageError: calls of an autotuned kernel are tuned, whose results no document carries to a file.
    """
    from blocktune.db.tables.location import StoreTarget
    from blocktune.kernels.values.shape import AttentionShape

    target = StoreTarget.of(db)
    if target.path is not None and not all(isinstance(one, AttentionShape) for one in targets):
        raise UsageError(
            f"Nodes of a cluster keep results of autotuned kernels in a database server, but {target.label} is a file. "
            "Name a server by --db."
        )


def _kinds(name: str | None) -> dict[str, int]:
    """Return the kinds of GPU to tune for, and how many GPUs of each the cluster has now."""
    import ray

    from blocktune.tuner.cluster.connection import chosen_kinds, kinds_in, silent_nodes

    nodes = ray.nodes()
    for address in silent_nodes(nodes):
        start = 'ray start --resources="$(blocktune devices --ray)"'
        note(f"{address} is left out: it has GPUs, but was not started by {start}")
    present = kinds_in(nodes)
    return {kind: present.get(kind, 0) for kind in chosen_kinds(present, name)}
