"""Compiles the default config of every portable kernel for GPUs that are not here: what it takes, and whether it fits.

PYTHONPATH=. python -P -m tools.checks.compiled_defaults --seconds 3000 --out tests/data/compiled_defaults.json

A row is a direction or feature, a compute capability, a head dimension and a type; its kernel is the first that every
GPU of that capability could take without Hopper's own. Rows of the file whose code is as it was are kept, so that a run
may end early and the next one goes on. Compiled, never run.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.features import NO_FEATURES, CacheType, Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.contribute.compiled_table import resources_row

CAPABILITIES = ((8, 6), (8, 0), (8, 9), (12, 0), (9, 0), (10, 0), (7, 5))
"""Those of most cards first, that whose code takes longest to compile last."""
HEAD_DIMS = (64, 128, 40, 72, 80, 96, 192, 256)
"""What models have; `--every` takes every multiple of 8."""
DTYPES = ("float16", "float32")
TIMEOUT_S = 240.0
MOST_SPILL_BYTES = 64
"""Of a thread: a default that spills more is named."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What is asked of attention: a name, the kernel that serves it, and its features."""

    name: str
    kernel: str
    features: Features = NO_FEATURES

    def shape(self, head_dim: int, dtype: str) -> AttentionShape:
        """Return the shape of a default: the compiled code is that of all lengths."""
        plain = complete_shape(4096, head_dim, batch=2, heads=16, dtype=dtype)
        if "decode" in self.kernel:
            plain = replace(plain, seqlen_q=1, num_heads_kv=4)
        return replace(plain, direction=get_kernel(self.kernel).direction, features=self.features)


PLAIN = (Kind("forward", "flash_fwd"), Kind("backward", "flash_bwd_split"), Kind("decoding", "flash_decode"))
FEATURED = (
    Kind("forward, dropout", "flash_fwd_general", Features(dropout=True)),
    Kind("forward, additive mask", "flash_fwd_general", Features(mask=MaskKind.ADDITIVE)),
    Kind("forward, block mask", "flash_fwd_sparse", Features(mask=MaskKind.BLOCK_SPARSE)),
    Kind("backward, dropout", "flash_bwd_split", Features(dropout=True)),
    Kind("decoding, 8-bit cache", "flash_decode8", Features(cached=True, kv=CacheType.INT8)),
)


@dataclass(frozen=True, slots=True)
class Place:
    """One row: a kind, a compute capability, a head dimension and a type."""

    kind: Kind
    cc: tuple[int, int]
    head_dim: int
    dtype: str

    @property
    def label(self) -> str:
        return f"{self.kind.name} {self.cc[0]}.{self.cc[1]} d{self.head_dim} {self.dtype}"

    @property
    def kernel(self) -> AttentionKernel:
        return get_kernel(self.kind.kernel)


def places(head_dims: Iterable[int], kinds: Iterable[Kind]) -> Iterator[Place]:
    """Yield the rows that their kernels compute, plain ones first."""
    for kind, dtype, cc, head_dim in itertools.product(kinds, DTYPES, CAPABILITIES, head_dims):
        place = Place(kind, cc, head_dim, dtype)
        if place.kernel.unsupported(kind.shape(head_dim, dtype), limits_for(cc)) is None:
            yield place


def compiled_row(place: Place, farm: CompileFarm) -> dict[str, Any]:
    """Return what the default of a place compiles to."""
    kernel, limits, shape = place.kernel, limits_for(place.cc), place.kind.shape(place.head_dim, place.dtype)
    config = kernel.default_config(shape, limits)
    result = farm.submit(kernel.name, config, shape, place.cc).result()
    row = {"row": place.label, "config": config.label, "source": kernel.source_hash}
    return row | resources_row(result, limits)


def is_current(row: dict[str, Any], place: Place) -> bool:
    """Return whether a row is that of today's default and code."""
    shape = place.kind.shape(place.head_dim, place.dtype)
    config = place.kernel.default_config(shape, limits_for(place.cc))
    return (row["config"], row["source"]) == (config.label, place.kernel.source_hash)


def problem(row: dict[str, Any]) -> str | None:
    """Return what is wrong with a row: it does not compile or launch, or it spills; or None."""
    if row["outcome"] != "ok":
        return f"{row['row']}: {row['config']} does not compile ({row['outcome']})"
    if not row["blocks_per_sm"]:
        return f"{row['row']}: {row['config']} cannot be launched"
    if row["spill_bytes"] > MOST_SPILL_BYTES:
        return f"{row['row']}: {row['config']} spills {row['spill_bytes']:,} B a thread"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3000)
    parser.add_argument("--every", action="store_true", help="take every head dimension that 8 divides")
    asked = parser.parse_args()
    begun = time.monotonic()
    rows = {row["row"]: row for row in json.loads(asked.out.read_text())} if asked.out.exists() else {}
    wanted = tuple(places(range(16, 257, 8) if asked.every else HEAD_DIMS, (*PLAIN, *FEATURED)))
    with CompileFarm(workers=1, timeout_s=TIMEOUT_S) as farm:
        for place in wanted:
            if place.label in rows and is_current(rows[place.label], place):
                continue
            if time.monotonic() - begun > asked.seconds:
                break
            rows[place.label] = compiled_row(place, farm)
            asked.out.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    kept = [rows[place.label] for place in wanted if place.label in rows]
    print(f"{len(kept)} of {len(wanted)} rows", *filter(None, map(problem, kept)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
