"""Which config serves a shape: the rungs from a measurement of exactly this shape down to PyTorch's own attention.

    exact             measured for this shape on this device, with this kernel source, triton, ptxas and driver
    other_driver      the same with another driver or power limit
    other_compiler    the same with another triton or ptxas
    other_source      the same with another version of the kernel's source
    same_capability   measured for this shape elsewhere, on a device of this compute capability
    expected          not measured, but expected to be the fastest by all that was measured on such a device
    nearest           measured for the nearest other shape, by any of the above
    predicted         ranked by the offline model for this device; of this very shape before `expected`, where there is
                      that, since the same decision chose it with the compiled code in hand
    default           the kernel's own default, which needs no tuning
    sdpa              PyTorch's scaled_dot_product_attention

Every config is checked against the limits of this device before it counts. A strict caller goes down no further than
`exact`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.selection.expectation import Expectation
from blocktune.kernels.selection.near_shapes import distance, representative
from blocktune.kernels.selection.untuned import Untuned
from blocktune.kernels.stored.provenance import Reuse, nearest_rows
from blocktune.kernels.stored.tuned_config import TunedConfig
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape

logger = logging.getLogger("blocktune")

MAX_DECIDED = 1024
"""Decisions for untuned shapes that a table keeps."""


class Rung(StrEnum):
    """The steps of the ladder, best first."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A config that fits the device. tuned_for is the shape it was tuned for, None for a default; time_us is the time
    measured for that shape, and reuse how far that measurement is from this device and software. compared: what was
    expected of it and its rivals, in the order in which they are taken, where that decided."""

    rung: Rung
    config: KernelConfig
    origin: Origin
    tuned_for: AttentionShape | None = None
    time_us: float | None = None
    reuse: Reuse | None = None
    compared: tuple[Expectation, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a rung has no config to offer, or not this one."""

    rung: Rung
    reason: str

    def __str__(self) -> str:
        return f"{self.rung}: {self.reason}"


class ConfigTable:
    """The recommendations for one device, by what they are worth (None: predicted) and shape. Where two rows agree in
    both, the first one wins.

    Args:
        rows: the recommendations.
        untuned: brings what decides for shapes without any, or None where nothing does.
        rival: says why PyTorch's kernel should serve a shape without any; None where ours should.
    """

    def __init__(
        self,
        rows: Iterable[TunedConfig],
        untuned: Callable[[], Untuned | None] = lambda: None,
        rival: Callable[[AttentionShape], str | None] = lambda shape: None,
    ) -> None:
        self._untuned, self.rival = untuned, rival
        self._decided: dict[AttentionShape, list[Expectation]] = {}
        self._by_shape: dict[tuple[Reuse | None, AttentionShape], TunedConfig] = {}
        self._by_kind: dict[tuple[Any, ...], list[TunedConfig]] = {}
        for row in rows:
            if row.origin is not Origin.DEFAULT and self._by_shape.setdefault((row.worth, row.shape), row) is row:
                self._by_kind.setdefault((row.origin is Origin.PREDICTED, *_kind(row.shape)), []).append(row)

    def __len__(self) -> int:
        return len(self._by_shape)

    def of_shape(self, reuse: Reuse | None, shape: AttentionShape) -> TunedConfig | None:
        """Return the recommendation for exactly this shape that is worth this much."""
        return self._by_shape.get((reuse, shape))

    def neighbours(self, shape: AttentionShape, *, predicted: bool = False) -> list[TunedConfig]:
        """Return what was measured, or predicted, for other shapes of the same kind, nearest first."""
        found = [row for row in self._by_kind.get((predicted, *_kind(shape)), ()) if row.shape != shape]
        return nearest_rows((distance(row.shape, shape), row.worth or Reuse.EXACT, row) for row in found)

    def expected(self, shape: AttentionShape) -> list[Expectation]:
        """Return what the configs for a shape that was not measured are expected to take, the one to take first."""
        untuned, decided_for = self._untuned(), representative(shape)
        if untuned is None:
            return []
        if decided_for not in self._decided:
            if len(self._decided) >= MAX_DECIDED:
                self._decided.clear()
            self._decided[decided_for] = untuned.choices(decided_for, self.neighbours(decided_for))
        return self._decided[decided_for]


def _kind(shape: AttentionShape) -> tuple[Any, ...]:
    """Return what neighbours must have in common: it decides tile sizes and shared memory."""
    return shape.direction, shape.head_dim, shape.head_dim_v, shape.element_bytes, shape.features


def climb_down(
    table: ConfigTable,
    shape: AttentionShape,
    limits: ComputeLimits,
    *,
    strict: bool = False,
    block_sizes: tuple[int, int] | None = None,
    competes: bool = True,
) -> Iterator[Candidate | Rejection]:
    """Yield the configs to try for a shape, best first, with the reasons of the rungs and configs passed over.

    A rejection of `Rung.SDPA` is the last one: PyTorch's kernel is to serve the shape.

    Args:
        table: the recommendations for the device.
        shape: the shape.
        limits: of the device.
        strict: only what was measured for exactly this shape, device and software.
        block_sizes: queries and keys of a block of the block mask, if there is one: tiles have to divide them.
        competes: whether PyTorch's kernel may serve a shape of which nothing near was measured.
    """
    for rung, offers in _offers(table, shape, limits):
        is_unknown = competes and not strict and rung not in _MEASURED and not table.neighbours(shape)
        reason = table.rival(shape) if is_unknown else None
        if reason is not None:
            yield Rejection(Rung.SDPA, reason)
            return
        if strict and rung is not Rung.EXACT:
            yield Rejection(rung, "only exact measurements are taken, since the dispatcher is strict")
            return
        if not offers:
            yield Rejection(rung, _EMPTY[rung])
        for offer in offers:
            candidate = offer if block_sizes is None else _within_blocks(offer, block_sizes)
            reason = _misfit(candidate.config, shape, limits)
            yield candidate if reason is None else Rejection(rung, reason)


_MEASURED = frozenset(map(Rung, Reuse))

_EMPTY = {
    Rung.EXACT: "nothing was measured for this shape on this device with this kernel source, triton, ptxas and driver",
    Rung.OTHER_DRIVER: "nor with another driver or power limit",
    Rung.OTHER_COMPILER: "nor with another triton or ptxas",
    Rung.OTHER_SOURCE: "nor with another version of the kernel's source",
    Rung.SAME_CAPABILITY: "nor elsewhere, on a device of this compute capability",
    Rung.NEAREST: "nothing near was measured on a device of this compute capability",
    Rung.PREDICTED: "the model ranked nothing near for this device",
    Rung.DEFAULT: "no kernel computes this shape on this device",
}


def _offers(table: ConfigTable, shape: AttentionShape, limits: ComputeLimits) -> Iterator[tuple[Rung, list[Candidate]]]:
    for reuse in Reuse:
        same = table.of_shape(reuse, shape)
        yield Rung(reuse), [] if same is None else [_candidate(Rung(reuse), same)]
    same = table.of_shape(None, shape)
    predicted = [] if same is None else [_candidate(Rung.PREDICTED, same)]
    defaults = [kernel.default_config(shape, limits) for kernel in kernels_for(shape, limits)]
    expected = _expected(table, shape, defaults)
    if expected:
        if predicted:  # by the same decision, which knew the compiled code
            yield Rung.PREDICTED, predicted
            predicted = []
        yield Rung.EXPECTED, expected
    yield Rung.NEAREST, [_candidate(Rung.NEAREST, row, Origin.BORROWED) for row in table.neighbours(shape)]
    near = [_candidate(Rung.PREDICTED, row) for row in table.neighbours(shape, predicted=True)]
    yield Rung.PREDICTED, predicted + near
    yield Rung.DEFAULT, [Candidate(rung=Rung.DEFAULT, config=one, origin=Origin.DEFAULT) for one in defaults]


def _expected(table: ConfigTable, shape: AttentionShape, defaults: Sequence[KernelConfig]) -> list[Candidate]:
    """Return the configs that are expected to be the fastest, the one to take first; none where that is not known."""
    try:
        compared = tuple(table.expected(shape))
    except Exception as error:  # a correction may be broken, and a kernel of the user may not suit the model
        logger.warning("Expected times of %s are not known: %s: %s", shape.label, type(error).__name__, error)
        return []
    return [
        Candidate(
            rung=Rung.EXPECTED,
            config=one.config,
            origin=Origin.DEFAULT if one.config in defaults else Origin.BORROWED,
            compared=(one, *(other for other in compared if other is not one)),
        )
        for one in compared
    ]


def _candidate(rung: Rung, row: TunedConfig, origin: Origin | None = None) -> Candidate:
    return Candidate(
        rung=rung,
        config=row.config,
        origin=origin or row.origin,
        tuned_for=row.shape,
        time_us=row.time_us,
        reuse=row.worth,
    )


def _within_blocks(offer: Candidate, block_sizes: tuple[int, int]) -> Candidate:
    """Return the offer with tiles no larger than the blocks (queries, keys), whose sizes are no part of a shape, nor of
    what is tuned. Sizes are powers of two, so that the tiles divide the blocks then. A changed config was not measured,
    and counts as a default."""
    block_q, block_k = block_sizes
    most = {"block_m": block_q, "block_n": block_k, "kv_block_m": block_q, "kv_block_n": block_k}
    parameters = {name: min(value, most.get(name, value)) for name, value in offer.config.parameters.items()}
    config = KernelConfig.of(offer.config.kernel, parameters)
    return offer if config == offer.config else Candidate(rung=Rung.DEFAULT, config=config, origin=Origin.DEFAULT)


def _misfit(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> str | None:
    """Return why the config cannot run this shape here, or None.

    A stored config may hold any number, or lack a parameter: whatever a kernel's rules raise over it is a reason too.
    """
    try:
        problems = get_kernel(config.kernel).violations(config, shape, limits)
    except Exception as error:
        return f"{config.label}: {type(error).__name__}: {error}"
    return f"{config.label}: {problems[0]}" if problems else None
