"""A predicted time and what it is made of."""

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBreakdown:
    """The prediction, in microseconds.

    Every term but the last three is what its unit would take if it alone worked, evenly on all SMs; they overlap, so
    that the total is less than their sum. shared_us: accesses of shared memory, where they are counted. latency_us:
    waiting of the resident warpgroups for no unit. edge_us: launches, and prologues and epilogues of blocks. tail_us:
    what an uneven last wave adds. beside_us: launches before and after that move bytes and compute next to nothing;
    nothing overlaps with them.
    """

    tensor_us: float
    exp_us: float
    arithmetic_us: float
    spill_us: float
    shared_us: float
    l2_us: float
    hbm_us: float
    latency_us: float
    edge_us: float
    tail_us: float
    beside_us: float = 0.0
    total_us: float

    @property
    def binding(self) -> str:
        """The largest term: `tensor`, `exp`, `arithmetic`, `spill`, `shared`, `l2`, `hbm`, `latency`, `edge`, `tail` or
        `beside`."""
        terms = {name.removesuffix("_us"): time for name, time in asdict(self).items() if name != "total_us"}
        return max(terms, key=lambda name: terms[name])

    def followed_by(self, second: "CostBreakdown | None") -> "CostBreakdown":
        """Return both launches, one after the other."""
        if second is None:
            return self
        return CostBreakdown(**{name: time + getattr(second, name) for name, time in asdict(self).items()})

    def beside(self, launches_us: float) -> "CostBreakdown":
        """Return the breakdown with launches before and after that take this long."""
        return replace(self, beside_us=self.beside_us + launches_us, total_us=self.total_us + launches_us)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"binding": self.binding}
