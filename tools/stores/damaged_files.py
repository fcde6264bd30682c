"""Damaged files of a store: recovered, read by commands, and read by production."""

import json
import random
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from blocktune.cli.main import app
from blocktune.db.exchange.merging import Results
from blocktune.db.recovery.drill import DAMAGES, drill
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import BlocktuneError
from blocktune.runtime.store_reader.store_file import SqliteRows
from blocktune.tuner.candidates.shape_defaults import complete_shape
from tests.support.command_line import CliRunner
from tests.support.stores.frozen_files import flips_served
from tests.support.stores.sample_records import sample_trials, winner

TRIALS = (10, 40, 60, 100, 200)
"""Of the stores that are damaged and recovered: some have few pages, some trees of several levels."""
WINNERS = 40
"""Of the store that commands read."""


def damages(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Copies of stores are damaged and recovered: `tune doctor --drill`."""
    total: Counter[str] = Counter()
    for number, trials in enumerate(TRIALS):
        place = folder / f"drill{trials}.db"
        with ResultStore.open(place) as store:
            store.merge([Results(bests=(winner(),), trials=tuple(sample_trials(trials)))], trust=True)
        counts = drill(place, ways=tried // len(TRIALS), seed=seed + 1000 * number)
        total += Counter(counts.to_json() | {"all_rows": counts.rows * counts.copies})
    note = (
        f"{total['lost']:,} of {total['all_rows']:,} rows were lost and said to be; "
        f"{total['refused']} copies were refused, {total['untouched']} damages met nothing"
    )
    return total["understated"], total["wrong"], note


def answers(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Commands read damaged files: what they print with exit code 0 is sound, and whole unless they say otherwise.

    Where no winner is left, what ships with the package is printed.
    """
    place, dice = folder / "answers.db", random.Random(seed)
    content = filled_store(place, WINNERS)
    sound = {words: read_printed_rows(place, words)[0] for words in READERS}
    shipped = read_printed_rows(folder / "absent.db", READERS[0])[0]
    lost, wrong, ended = 0, 0, Counter[int]()
    for number in range(tried):
        for log in folder.glob("answers.db-*"):
            log.unlink()
        place.write_bytes(DAMAGES[number % len(DAMAGES)](content, dice))
        for words, known in sound.items():
            rows, code, said = read_printed_rows(place, words)
            ended[code] += 1
            if code == 0:
                wrong += len(rows - known - shipped)
                lost += len(known - rows) if not said else 0
    return lost, wrong, f"`list` and `export`: {', '.join(f'{n:,} ended with {c}' for c, n in sorted(ended.items()))}"


READERS = (("list", "--json", "--db"), ("export", "-", "--device", "h200", "--db"))


def read_printed_rows(place: Path, words: tuple[str, ...]) -> tuple[set[str], int, str]:
    """Return the winners that a command prints, its exit code, and what it says."""
    environment = {"HOME": str(place.parent), "XDG_STATE_HOME": str(place.parent / "state")}
    found = CliRunner().invoke(app, [*words, str(place)], env=environment)
    rows: Any = json.loads(found.stdout) if found.exit_code == 0 else {"bests": []}
    return {json.dumps(row, sort_keys=True) for row in rows["bests"]}, found.exit_code, found.stderr


def filled_store(place: Path, winners: int) -> bytes:
    """Return the bytes of a store with so many winners."""
    best = winner()
    bests = [replace(best, shape=complete_shape(512 * (1 + number), 64)) for number in range(winners)]
    with ResultStore.open(place) as store:
        store.merge([Results(bests=tuple(bests))], trust=True)
    with closing(sqlite3.connect(place)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return place.read_bytes()


def flipped_bits(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Production reads a store with one flipped bit: no row may be another one's."""
    place, dice, wrong, refused = folder / "bits.db", random.Random(seed), 0, 0
    content, device = filled_store(place, 1), winner().device
    sound = {json.dumps(row, sort_keys=True) for row in SqliteRows(place).read(device)}
    copy = folder / "bit.db"
    for _ in range(tried):
        damaged = bytearray(content)
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        copy.write_bytes(damaged)
        try:
            rows = {json.dumps(row, sort_keys=True) for row in SqliteRows(copy).read(device)}
        except BlocktuneError:
            refused += 1
            continue
        wrong += len(rows - sound)
    return 0, wrong, f"{refused} files were refused"


def flipped_frozen(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Production reads a frozen file with one flipped bit or byte: no winner of either kind may be another one's."""
    found = flips_served(folder, tried, seed)
    return 0, found.wrong, f"{found.refused:,} files were refused, {tried - found.refused - found.wrong} mean the same"
