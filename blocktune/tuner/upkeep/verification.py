"""The result of a verification: the winner before and after, and each config then and now."""

from dataclasses import dataclass
from typing import Any

from blocktune.db.records.records import AnyBest, Outcome, problem_json
from blocktune.kernels.values.config import KernelConfig
from blocktune.runtime.autotuned.config import LaunchConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """One config then and now.

    role: `winner`, else `default`, `FA heuristic` or `runner-up`.
    before_us, after_us: its times in microseconds; None where it has no time.
    problem: why it has no time now.
    """

    config: KernelConfig | LaunchConfig
    role: str
    before_us: float | None
    after_us: float | None
    outcome: Outcome
    problem: str = ""

    @property
    def ratio(self) -> float | None:
        """The time now over the time then."""
        return self.after_us / self.before_us if self.before_us and self.after_us else None

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.config.to_json(),
            "role": self.role,
            "before_us": self.before_us,
            "after_us": self.after_us,
            "ratio": self.ratio,
            "outcome": str(self.outcome),
            "problem": self.problem,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """One winner, verified.

    label: of its shape or call. before: None where a call was measured for the first time.
    after: who wins now; None, and the winner forgotten, where it is wrong and nothing that was timed again is right.
    verified: whether the measuring decided; if not, the winner stays as it was stored. reason: of either.
    """

    label: str
    before: AnyBest | None
    after: AnyBest | None
    rechecks: tuple[Recheck, ...]
    reason: str
    seconds: float
    verified: bool = False

    @property
    def wrong(self) -> bool:
        """Whether the stored winner computes a wrong result here."""
        return any(each.role == "winner" and each.outcome is Outcome.WRONG_RESULT for each in self.rechecks)

    def to_json(self) -> dict[str, Any]:
        before, after = self.before, self.after
        known = before or after
        assert known is not None
        return {
            "shape": problem_json(known.shape) | {"label": self.label},
            "before": _winner_json(before),
            "after": _winner_json(after),
            "changed": before is None or after is None or after.config != before.config,
            "verified": self.verified,
            "reason": self.reason,
            "rechecks": [each.to_json() for each in self.rechecks],
            "seconds": round(self.seconds, 3),
        }


def _winner_json(best: AnyBest | None) -> dict[str, Any] | None:
    return None if best is None else {"config": best.config.to_json(), "time_us": best.time_us}
