"""Votes of contributed machines: each has one for every shape, the config that it found fastest.

A vote is `<machine>:<config>:<yyyymmdd>`, two hashes and the day of the measurement in UTC. Of two votes of one machine
the younger counts, in whatever order they come; of one day, that with the larger hash. The winner of a shape carries
the votes for all of its configs, so that a config that was passed over counts when a second machine finds it, too.
Where two machines vote for one config of one kernel source on the same kind of GPU, a row with that config is
`community`; until then it is `borrowed`.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC

from blocktune.db.records.records import AnyBest
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.values.config import Origin

AGREEING_MACHINES = 2
DAY = "%Y%m%d"
"""The form of a day."""

_DIGITS = 16
_FROM_ELSEWHERE = (Origin.COMMUNITY, Origin.BORROWED)


def vote_of(machine: str, best: AnyBest) -> str:
    """Return the vote of a machine, given by its hash, for the config of a winner."""
    return f"{machine}:{_config_hash(best)}:{best.created_at.astimezone(UTC):{DAY}}"


def day_of(vote: str) -> str:
    """Return the day of a vote, in the form `DAY`."""
    return vote.rpartition(":")[2]


def machines_of(bests: Iterable[AnyBest]) -> set[str]:
    """Return the hashes of the machines whose votes winners carry."""
    return {_machine(vote) for best in bests for vote in best.votes}


def with_all_votes(candidates: Sequence[AnyBest]) -> list[AnyBest]:
    """Return winners of one shape on one device, those from elsewhere with the votes of all and the origin that follows
    from them."""
    every = {vote for best in candidates for vote in best.votes}
    latest = {_machine(vote): vote for vote in sorted(every, key=lambda vote: (day_of(vote), vote))}
    votes = tuple(sorted(latest.values()))
    return [_counted(best, votes) if votes and best.origin in _FROM_ELSEWHERE else best for best in candidates]


def _counted(best: AnyBest, votes: tuple[str, ...]) -> AnyBest:
    """Return a winner from elsewhere with its votes and its origin."""
    agreeing = Counter(vote.split(":")[1] for vote in votes)[_config_hash(best)]
    origin = Origin.COMMUNITY if agreeing >= AGREEING_MACHINES else Origin.BORROWED
    return replace(best, votes=votes, origin=origin)


def _machine(vote: str) -> str:
    return vote.partition(":")[0]


def _config_hash(best: AnyBest) -> str:
    text = canonical_text({"config": best.config.to_json(), "kernel_hash": best.kernel_hash})
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
