"""A drill: copies of a store are damaged in many ways and recovered, and what would have been lost is counted."""

import random
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from blocktune.db.recovery.rebuild import recover
from blocktune.db.store import ResultStore
from blocktune.db.tables.location import StoreTarget
from blocktune.db.tables.sqlite_file import LOCK_TIMEOUT_SECONDS, connect_sqlite, readable_uri
from blocktune.db.tables.store_errors import translate_errors
from blocktune.kernels.files.reading import STORE_BYTES, read_bytes
from blocktune.kernels.values.errors import BlocktuneError, StoreError, UsageError

WAYS = 200

_RESULTS = ("best", "trial")

Rows = Counter[tuple[str, str]]
"""The trials and winners of a store: their tables and checksums."""


@dataclass(slots=True)
class DrillCounts:
    """The outcomes of the copies.

    rows: trials and winners in the store. copies: that were damaged. untouched: copies whose damage met nothing.
    whole: copies of which every row was saved. refused: copies that could not be recovered, so that a backup is needed.
    lost: rows lost of all copies; worst: of one. understated: copies that lost more than the recovery said.
    wrong: rows that were saved and are none of the store's.
    """

    rows: int = 0
    copies: int = 0
    untouched: int = 0
    whole: int = 0
    refused: int = 0
    lost: int = 0
    worst: int = 0
    understated: int = 0
    wrong: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def drill(
    target: str | Path | None,
    *,
    ways: int = WAYS,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda done: None,
) -> DrillCounts:
    """Recover copies of a store, each damaged in another way, and return the counts. The store itself is only read.

    Args:
        target: the store.
        ways: how many copies.
        seed: of the damages.
        on_progress: called with the number of copies that are done.

    Raises:
        UsageError: the store is no file.
        StoreError: it cannot be read, or is damaged already.
    """
    place = StoreTarget.of(target)
    if place.path is None:
        raise UsageError(f"{place.label} is on a server, and only a SQLite file can be copied for a drill.")
    dice, counts = random.Random(seed), DrillCounts()
    with tempfile.TemporaryDirectory(prefix="blocktune-drill-") as name:
        copy = Path(name) / "copy.db"
        content = _content(place, copy)
        sound = _rows(copy)
        counts.rows = sound.total()
        for number in range(ways):
            for left in Path(name).iterdir():  # a recovery keeps the damaged file, too
                left.unlink()
            damage = DAMAGES[number % len(DAMAGES)]
            copy.write_bytes(damage(content, dice))
            _recover(copy, sound, counts)
            on_progress(number + 1)
    return counts


def _content(place: StoreTarget, copy: Path) -> bytes:
    """Return the bytes of a store as its last commit left it, with the present schema."""
    assert place.path is not None
    if place.is_missing:
        raise StoreError(f"No such store: {place.label}, but a drill needs one. `tune run` creates it.")
    uri = readable_uri(place.path)
    with (
        translate_errors(place),
        closing(connect_sqlite(uri, LOCK_TIMEOUT_SECONDS)) as source,
        closing(sqlite3.connect(copy)) as destination,
    ):
        source.backup(destination)
    with ResultStore.open(copy) as store:
        if not store.health().sound:
            raise StoreError(f"{place.label} is damaged, but a drill needs a sound store. See `tune doctor --recover`.")
    with closing(sqlite3.connect(copy)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # damages are done to one file, so all has to be in it
    return read_bytes(copy, STORE_BYTES)


def _recover(copy: Path, sound: Rows, counts: DrillCounts) -> None:
    counts.copies += 1
    try:
        found = recover(copy)
    except BlocktuneError:
        counts.refused += 1
        counts.lost += sound.total()
        counts.worst = sound.total()
        return
    kept = _rows(copy)
    lost = (sound - kept).total()
    counts.untouched += found is None
    counts.whole += found is not None and not lost
    counts.lost += lost
    counts.worst = max(counts.worst, lost)
    counts.wrong += (kept - sound).total()
    most = 0 if found is None else found.lost_at_most
    counts.understated += most is not None and lost > most


def _rows(path: Path) -> Rows:
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        return Counter(
            (table, str(checksum))
            for table in _RESULTS
            for (checksum,) in connection.execute(f"SELECT checksum FROM {table}")
        )


Damage = Callable[[bytes, random.Random], bytes]

PAGE_BYTES = 4096


def _flip_bit(content: bytes, dice: random.Random) -> bytes:
    damaged = bytearray(content)
    damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
    return bytes(damaged)


def _overwritten(count: int) -> Damage:
    def damage(content: bytes, dice: random.Random) -> bytes:
        start = dice.randrange(max(1, len(content) - count))
        return content[:start] + dice.randbytes(count) + content[start + count :]

    return damage


def _change_schema(content: bytes, dice: random.Random) -> bytes:
    """Return one byte of the first page, which says what the tables are."""
    at = dice.randrange(100, PAGE_BYTES)
    return content[:at] + dice.randbytes(1) + content[at + 1 :]


def _zeroed_page(content: bytes, dice: random.Random) -> bytes:
    start = dice.randrange(len(content) // PAGE_BYTES) * PAGE_BYTES
    return content[:start] + bytes(PAGE_BYTES) + content[start + PAGE_BYTES :]


def _swapped_pages(content: bytes, dice: random.Random) -> bytes:
    one, other = (dice.randrange(len(content) // PAGE_BYTES) * PAGE_BYTES for _ in range(2))
    pages = content[one : one + PAGE_BYTES], content[other : other + PAGE_BYTES]
    damaged = bytearray(content)
    damaged[one : one + PAGE_BYTES], damaged[other : other + PAGE_BYTES] = pages[1], pages[0]
    return bytes(damaged)


def _cut(content: bytes, dice: random.Random) -> bytes:
    return content[: dice.randrange(PAGE_BYTES, len(content))]


DAMAGES: tuple[Damage, ...] = (
    _flip_bit,
    _overwritten(1),
    _overwritten(16),
    _overwritten(512),
    _overwritten(PAGE_BYTES),
    _change_schema,
    _zeroed_page,
    _swapped_pages,
    _cut,
    _flip_bit,
)
"""What disks, cables, file systems and hands do to files."""
