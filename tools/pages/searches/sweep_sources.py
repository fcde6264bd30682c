"""The sources of recorded sweeps: how much was measured with the kernels as they are, and which kernels are missing."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktune.kernels.files.reading import DOCUMENT_BYTES, json_value, read_gzip
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import KERNELS, kernels_for
from blocktune.kernels.values.shape import AttentionShape


@dataclass(frozen=True, slots=True)
class SweepSources:
    """The kernels of some sweeps.

    older: configs that were measured with another source of their kernel than today's, by kernel. missing: sweeps in
    which a kernel would compete today and that do not hold it, by kernel.
    """

    older: Mapping[str, int]
    missing: Mapping[str, int]


def sources_of(paths: Iterable[Path], without: Collection[str] = ()) -> SweepSources:
    """Return what the recorded sweeps in these files are of.

    Args:
        paths: files that `tune lab sweeps` wrote.
        without: kernels that are left out of them.
    """
    older: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    for path in paths:
        document = json_value(read_gzip(path, DOCUMENT_BYTES))
        hashes = _hashes(document["columns"])
        older += Counter(name for name, found in hashes if name not in without and not _is_todays(name, found))
        missing += Counter(_competing(document) - {name for name, _ in hashes} - set(without))
    return SweepSources(older=dict(sorted(older.items())), missing=dict(sorted(missing.items())))


def _hashes(columns: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the kernel of every config with the hash of its source."""
    return list(zip(columns["config.kernel"], columns["kernel_hash"], strict=True))


def _is_todays(name: str, source_hash: str) -> bool:
    return name in KERNELS and KERNELS[name].source_hash == source_hash


def _competing(document: Mapping[str, Any]) -> set[str]:
    """Return the kernels that compete for the shape of a sweep today."""
    limits = DeviceSpec.from_json(document["device"]).limits
    return {kernel.name for kernel in kernels_for(AttentionShape.from_json(document["shape"]), limits)}
