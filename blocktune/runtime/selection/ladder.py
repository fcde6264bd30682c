"""The ladder of sources that a config for a call may come from, and the climb down it, for all kernels.

    frozen            from a frozen file, or from rank 0; of autotuned kernels
    exact             measured for this call on this device, with this kernel source, triton, ptxas and driver
    other_driver      the same with another driver or power limit
    other_compiler    the same with another triton or ptxas
    other_source      the same with another version of the kernel's source; of attention
    same_capability   measured for this call elsewhere, on a device of this compute capability
    expected          expected to be the fastest by all that was measured on such a device; of attention
    nearest           measured for the nearest other call, by any of the above
    predicted         ranked by the offline model for this device; of attention
    default           the kernel's own default, or the first config of the list, which needs no tuning
    sdpa              PyTorch's scaled_dot_product_attention

Each kind of kernel brings its offers in its own order: fallback.py those of attention, runtime/autotuned those of
autotuned kernels.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Generic

from blocktune.kernels.values.config import Origin
from blocktune.runtime.store_reader.provenance import Reuse, nearest_rows
from blocktune.runtime.store_reader.tuned_config import ConfigT, ProblemT, TunedConfig

if TYPE_CHECKING:
    from blocktune.runtime.selection.expectation import Expectation


class Rung(StrEnum):
    """The steps of the ladder, best first."""

    FROZEN = "frozen"
    EXACT = "exact"
    OTHER_DRIVER = "other_driver"
    OTHER_COMPILER = "other_compiler"
    OTHER_SOURCE = "other_source"
    SAME_CAPABILITY = "same_capability"
    EXPECTED = "expected"
    NEAREST = "nearest"
    PREDICTED = "predicted"
    DEFAULT = "default"
    SDPA = "sdpa"

    def is_below(self, other: "Rung") -> bool:
        """Return whether this step is worse than another one."""
        return _PLACES[self] > _PLACES[other]


_PLACES = {rung: place for place, rung in enumerate(Rung)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Generic[ProblemT, ConfigT]):
    """A config that may serve a call.

    tuned_for: what it was tuned for, None for a default. time_us: as measured for that. reuse: how far that measurement
    is from this device and software. compared: what was expected of it and its rivals, in the order in which they are
    taken, where that decided.
    """

    rung: Rung
    config: ConfigT
    origin: Origin
    tuned_for: ProblemT | None = None
    time_us: float | None = None
    reuse: Reuse | None = None
    compared: "tuple[Expectation, ...]" = ()

    @classmethod
    def of(
        cls, rung: Rung, row: TunedConfig[ProblemT, ConfigT], origin: Origin | None = None
    ) -> "Candidate[ProblemT, ConfigT]":
        """Return the config of a row, which was tuned for the row's shape."""
        return Candidate(
            rung=rung,
            config=row.config,
            origin=origin or row.origin,
            tuned_for=row.shape,
            time_us=row.time_us,
            reuse=row.worth,
        )


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a source has no config to offer, or not this one."""

    rung: Rung
    reason: str

    def __str__(self) -> str:
        return f"{self.rung}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Offer(Generic[ProblemT, ConfigT]):
    """The offer of a source for a call. absence: the reason, if it has nothing."""

    rung: Rung
    candidates: Sequence[Candidate[ProblemT, ConfigT]]
    absence: str


class WinnerTable(Generic[ProblemT, ConfigT]):
    """Rows by what they are worth (None: predicted) and by shape. Where two rows agree in both, the first one wins.

    Args:
        rows: the recommendations of one device.
        kind: returns what neighbours must have in common.
        distance: returns how far two shapes of a kind are apart, None where they cannot share a config.
    """

    def __init__(
        self,
        rows: Iterable[TunedConfig[ProblemT, ConfigT]],
        kind: Callable[[ProblemT], Hashable],
        distance: Callable[[ProblemT, ProblemT], float | None],
    ) -> None:
        self._kind, self._distance = kind, distance
        self._by_shape: dict[tuple[Reuse | None, ProblemT], TunedConfig[ProblemT, ConfigT]] = {}
        self._by_kind: dict[tuple[bool, Hashable], list[TunedConfig[ProblemT, ConfigT]]] = {}
        for row in rows:
            if row.origin is not Origin.DEFAULT and self._by_shape.setdefault((row.worth, row.shape), row) is row:
                self._by_kind.setdefault((row.origin is Origin.PREDICTED, kind(row.shape)), []).append(row)

    def __len__(self) -> int:
        return len(self._by_shape)

    def of_shape(self, reuse: Reuse | None, shape: ProblemT) -> TunedConfig[ProblemT, ConfigT] | None:
        """Return the recommendation for exactly this shape that is worth this much."""
        return self._by_shape.get((reuse, shape))

    def neighbours(self, shape: ProblemT, *, predicted: bool = False) -> list[TunedConfig[ProblemT, ConfigT]]:
        """Return what was measured, or predicted, for other shapes of the same kind, nearest first."""
        found = [row for row in self._by_kind.get((predicted, self._kind(shape)), ()) if row.shape != shape]
        away = [(self._distance(row.shape, shape), row) for row in found]
        return nearest_rows((each, row.worth or Reuse.EXACT, row) for each, row in away if each is not None)

    def measured(self, shape: ProblemT, absences: dict[Reuse, str]) -> Iterator[Offer[ProblemT, ConfigT]]:
        """Yield what was measured for exactly this shape, by what it is worth, the best first.

        Args:
            shape: the shape.
            absences: what it may be worth, with what is said where there is no such measurement.
        """
        for reuse, absence in absences.items():
            row, rung = self.of_shape(reuse, shape), Rung(reuse)
            yield Offer(rung, () if row is None else (Candidate.of(rung, row),), absence)

    def nearest(self, shape: ProblemT, absence: str) -> Offer[ProblemT, ConfigT]:
        """Return what was measured for the nearest other shapes."""
        near = [Candidate.of(Rung.NEAREST, row, Origin.BORROWED) for row in self.neighbours(shape)]
        return Offer(Rung.NEAREST, near, absence)


def climb(
    offers: Iterable[Offer[ProblemT, ConfigT]],
    *,
    last: Rung = Rung.SDPA,
    refusal: str = "",
    fit: Callable[[Candidate[ProblemT, ConfigT]], Candidate[ProblemT, ConfigT] | str] = lambda candidate: candidate,
) -> Iterator[Candidate[ProblemT, ConfigT] | Rejection]:
    """Yield the configs to try for a call, best first, with the reasons of the sources and configs passed over.

    Args:
        offers: of the sources, in the order in which they are taken.
        last: the last source that may serve.
        refusal: why lower ones may not.
        fit: returns a candidate as it fits the call and the device, or why it does not.
    """
    for offer in offers:
        if offer.rung.is_below(last):
            yield Rejection(offer.rung, refusal)
            return
        if not offer.candidates:
            yield Rejection(offer.rung, offer.absence)
        for candidate in offer.candidates:
            fitted = fit(candidate)
            yield Rejection(offer.rung, fitted) if isinstance(fitted, str) else fitted
