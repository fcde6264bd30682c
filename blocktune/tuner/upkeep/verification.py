"""What a verification found: the winner before and after, and each config then and now."""

from dataclasses import dataclass
from typing import Any

from blocktune.db.records.records import Best, Outcome
from blocktune.kernels.values.config import KernelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """One config then and now.

    role: `winner`, else `default`, `paper rule` or `runner-up`.
    before_us, after_us: its times in microseconds; None where it has no time.
    problem: why it has no time now.
    """

    config: KernelConfig
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

    after: who wins now; None, and the winner forgotten, where it is wrong and nothing that was timed again is right.
    verified: whether the measuring decided; if not, the winner stays as it was stored. reason: of either.
    """

    before: Best
    after: Best | None
    rechecks: tuple[Recheck, ...]
    reason: str
    seconds: float
    verified: bool = False

    @property
    def wrong(self) -> bool:
        """Whether the stored winner computes a wrong result here."""
        return any(each.role == "winner" and each.outcome is Outcome.WRONG_RESULT for each in self.rechecks)

    def to_json(self) -> dict[str, Any]:
        after = self.after
        return {
            "shape": self.before.shape.to_json() | {"label": self.before.shape.label},
            "before": {"config": self.before.config.to_json(), "time_us": self.before.time_us},
            "after": None if after is None else {"config": after.config.to_json(), "time_us": after.time_us},
            "changed": after is None or after.config != self.before.config,
            "verified": self.verified,
            "reason": self.reason,
            "rechecks": [each.to_json() for each in self.rechecks],
            "seconds": round(self.seconds, 3),
        }
