"""Which config serves a shape of attention: the offers of the ladder's sources, in the order in which they are taken.

A prediction of this very shape comes before `expected`, where there is that, since the same decision chose it with the
compiled code in hand. Every config is checked against the limits of this device before it counts. A strict caller goes
down no further than `exact`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.portable.decode.launch import EARLY, LATE
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.selection.expectation import Expectation
from blocktune.runtime.selection.ladder import Candidate, Offer, Rejection, Rung, WinnerTable, climb
from blocktune.runtime.selection.near_shapes import distance, representative
from blocktune.runtime.selection.untuned import Untuned
from blocktune.runtime.store_reader.provenance import Reuse
from blocktune.runtime.store_reader.tuned_config import TunedConfig

logger = logging.getLogger("blocktune")

MAX_DECIDED = 1024
"""Decisions for untuned shapes that a table keeps."""

DECODING, SHORT_DECODING = "flash_decode", "flash_decode8"
"""Every program of them computes its rows alone, and the second launch merges the splits in their order."""
FORWARD, PACKED = "flash_fwd_general", ("flash_fwd_hopper", "flash_fwd_general")
"""They split no keys, and compute each row alone. Tiles of the first depend on head dimensions and features alone."""

MANY_KEYS, MANY_QUERIES = 1 << 16, 1 << 12
"""Keys and queries of a packed sequence whose default is taken for every number of them: more keys change it as well,
where 128 does not divide them."""


class ConfigTable(WinnerTable):
    """The recommendations for one device.

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
        super().__init__(rows, _kind, distance)
        self._untuned, self.rival = untuned, rival
        self._decided: dict[AttentionShape, list[Expectation]] = {}

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
    """Yield the configs to try for a shape, best first, with the reasons of the sources and configs passed over.

    A rejection of `Rung.SDPA` is the last one: PyTorch's kernel is to serve the shape.

    Args:
        table: the recommendations for the device.
        shape: the shape.
        limits: of the device.
        strict: only what was measured for exactly this shape, device and software.
        block_sizes: queries and keys of a block of the block mask, if there is one: tiles have to divide them.
        competes: whether PyTorch's kernel may serve a shape of which nothing near was measured.
    """

    def fit(offer: Candidate) -> Candidate | str:
        candidate = offer if block_sizes is None else _within_blocks(offer, block_sizes)
        return _misfit(candidate.config, shape, limits) or candidate

    return climb(
        _offers(table, shape, limits, competes=competes),
        last=Rung.EXACT if strict else Rung.SDPA,
        refusal="only exact measurements are taken, since the dispatcher is strict",
        fit=fit,
    )


_ABSENCES = {
    Reuse.EXACT: "nothing was measured for this shape on this device with this kernel source, triton, ptxas and driver",
    Reuse.OTHER_DRIVER: "nor with another driver or power limit",
    Reuse.OTHER_COMPILER: "nor with another triton or ptxas",
    Reuse.OTHER_SOURCE: "nor with another version of the kernel's source",
    Reuse.SAME_CAPABILITY: "nor elsewhere, on a device of this compute capability",
}


def _offers(table: ConfigTable, shape: AttentionShape, limits: ComputeLimits, *, competes: bool) -> Iterator[Offer]:
    yield from table.measured(shape, _ABSENCES)
    reason = table.rival(shape) if competes and not table.neighbours(shape) else None
    if reason is not None:
        yield Offer(Rung.SDPA, (), reason)
        return
    same = table.of_shape(None, shape)
    predicted = [] if same is None else [Candidate.of(Rung.PREDICTED, same)]
    defaults = [kernel.default_config(shape, limits) for kernel in kernels_for(shape, limits)]
    expected = _best_candidates(table, shape, defaults)
    if expected:
        if predicted:  # by the same decision, which knew the compiled code
            yield Offer(Rung.PREDICTED, predicted, "")
            predicted = []
        yield Offer(Rung.EXPECTED, expected, "")
    yield table.nearest(shape, "nothing near was measured on a device of this compute capability")
    near = [Candidate.of(Rung.PREDICTED, row) for row in table.neighbours(shape, predicted=True)]
    yield Offer(Rung.PREDICTED, predicted + near, "the model ranked nothing near for this device")
    usual = [Candidate(rung=Rung.DEFAULT, config=one, origin=Origin.DEFAULT) for one in defaults]
    yield Offer(Rung.DEFAULT, usual, "no kernel computes this shape on this device")


def _best_candidates(table: ConfigTable, shape: AttentionShape, defaults: Sequence[KernelConfig]) -> list[Candidate]:
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


def fixed_splits(shape: AttentionShape, num_splits: int, limits: ComputeLimits) -> Iterator[Candidate | Rejection]:
    """Yield the configs with this number of splits, or why there are none: the defaults of this shape with a batch of
    one, whatever was measured. A row is then computed in the same steps whatever else is in the batch, and however long
    the longest sequence and the cache that it needs are. Without a cache there are no splits."""
    for name in _names(shape):
        kernel = get_kernel(name)
        problem = kernel.unsupported(shape, limits)
        if problem is None:
            config = kernel.default_config(_alone(shape), limits)
            if name not in PACKED:
                overlap = min(config.parameters["overlap"], EARLY) if num_splits > 1 else LATE  # one merge for all
                config = KernelConfig.of(name, {**config.parameters, "splits": num_splits, "overlap": overlap})
            problem = next(iter(kernel.violations(config, shape, limits)), None)
        if problem is not None:
            yield Rejection(Rung.DEFAULT, problem)
        else:
            yield Candidate(rung=Rung.DEFAULT, config=config, origin=Origin.DEFAULT)


def _names(shape: AttentionShape) -> tuple[str, ...]:
    """Return the kernels that compute the shape, best first."""
    if shape.features.varlen:
        return PACKED
    if not shape.features.cached:
        return (FORWARD,)
    return (SHORT_DECODING,) if shape.features.is_short else (DECODING,)


def _alone(shape: AttentionShape) -> AttentionShape:
    """Return the shape that stands for this one in every batch: without a window, which is no bound over a short cache,
    and causal where sequences are packed, which a single query is not."""
    features = replace(shape.features, window=None)
    alone = replace(shape, batch=1, seqlen_k=MANY_KEYS, features=features)
    if not features.varlen:
        return alone
    return replace(alone, seqlen_q=MANY_QUERIES, causal=Causal.LOWER_RIGHT)
