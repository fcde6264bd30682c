"""The catalogue of GPUs: what is known about devices that are not here, with the source of every row.

The rows are in `gpus.csv`. Its `conf` column says how sure a row is: D, SM count or cache read from the output of a
real device; W, an NVIDIA document was read; S, two or more secondary lists agree; M, memory or derived, unverified.
An empty cell is unknown. Tensor rates are dense, fp16 in, fp32 accumulated; they satisfy SMs x clock x F within 1.2 %
(`tests/kernels/hardware/test_catalogue.py`), but the advertised peak of Hopper and Blackwell is at a lower clock than
the boost. `aliases` are short names, separated by semicolons, that mean exactly this row; a name that fits several rows
has none.
"""

import csv
import difflib
import re
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from blocktune.kernels.files.reading import package_text
from blocktune.kernels.hardware.limits import parse_cc
from blocktune.kernels.values.errors import UnknownDeviceError

CATALOGUE_FILE = "gpus.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One row of the catalogue; None is unknown.

    id: the short name, such as `h200_sxm`. name: as the driver spells it. tensor_flops_per_clock: dense fp16 FLOP with
    fp32 accumulation per SM and clock. memory_gib: the advertised size, which is close to GiB and slightly above the
    usable memory. confidence: D, W, S or M, see above.
    """

    id: str
    name: str
    cc: tuple[int, int]
    num_sms: int
    boost_mhz: int
    memory_gib: float
    memory_gbs: float
    l2_mib: float | None
    tensor_tflops: float | None
    fp8_tflops: float | None
    fp32_tflops: float | None
    tensor_flops_per_clock: int | None
    shared_per_sm_kib: int
    confidence: str
    source: str
    aliases: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        return data | {"cc": f"{self.cc[0]}.{self.cc[1]}", "aliases": list(self.aliases)}


@lru_cache(maxsize=256)
def normalise_name(name: str) -> str:
    """Return a device name without its accidents: lower case, one space for every run of other signs."""
    return re.sub(r"[^a-z0-9]+", " ", name.casefold()).strip()


def _lookup_key(name: str) -> str:
    """Return the key of the look-up, in which `RTX 2070`, `rtx-2070` and `rtx2070` are one name."""
    return normalise_name(name).replace(" ", "")


def _optional(cell: str) -> float | None:
    return float(cell) if cell else None


def _entry(row: dict[str, str]) -> CatalogueEntry:
    flops_per_clock = row["F_fp16_per_clk_sm"]
    return CatalogueEntry(
        id=row["id"],
        name=row["nvml_name"],
        cc=parse_cc(row["cc"]),
        num_sms=int(row["sm"]),
        boost_mhz=int(row["boost_mhz"]),
        memory_gib=float(row["mem_gb"]),
        memory_gbs=float(row["mem_bw_gbs"]),
        l2_mib=_optional(row["l2_mb"]),
        tensor_tflops=_optional(row["fp16_dense_fp32acc_tflops"]),
        fp8_tflops=_optional(row["fp8_dense_fp32acc_tflops"]),
        fp32_tflops=_optional(row["fp32_tflops"]),
        tensor_flops_per_clock=int(flops_per_clock) if flops_per_clock else None,
        shared_per_sm_kib=int(row["smem_sm_kb"]),
        confidence=row["conf"],
        source=row["source"],
        aliases=tuple(alias for alias in row["aliases"].split(";") if alias),
    )


@cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """Return all rows, in the order of the file."""
    text = package_text(__package__, CATALOGUE_FILE)
    return tuple(_entry(row) for row in csv.DictReader(text.splitlines()))


@cache
def _by_any_name() -> dict[str, CatalogueEntry]:
    return {_lookup_key(name): entry for entry in catalogue() for name in (entry.id, entry.name, *entry.aliases)}


def entry_by_driver_name(name: str) -> CatalogueEntry | None:
    """Return the row whose driver name is exactly this one, or None. Aliases do not count: a device's own name is
    precise."""
    entry = _by_any_name().get(_lookup_key(name))
    return entry if entry is not None and _lookup_key(entry.name) == _lookup_key(name) else None


def find_entry(name: str) -> CatalogueEntry:
    """Return the row with this id, driver name or alias, whatever its case and separators, or with the four digits that
    one id alone ends with, such as 4090. Never another substring: A10 is no A100.

    Raises:
        UnknownDeviceError: no row has this name; the message lists the nearest ones.
    """
    entry = _by_any_name().get(_lookup_key(name)) or _entry_by_number(name)
    if entry is None:
        raise UnknownDeviceError(
            f"No such device: {name!r}. {_nearest(name)} `tune devices` lists all of them; a new one is a line in "
            f"{Path(__file__).with_name(CATALOGUE_FILE)}."
        )
    return entry


def _entry_by_number(name: str) -> CatalogueEntry | None:
    """Return the row whose id ends with a number of four digits, if that is one row."""
    found = [entry for entry in catalogue() if re.fullmatch(r"\d{4}", name) and entry.id.endswith(name)]
    return found[0] if len(found) == 1 else None


def _nearest(name: str) -> str:
    asked = _lookup_key(name).removeprefix("nvidia")
    close = [key for key in _by_any_name() if asked and key.startswith(asked)]
    close += difflib.get_close_matches(asked, _by_any_name(), n=6, cutoff=0.5)
    ids = list(dict.fromkeys(_by_any_name()[key].id for key in close))[:6]
    return f"The nearest names are {', '.join(ids)}." if ids else "No name there is close to it."
