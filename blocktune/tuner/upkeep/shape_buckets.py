"""Neighbouring shapes that one config serves at little loss, by what was measured of it on each of them.

Winners of neighbours often differ by less than the noise. Fewer configs mean fewer kernels to compile, to load and to
look after. A bucket is a run of neighbouring lengths of one kind of shape (equal but for batch, heads and lengths) with
a config that was timed on every one of them and loses no more than a bound on any; shapes without such evidence keep
their own winner. Taking in neighbours from the shortest on for as long as a common config is left gives the fewest
buckets that there can be.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from blocktune.db.exchange.document import shape_code, shape_order
from blocktune.db.records.records import Best, Outcome, Trial
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.upkeep.is_current import is_live

MAX_LOSS = 0.03
"""The loss that a bucket may cost by default, as a fraction of a shape's best time."""


@dataclass(frozen=True, slots=True)
class Member:
    """One shape of a bucket: its winner, the loss of the bucket's config against it (0.02 is 2 %), and the measured
    time of that config in microseconds."""

    best: Best
    loss: float
    time_us: float | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring shapes, shortest first, and the config that serves them all."""

    config: KernelConfig
    members: tuple[Member, ...]

    @property
    def largest_loss(self) -> float:
        return max(member.loss for member in self.members)

    def merge_winners(self) -> list[Best]:
        """Return the winners that change: this config, with its time, in place of the shape's own.

        They have no speed-up over the default, since no finals established one.
        """
        now = datetime.now(UTC)
        return [self._merge_winner(member, now) for member in self.members if member.best.config != self.config]

    def _merge_winner(self, member: Member, now: datetime) -> Best:
        return replace(
            member.best,
            config=self.config,
            kernel_hash=KERNELS[self.config.kernel].source_hash,
            time_us=member.time_us,
            predicted_us=None,
            speedup_over_default=None,
            speedup_low=None,
            speedup_high=None,
            created_at=now,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.members[0].best.device.key,
            "config": self.config.to_json(),
            "largest_loss": self.largest_loss,
            "shapes": [
                {"label": member.best.shape.label, "own": member.best.config.to_json(), "loss": member.loss}
                for member in self.members
            ],
        }


def choose_buckets(bests: Iterable[Best], trials: Iterable[Trial], *, max_loss: float = MAX_LOSS) -> list[Bucket]:
    """Return the buckets of measured winners, every one of which is in exactly one.

    Args:
        bests: winners of any devices; those that were not measured with the present kernels are left out.
        trials: what was measured on their shapes.
        max_loss: of any shape, as a fraction of its best time.
    """
    evidence = _evidence(trials)
    families: dict[tuple[Any, ...], list[Best]] = defaultdict(list)
    for best in bests:
        if best.origin is Origin.MEASURED and is_live(best):
            families[_family(best)].append(best)
    return [bucket for _, family in sorted(families.items()) for bucket in _partition(family, evidence, max_loss)]


_Timed = Mapping[KernelConfig, Trial]


def _evidence(trials: Iterable[Trial]) -> dict[tuple[str, AttentionShape, str], _Timed]:
    """Return the timed trials of the present kernels by device, shape and software: only within these are times
    comparable."""
    found: dict[tuple[str, AttentionShape, str], dict[KernelConfig, Trial]] = defaultdict(dict)
    for trial in trials:
        if trial.outcome is Outcome.OK and is_live(trial):
            found[trial.device.key, trial.shape, trial.environment.digest][trial.config] = trial
    return dict(found)


def _family(best: Best) -> tuple[Any, ...]:
    """Return what shapes that run the same code have in common, in an order of its own."""
    return best.device.key, shape_code(best.shape), best.shape.group_size


def _partition(
    family: Iterable[Best], evidence: Mapping[tuple[str, AttentionShape, str], _Timed], max_loss: float
) -> list[Bucket]:
    order = sorted(family, key=lambda best: (best.shape.seqlen_k, best.shape.seqlen_q, shape_order(best.shape)))
    buckets: list[list[dict[KernelConfig, Member]]] = []
    shared: set[KernelConfig] = set()
    for best in order:
        timed = evidence.get((best.device.key, best.shape, best.environment.digest), {})
        candidates = _candidates(best, timed, max_loss)
        if shared & candidates.keys():
            shared &= candidates.keys()
            buckets[-1].append(candidates)
        else:
            shared = set(candidates)
            buckets.append([candidates])
    return [_bucket(members) for members in buckets]


def _candidates(best: Best, timed: _Timed, max_loss: float) -> dict[KernelConfig, Member]:
    """Return the configs that lose no more than the bound on this shape; the winner itself is always one."""
    own = timed.get(best.config)
    found = {best.config: Member(best, 0.0, best.time_us)}
    if own is None:
        return found
    for config, trial in timed.items():
        loss = max(0.0, _relative(trial, own) - 1.0)
        if config != best.config and loss <= max_loss:
            found[config] = Member(best, loss, trial.time_us)
    return found


def _relative(trial: Trial, winner: Trial) -> float:
    """Return the time over the winner's, or over the anchor's in the same rounds where that is known, which cancels
    drift."""
    if trial.relative_to_anchor is not None and winner.relative_to_anchor is not None:
        return trial.relative_to_anchor / winner.relative_to_anchor
    assert trial.time_us is not None
    assert winner.time_us is not None
    return trial.time_us / winner.time_us


def _bucket(members: Sequence[Mapping[KernelConfig, Member]]) -> Bucket:
    """Return the bucket of these shapes, with the config of the least worst loss; of equals, of the least loss in
    all."""
    shared = set.intersection(*(set(candidates) for candidates in members))

    def cost(config: KernelConfig) -> tuple[float, float, str]:
        losses = [candidates[config].loss for candidates in members]
        return max(losses), sum(losses), config.label

    config = min(shared, key=cost)
    return Bucket(config, tuple(candidates[config] for candidates in members))
