"""Frozen files with winners of both kinds of kernels, and what is served of a damaged one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from blocktune.db.exchange.document import frozen_document
from blocktune.db.records.records import AnyBest, Best, Environment, KernelBest
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import BlocktuneError
from blocktune.runtime.autotuned.config import CONFIGS, TYPES, KernelProblem, LaunchConfig, LaunchProblem
from blocktune.runtime.store_reader.export_file import autotuned_rows_in_file, rows_in_file
from blocktune.tuner.candidates.shape_defaults import complete_shape
from tests.support.stores.sample_records import winner

H200, KERNEL, SOURCE = device_named("h200"), "package.module:scale", "0123456789abcdef"


def autotuned_winner(block: int) -> KernelBest:
    config = LaunchConfig(KERNEL, (("BLOCK", block),))
    return Best(
        device=H200,
        environment=Environment(triton="3.6.0", ptxas="12.8.93", torch="2.11.0"),
        shape=KernelProblem(KERNEL, LaunchProblem.of({"n": 1000 + block, TYPES: "bf16", CONFIGS: "abc"})),
        config=config,
        kernel_hash=SOURCE,
        origin=Origin.MEASURED,
        time_us=1.5 * block,
        default=config,
        created_at=winner_of(512).created_at,
    )


def winner_of(seqlen: int) -> Best:
    return replace(BEST, shape=complete_shape(seqlen, 64), time_us=float(seqlen))


BEST = winner()
BOTH: tuple[AnyBest, ...] = (
    *(winner_of(seqlen) for seqlen in (512, 1024)),
    *(autotuned_winner(block) for block in (64, 128, 256)),
)


def frozen_text(bests: Iterable[AnyBest]) -> str:
    return canonical_text(frozen_document(H200, bests)) + "\n"


@dataclass(frozen=True, slots=True)
class Flips:
    """How many damaged files were refused, and of how many a row was read that was never written."""

    refused: int
    wrong: int


def flips_served(folder: Path, tried: int, seed: int) -> Flips:
    """Read a frozen file with one flipped bit, or one byte of another value, again and again."""
    path, dice, content = folder / "flipped.json", Random(seed), frozen_text(BOTH).encode()
    path.write_bytes(content)
    sound, refused, wrong = rows_of(path), 0, 0
    for number in range(tried):
        damaged = bytearray(content)
        place = dice.randrange(len(content))
        damaged[place] ^= 1 << dice.randrange(8) if number % 2 else dice.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            wrong += any(row not in sound for row in rows_of(path))
        except BlocktuneError:
            refused += 1
    return Flips(refused, wrong)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of both kinds that production takes from a file."""
    return rows_in_file(path) + autotuned_rows_in_file(path)
