"""Error bands of the cost model: how far measured times were from predicted ones, by kernel and features on a device.

`tune lab calibrate` makes the small file `DEVICE.bands.json` of recorded sweeps (tuner/lab/error_bands.py). Every
printed prediction has its band, or says what was never measured.

    print(predicted_text(465.1, "flash_fwd_hopper", shape, device))  # 465.1 µs, -11 to +17 %
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

from blocktune.kernels.files.reading import read_resource
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.kernels.values.text import counted
from blocktune.runtime.store_reader.export_file import SHIPPED_RESULTS

FORMAT, SCHEMA = "blocktune-bands", 1
SUFFIX = ".bands.json"

TRUSTED_ERROR = 0.25
"""A prediction that may be further than this share from the measurement gives no advice."""

FEW_SHAPES = 3
"""A band of fewer shapes is too narrow: the errors of one shape's configs are alike."""

FEW_QUERIES = 16
"""Most queries of a decoding."""

SIXTEEN_BITS = ("bfloat16", "float16")
"""Data types that one band holds for: their units have one rate."""

ANY_KERNEL = "any"
"""In place of a kernel's name: the band of all kernels together, for those with too few measurements of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Where 90 % of the measured times were: low and high are the 5th and 95th percentile of measured over predicted
    time, less 1. trials: how many were measured, of how many shapes."""

    low: float
    high: float
    trials: int
    shapes: int

    @property
    def doubt(self) -> str:
        """Why a prediction gives no advice; empty where it does."""
        if max(-self.low, self.high) > TRUSTED_ERROR:
            return f"measured times of such configs may be over {100 * TRUSTED_ERROR:.0f} % from predicted ones"
        if self.shapes < FEW_SHAPES:
            return f"only {counted(self.shapes, 'shape')} with these features gave the error of the model"
        return ""

    @property
    def text(self) -> str:
        """The band, such as `-11 to +17 %`, and of how many shapes if they are few."""
        few = f" (of {counted(self.shapes, 'shape')})" if self.shapes < FEW_SHAPES else ""
        return f"{100 * self.low:+.0f} to {100 * self.high:+.0f} %{few}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BandKey:
    """The class of predictions that share a band."""

    family: str
    kernel: str
    features: tuple[str, ...]

    @classmethod
    def of(cls, kernel: str, shape: AttentionShape) -> "BandKey":
        """Return the class of a kernel's prediction for a shape; a data type not of 16 bits is a feature."""
        names = shape.features.names | ({shape.dtype} - set(SIXTEEN_BITS))
        return cls("decoding" if is_decoding(shape) else str(shape.direction), kernel, tuple(sorted(names)))


def is_decoding(shape: AttentionShape) -> bool:
    """Return whether a shape is a forward of few queries over more keys."""
    return shape.direction is Direction.FORWARD and shape.seqlen_q <= FEW_QUERIES < shape.seqlen_k


def band_of(kernel: str, shape: Any, device: DeviceSpec) -> Band | None:
    """Return the band of a kernel's predictions for a shape; None where nothing like it was measured on the device, and
    for what is no attention kernel of ours."""
    if not _is_ours(kernel):
        return None
    bands = _shipped_bands().get(device.key, {})
    return bands.get(BandKey.of(kernel, shape)) or bands.get(BandKey.of(ANY_KERNEL, shape))


def band_text(kernel: str, shape: Any, device: DeviceSpec) -> str:
    """Return the band in words: `-11 to +17 %`, or what was never measured."""
    band = band_of(kernel, shape, device)
    if band is not None:
        return band.text
    if device.key not in _shipped_bands():
        return "unchecked device"
    return "unchecked features" if _is_ours(kernel) else "unchecked kernel"


def stored_band_text(band: Mapping[str, Any] | None) -> str:
    """Return a band that a document holds in words; of one without, as before there were any, that it is unchecked."""
    return "unchecked" if band is None else Band(**band).text


def predicted_text(time_us: float | None, kernel: str, shape: Any, device: DeviceSpec) -> str:
    """Return a predicted time with its band; a dash where there is none."""
    return "-" if time_us is None else f"{time_us:,.1f} µs, {band_text(kernel, shape, device)}"


def predicted_json(time_us: float | None, kernel: str, shape: Any, device: DeviceSpec) -> dict[str, Any]:
    """Return a predicted time with its band as plain values; the band is None where none is known."""
    band = None if time_us is None else band_of(kernel, shape, device)
    return {"predicted_us": time_us, "predicted_band": band and band.to_json()}


def bands_document(device: str, bands: Mapping[BandKey, Band]) -> dict[str, Any]:
    """Return the document of a device's bands."""
    rows = [asdict(key) | band.to_json() for key, band in bands.items()]
    return {"format": FORMAT, "schema": SCHEMA, "device": device, "bands": rows}


def bands_from(document: Mapping[str, Any]) -> dict[BandKey, Band]:
    """Return the bands in a document.

    Raises:
        UsageError: the document is of another format.
    """
    if (document.get("format"), document.get("schema")) != (FORMAT, SCHEMA):
        raise UsageError(
            f"Error bands must have the format {FORMAT!r} and schema {SCHEMA}, but got "
            f"{document.get('format')!r:.80} and {document.get('schema')!r:.80}. Make them by `tune lab calibrate`."
        )
    return {
        BandKey(row["family"], row["kernel"], tuple(row["features"])): Band(
            low=row["low"], high=row["high"], trials=row["trials"], shapes=row["shapes"]
        )
        for row in document["bands"]
    }


def _is_ours(kernel: str) -> bool:
    from blocktune.kernels.registry import KERNELS  # with Triton, which help does without

    return kernel in KERNELS


@cache
def _shipped_bands() -> dict[str, dict[BandKey, Band]]:
    """Return the bands that ship, by the key of their device."""
    entries = [entry for entry in resources.files(SHIPPED_RESULTS).iterdir() if entry.name.endswith(SUFFIX)]
    documents = [json.loads(read_resource(entry)) for entry in entries]
    return {document["device"]: bands_from(document) for document in documents}
