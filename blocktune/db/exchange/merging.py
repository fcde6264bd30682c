"""Results from elsewhere: what of them is believed, and which of several winners of a shape stays."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from blocktune.db.exchange.votes import machines_of, with_all_votes
from blocktune.db.records.bulk_writer import BulkWriter
from blocktune.db.records.records import ORIGIN_RANK, AnyBest, AnyTrial, of_attention
from blocktune.kernels.values.config import Origin
from blocktune.runtime.autotuned.config import KernelProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Winners and trials from any number of devices, all kernels included."""

    bests: tuple[AnyBest, ...] = ()
    trials: tuple[AnyTrial, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportCounts:
    """How many records an import or a merge stored, and how many it left out because the store held better ones."""

    bests: int
    bests_kept: int
    trials: int
    trials_kept: int


def distrust_results(results: Results) -> Results:
    """Return the results of a stranger, as far as they are believed: a winner counts as borrowed until it was measured
    here, and no trial counts as made here. A stranger has the vote of one machine at most. Winners of autotuned kernels
    are left out, since production takes every stored one for a measurement."""
    keep_votes = len(machines_of(results.bests)) == 1
    bests = (
        replace(
            best,
            origin=Origin.BORROWED if best.origin in (Origin.MEASURED, Origin.COMMUNITY) else best.origin,
            votes=best.votes if keep_votes else (),
        )
        for best in of_attention(results.bests)
    )
    trials = (replace(trial, imported=True) for trial in results.trials)
    return Results(bests=tuple(bests), trials=tuple(trials))


def winner_of(candidates: Sequence[AnyBest]) -> AnyBest:
    """Return which of several winners of one shape on one device stays, in whatever order they come.

    Those of the best origin are left: measured, else community, borrowed, predicted, default. Of these, times of
    different software cannot be compared, so the youngest names the software (environment and kernel source) that
    counts. Of what that software gave, the fastest stays; of equals, the youngest. Times of two runs differ by several
    per cent when one GPU was warmer, so winners that were all timed together with the same default are compared by the
    ratio to it.
    """
    best_rank = min(ORIGIN_RANK[best.origin] for best in candidates)
    finest = [best for best in candidates if ORIGIN_RANK[best.origin] == best_rank]
    youngest = max(finest, key=lambda best: (best.created_at, best.environment.digest, best.config.label))
    comparable = [best for best in finest if _is_comparable(best, youngest)]
    default = youngest.default
    shared = default is not None and all(best.default == default and _over_default(best) < inf for best in comparable)
    slowness = _over_default if shared else _time
    return min(comparable, key=lambda best: (slowness(best), -best.created_at.timestamp(), best.config.label))


def _is_comparable(best: AnyBest, other: AnyBest) -> bool:
    same_source = best.config.kernel != other.config.kernel or best.kernel_hash == other.kernel_hash
    return best.environment == other.environment and same_source


def _time(best: AnyBest) -> float:
    time_us = best.predicted_us if best.time_us is None else best.time_us
    return inf if time_us is None else time_us


def _over_default(best: AnyBest) -> float:
    """Return its time over that of the default in the same final rounds."""
    if best.time_us is None or best.default_time_us is None:
        return inf
    return best.time_us / best.default_time_us


def merge_into(writer: BulkWriter, stored: Iterable[AnyBest], sources: Sequence[Results]) -> ImportCounts:
    """Write all sources' trials, and for every shape the best winner, stored ones included.

    Args:
        writer: of the store, in one transaction.
        stored: the winners that the store holds.
        sources: what comes to them, as far as it is believed.
    """
    offered_trials = [trial for source in sources for trial in source.trials]
    stored_trials = writer.put_newer_trials(offered_trials)
    held = {winner_key(best): best for best in stored}
    offered: dict[tuple[object, ...], list[AnyBest]] = defaultdict(list)
    for source in sources:
        for best in source.bests:
            offered[winner_key(best)].append(best)
    count = sum(len(bests) for bests in offered.values())
    changed = []
    for place, bests in offered.items():
        winner = winner_of(with_all_votes([*([held[place]] if place in held else []), *bests]))  # of equals, the stored
        if winner != held.get(place):
            changed.append(winner)
    writer.replace_bests(changed)
    return ImportCounts(
        bests=len(changed),
        bests_kept=count - len(changed),
        trials=stored_trials,
        trials_kept=len(offered_trials) - stored_trials,
    )


def winner_key(best: AnyBest) -> tuple[object, ...]:
    """Return what tells winners apart. Problems differ by their texts, since 1 and True are equal."""
    if isinstance(best.shape, KernelProblem):
        return best.device.key, best.shape.kernel, best.shape.document, best.kernel_hash
    return best.device.key, best.shape
