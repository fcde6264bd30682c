"""Which config serves a shape: the rungs from a measurement of exactly this shape down to PyTorch's own attention.

    exact       measured on this device, for this shape, kernel source and triton
    nearest     measured on this device, for the nearest other shape
    borrowed    measured with another kernel source or triton, or on another device of this compute capability
    predicted   ranked by the offline model for this device
    default     the kernel's own default, which needs no tuning
    sdpa        PyTorch's scaled_dot_product_attention

Every config is checked against the limits of this device before it counts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import log2
from typing import Any

from blocktune.kernels.config import KernelConfig, Origin, TunedConfig
from blocktune.kernels.device import ComputeLimits
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.shape import AttentionShape, Causal

MAX_DISTANCE = 6.0
"""How far a neighbour may be. Lengths a factor 8 away on both sides are; beyond it a default is the better guess."""

MAX_NEIGHBOURS = 4
"""How many neighbours a rung tries; each may cost a compilation when it fails at launch."""


class Rung(StrEnum):
    """The steps of the ladder, best first."""

    EXACT = "exact"
    NEAREST = "nearest"
    BORROWED = "borrowed"
    PREDICTED = "predicted"
    DEFAULT = "default"
    SDPA = "sdpa"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A config that fits the device. tuned_for is the shape it was tuned for, None for a default; time_us is the time
    measured for that shape."""

    rung: Rung
    config: KernelConfig
    origin: Origin
    tuned_for: AttentionShape | None = None
    time_us: float | None = None


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a rung has no config to offer, or not this one."""

    rung: Rung
    reason: str

    def __str__(self) -> str:
        return f"{self.rung}: {self.reason}"


class ConfigTable:
    """The recommendations for one device, by origin and shape. Where two rows agree in both, the first one wins."""

    def __init__(self, rows: Iterable[TunedConfig]) -> None:
        self._by_shape: dict[tuple[Origin, AttentionShape], TunedConfig] = {}
        self._by_kind: dict[tuple[Any, ...], list[TunedConfig]] = {}
        for row in rows:
            if self._by_shape.setdefault((row.origin, row.shape), row) is row:
                self._by_kind.setdefault((row.origin, *_kind(row.shape)), []).append(row)

    def __len__(self) -> int:
        return len(self._by_shape)

    def exact(self, origin: Origin, shape: AttentionShape) -> TunedConfig | None:
        return self._by_shape.get((origin, shape))

    def neighbours(self, origin: Origin, shape: AttentionShape) -> list[TunedConfig]:
        """Other shapes of the same kind, nearest first."""
        rows = self._by_kind.get((origin, *_kind(shape)), ())
        near = [(distance(row.shape, shape), index, row) for index, row in enumerate(rows) if row.shape != shape]
        return [row for far, _, row in sorted(near) if far <= MAX_DISTANCE][:MAX_NEIGHBOURS]


def _kind(shape: AttentionShape) -> tuple[Any, ...]:
    """What neighbours must have in common: it decides tile sizes and shared memory."""
    return shape.direction, shape.head_dim, shape.head_dim_v, shape.element_bytes, shape.features


def distance(a: AttentionShape, b: AttentionShape) -> float:
    """How much two shapes of a kind differ: doublings of their lengths, plus what the other differences weigh.

    A causal mask counts as three doublings since it halves the work and unbalances the blocks; the number of
    (batch, head) pairs only decides how full the last wave is.
    """
    lengths = abs(log2(a.seqlen_q / b.seqlen_q)) + abs(log2(a.seqlen_k / b.seqlen_k))
    waves = abs(log2(a.batch * a.num_heads / (b.batch * b.num_heads))) / 4
    masks = 3.0 if (a.causal is Causal.NONE) is not (b.causal is Causal.NONE) else 0.5 * (a.causal is not b.causal)
    groups = abs(log2(a.group_size / b.group_size)) / 2
    return lengths + waves + masks + groups + 0.25 * (a.dtype != b.dtype)


def climb_down(table: ConfigTable, shape: AttentionShape, limits: ComputeLimits) -> Iterator[Candidate | Rejection]:
    """The configs to try for a shape, best first, with the reasons of the rungs and configs passed over."""
    for rung, offers in _offers(table, shape, limits):
        if not offers:
            yield Rejection(rung, _EMPTY[rung])
        for offer in offers:
            reason = _misfit(offer.config, shape, limits)
            yield offer if reason is None else Rejection(rung, reason)


_EMPTY = {
    Rung.EXACT: "nothing was measured for this shape on this device with this kernel source and triton",
    Rung.NEAREST: "nothing near was measured on this device",
    Rung.BORROWED: "no other environment or device of this compute capability has a measurement near",
    Rung.PREDICTED: "the model ranked nothing near for this device",
    Rung.DEFAULT: "no kernel computes this shape on this device",
}


def _offers(table: ConfigTable, shape: AttentionShape, limits: ComputeLimits) -> Iterator[tuple[Rung, list[Candidate]]]:
    exact = table.exact(Origin.MEASURED, shape)
    yield Rung.EXACT, [] if exact is None else [_candidate(Rung.EXACT, exact)]
    yield (
        Rung.NEAREST,
        [_candidate(Rung.NEAREST, row, Origin.BORROWED) for row in table.neighbours(Origin.MEASURED, shape)],
    )
    for rung, origin in ((Rung.BORROWED, Origin.BORROWED), (Rung.PREDICTED, Origin.PREDICTED)):
        same = table.exact(origin, shape)
        rows = ([] if same is None else [same]) + table.neighbours(origin, shape)
        yield rung, [_candidate(rung, row) for row in rows]
    yield (
        Rung.DEFAULT,
        [
            Candidate(rung=Rung.DEFAULT, config=kernel.default_config(shape, limits), origin=Origin.DEFAULT)
            for kernel in kernels_for(shape, limits)
        ],
    )


def _candidate(rung: Rung, row: TunedConfig, origin: Origin | None = None) -> Candidate:
    return Candidate(
        rung=rung, config=row.config, origin=origin or row.origin, tuned_for=row.shape, time_us=row.time_us
    )


def _misfit(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> str | None:
    """Why the config cannot run this shape here, or None.

    A stored config may hold any number, or lack a parameter: whatever a kernel's rules raise over it is a reason too.
    """
    try:
        problems = get_kernel(config.kernel).violations(config, shape, limits)
    except Exception as error:
        return f"{config.label}: {type(error).__name__}: {error}"
    return f"{config.label}: {problems[0]}" if problems else None
