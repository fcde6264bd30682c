"""PyTorch's own attention as a candidate: how long calls took by our kernels next to it, on a device that was measured.

Drawn calls were timed in turns with the kernel that PyTorch chooses by itself (`DEVICE.speed-fuzz.json`). The ratio of
a shape follows from the near ones of its class. PyTorch serves a call unless our kernel is expected to be faster by
the spread of those, and on devices where nothing was measured.
"""

import heapq
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from operator import itemgetter
from typing import Any

from blocktune.kernels.files.reading import read_resource
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.limits import limits_for, parse_cc
from blocktune.kernels.registry import default_kernel
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import ELEMENT_BYTES, FP8, AttentionShape, Causal, Direction
from blocktune.runtime.selection.correction import measured_elsewhere, shipped_correction
from blocktune.runtime.store_reader.export_file import SHIPPED_RESULTS

FORMAT, SCHEMA = "blocktune-speed-fuzz", 1
SUFFIX = ".speed-fuzz.json"

NEAREST = 6
"""Timed shapes that an outlook rests on. By leave-one-out over 2,930 calls 4 of them leave 33 calls of ours slower by 3
% and 1 us, 6 leave 29."""

MIN_SHAPES = 3
"""Shapes of the class that must have been timed."""

MAX_SCORES_BYTES = 1 << 30
"""Memory that PyTorch may take for the scores of a call of which it has no fused kernel."""

FEW_QUERIES = 32
"""Of a forward with more keys than these: calls with fewer are decoding's."""

WIDTH_WEIGHT = 3.0
"""Doublings of distance that one doubling of a head dimension counts as: it decides which tiles fit."""

CAUTION = 1.0
"""Spreads by which our kernel must be expected to be faster. By leave-one-out over 2,930 calls 29 calls of ours are
slower by 3 % and 1 us then, for 42 at half the caution and 92 without a rival; the mean over PyTorch is 1.55 for 1.59
at half the caution."""

PYTORCHS_FEATURES = frozenset({str(MaskKind.BOOLEAN), str(MaskKind.ADDITIVE), "deterministic"})
"""Features that PyTorch has kernels for. Dropped pairs are its own: a call with dropout stays where it is."""


SPLIT_FORWARD = "flash_fwd_hopper_split"
"""The kernel of shapes with few tiles, of which other shapes say nothing."""


@dataclass(frozen=True, slots=True)
class PyTorchDuel:
    """A shape, with our kernel's time and PyTorch's in microseconds. is_split: that kernel is `SPLIT_FORWARD`."""

    shape: AttentionShape
    ours_us: float
    pytorch_us: float
    is_split: bool = False


@dataclass(frozen=True, slots=True)
class Outlook:
    """The outlook for a shape: our time over PyTorch's, its relative spread, and on how many shapes both rest."""

    ratio: float
    spread: float
    shapes: int

    @property
    def is_slower(self) -> bool:
        """Whether PyTorch's kernel may well be faster."""
        return math.log(self.ratio) + CAUTION * self.spread > 0


class PytorchRival:
    """Measured times of PyTorch's attention on one device."""

    def __init__(self, duels: Iterable[PyTorchDuel]) -> None:
        self._by_class: dict[tuple[Any, ...], list[PyTorchDuel]] = {}
        for duel in duels:
            self._by_class.setdefault(_class_of(duel.shape, duel.is_split), []).append(duel)

    def outlook(self, shape: AttentionShape, *, is_split: bool = False) -> Outlook | None:
        """Return what the nearest shapes of its class say of a shape; None where too few were timed. is_split: as of
        `PyTorchDuel`."""
        timed = self._by_class.get(_class_of(shape, is_split), ())
        apart = ((_distance(duel.shape, shape), duel) for duel in timed)
        nearest = heapq.nsmallest(NEAREST, apart, key=itemgetter(0))
        if len(nearest) < MIN_SHAPES:
            return None
        weights = [math.exp(nearest[0][0] - away) for away, _ in nearest]
        logs = [math.log(duel.ours_us / duel.pytorch_us) for _, duel in nearest]
        mean = _weighted_mean(logs, weights)
        spread = math.sqrt(_weighted_mean([(one - mean) ** 2 for one in logs], weights))
        return Outlook(ratio=math.exp(mean), spread=spread, shapes=len(nearest))


def _weighted_mean(values: list[float], weights: list[float]) -> float:
    """Return the mean. The module `statistics` would make a first call slower by its import."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def reason_for_pytorch(shape: AttentionShape, device_key: str) -> str | None:
    """Return why PyTorch's kernel should serve an untuned call that it computes as well; None where ours should."""
    if shape.features.names - PYTORCHS_FEATURES or shape.dtype == FP8 or shape.causal is Causal.LOWER_RIGHT:
        return None
    is_fused = _is_fused(shape)
    if not is_fused and scores_bytes(shape) > MAX_SCORES_BYTES:
        return None
    if shipped_correction(device_key) is None:
        reason = "no kernel was measured on such a device, so PyTorch's choice serves until `tune run` stores a result"
        return reason if is_fused else None
    few_queries = _has_few_queries(shape.direction, shape.seqlen_q, shape.seqlen_k)
    rival = shipped_rival(device_key, shape.direction, shape.element_bytes, few_queries)
    outlook = None if rival is None else rival.outlook(shape, is_split=_is_split(shape, device_key))
    if outlook is None or not outlook.is_slower:
        return None
    return (
        f"PyTorch's kernel may be faster: ours took {outlook.ratio:.2f} times as long, with a spread of "
        f"{100 * outlook.spread:.0f} %, in {outlook.shapes} of the nearest shapes that were timed next to it"
    )


def rival_on(device: DeviceSpec) -> Callable[[AttentionShape], str | None]:
    """Return `reason_for_pytorch` for a device."""
    return partial(reason_for_pytorch, device_key=device.key)


@cache
def shipped_rival(device_key: str, direction: Direction, element_bytes: int, few_queries: bool) -> PytorchRival | None:
    """Return what ships of such calls for a device, or for the one whose correction it takes; None without such a file.

    Raises:
        UsageError: the file is broken.
    """
    wanted = direction, element_bytes, few_queries
    records = _shipped_records(device_key)
    if records is None:
        return None
    near = (record for record in records if _kind_of(record["shape"]) == wanted)  # to read a shape takes 25 us
    return PytorchRival(duel for record in near if (duel := _duel_of(record)) is not None)


@cache
def _shipped_records(device_key: str) -> list[Mapping[str, Any]] | None:
    name = measured_elsewhere(device_key) or device_key.split("|")[0]
    entry = resources.files(SHIPPED_RESULTS) / f"{name.removeprefix('nvidia ').split()[0]}{SUFFIX}"
    if not entry.is_file():
        return None
    document = json.loads(read_resource(entry))
    if document.get("format") != FORMAT:
        raise UsageError(f"{entry.name} must have the format {FORMAT!r}, but got {document.get('format')!r:.80}.")
    records: list[Mapping[str, Any]] = document["cases"]
    return records


def _kind_of(shape: Mapping[str, Any]) -> tuple[str, int, bool]:
    """Return direction, element bytes and whether queries are few, of a shape as `to_json` wrote it."""
    direction, seqlen_q, seqlen_k = shape["direction"], shape["seqlen_q"], shape["seqlen_k"]
    return direction, ELEMENT_BYTES[shape["dtype"]], _has_few_queries(direction, seqlen_q, seqlen_k)


def _duel_of(record: Mapping[str, Any]) -> PyTorchDuel | None:
    """Return the duel of a record; None for a call that one of the two refused."""
    if record["error"]:
        return None
    shape, is_split = AttentionShape.from_json(record["shape"]), record.get("kernel") == SPLIT_FORWARD
    return PyTorchDuel(shape, record["ours_us"], record["pytorch_us"], is_split)


def _is_split(shape: AttentionShape, device_key: str) -> bool:
    """Return whether a device computes a shape by `SPLIT_FORWARD`."""
    _, cc, *_ = device_key.split("|")
    kernel = default_kernel(shape, limits_for(parse_cc(cc)))
    return kernel is not None and kernel.name == SPLIT_FORWARD


def scores_bytes(shape: AttentionShape) -> int:
    """Return the bytes of the scores that PyTorch's mathematics keep in memory."""
    return 4 * shape.batch * shape.num_heads * shape.seqlen_q * shape.seqlen_k


def _is_fused(shape: AttentionShape) -> bool:
    """Return whether PyTorch has a kernel for a shape that keeps no scores in memory."""
    return shape.group_size == 1 or (shape.dtype != "float32" and shape.features.mask is MaskKind.NONE)


def _class_of(shape: AttentionShape, is_split: bool) -> tuple[Any, ...]:
    """Return what must agree for one shape to say something of another."""
    few_queries = _has_few_queries(shape.direction, shape.seqlen_q, shape.seqlen_k)
    mask = MaskKind.NONE if shape.dtype == "float32" else shape.features.mask  # the products bound float32
    return shape.direction, shape.element_bytes, mask, few_queries, is_split


def _has_few_queries(direction: str, seqlen_q: int, seqlen_k: int) -> bool:
    return direction == Direction.FORWARD and seqlen_q < min(seqlen_k, FEW_QUERIES)


def _distance(a: AttentionShape, b: AttentionShape) -> float:
    """Return the doublings by which two shapes of a class differ. The number of (batch, head) pairs counts in full:
    where blocks are too few for the device, another kernel is the fastest."""
    sizes = (
        (a.batch * a.num_heads, b.batch * b.num_heads),
        (a.group_size, b.group_size),
        (a.seqlen_q, b.seqlen_q),
        (a.seqlen_k, b.seqlen_k),
    )
    widths = (a.head_dim, b.head_dim), (a.head_dim_v, b.head_dim_v)
    is_other_mask = (a.causal is Causal.NONE) is not (b.causal is Causal.NONE)
    return sum(map(_doublings, sizes)) + WIDTH_WEIGHT * sum(map(_doublings, widths)) + is_other_mask


def _doublings(sizes: tuple[int, int]) -> float:
    return abs(math.log2(sizes[0] / sizes[1]))
