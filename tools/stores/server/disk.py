"""The disk of a PostgreSQL server fills while clients write to it, gets room, and fills again.

It is a file system in memory, which only root may mount. The same rows are written over and over, in the room of their
older versions, so that the server's log meets the end of the disk as well as the tables: then the server goes down.
"""

import itertools
import os
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import psycopg

from blocktune.db.recorder import Recorder, fold_left
from blocktune.db.records.records import Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import StoreError
from tests.support.stores.postgres_server import PostgresServer, new_folder
from tests.support.stores.sample_records import sample_trials
from tools.stores import Unavailable

DISK_MIB = 160
FREE_BYTES = (0, 20_000, 100_000, 400_000)
"""Of which one is left when clients begin to write."""
MOST_TRIALS, CONFIGS = 120, 40
PATIENCE_SECONDS = 1.0
LOG_SEGMENT = "--wal-segsize=1"


@dataclass
class Clients:
    """Those who write to a store and read it. stored: the trial of each config that was acknowledged last, and
    waiting: those that a search has kept since. One that was refused, but may be stored, is in neither."""

    store: ResultStore
    stored: dict[KernelConfig, Trial] = field(default_factory=dict)
    waiting: dict[KernelConfig, Trial] = field(default_factory=dict)
    acknowledged: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def fill(self) -> None:
        """Write until a trial is refused."""
        for trial in itertools.islice(self._trials(), MOST_TRIALS):
            self.stored.pop(trial.config, None)
            if not self._try(self.store.record, trial):
                return
            self.stored[trial.config] = trial
            self.acknowledged += 1

    def search(self) -> None:
        """Keep trials as a search does. A full server does not stop it."""
        with Recorder(self.store) as recorder:
            for trial in itertools.islice(self._trials(), 2):
                recorder.record(trial)
                self.stored.pop(trial.config, None)
                self.waiting[trial.config] = trial
                self.acknowledged += 1

    def read(self) -> None:
        """Read all trials, if the server answers."""
        self._try(lambda: self._count_missed() and self.wrong.append("a reader missed trials"))

    def lost(self) -> int:
        """Return how many trials are lost, once those are stored that waited."""
        fold_left(self.store)
        self.stored |= self.waiting
        self.waiting.clear()
        return self._count_missed()

    def _count_missed(self) -> int:
        """Return how many trials that are stored are not read."""
        found = Counter(self.store.trials())
        if max(found.values(), default=1) > 1:
            self.wrong.append("a trial is stored twice")
        return len(set(self.stored.values()) - set(found))

    def _trials(self) -> Iterator[Trial]:
        """Yield trials of a few configs, over and over. Each takes some room, for a compiler's error."""
        (trial,) = sample_trials(1)
        for number in self._numbers:
            config = replace(trial.config, extra=(("number", number % CONFIGS),))
            yield replace(trial, config=config, error=random.Random(number).randbytes(2_000).hex())

    def _try(self, work: Callable[..., object], *words: object) -> bool:
        try:
            work(*words)
        except StoreError as error:
            self.ended["a full disk" if "is full" in str(error) else "a server that is away"] += 1
            if "secret" in str(error):
                self.wrong.append("an error told the password")
            return False
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error!s:.200}")
            return False
        return True


def full_disks(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """The disk of a PostgreSQL server fills while clients write to it, and gets room again."""
    dice, lost, downs = random.Random(seed), 0, 0
    with small_disk() as disk, patch.dict(os.environ, XDG_STATE_HOME=str(folder)):
        server = PostgresServer(disk, {"max_wal_size": "16MB", "min_wal_size": "2MB", "wal_recycle": "off"})
        server.create(LOG_SEGMENT)
        server.start()
        try:
            place = server.create_database("filled")
            with ResultStore.open(place, lock_timeout_seconds=PATIENCE_SECONDS) as store:
                clients = Clients(store)
                for _ in range(tried):
                    with ballast(disk, dice.choice(FREE_BYTES)):
                        for work in (clients.fill, clients.read, clients.search):
                            work()
                    downs += revive(server)
                    lost += clients.lost()
                    server.execute("VACUUM trial", "CHECKPOINT", database="filled")
                    server.execute("SELECT 1", database="filled")  # writes a file that connections need
        finally:
            server.stop()
    ended = "".join(f", {count} by {how}" for how, count in sorted(clients.ended.items()))
    note = f"{clients.acknowledged:,} measurements were acknowledged{ended}; the server went down {downs} times"
    return lost, len(clients.wrong), note + "".join(f"; {each}" for each in clients.wrong[:5])


@contextmanager
def small_disk() -> Iterator[Path]:
    """Yield a folder for a server, on a small disk.

    Raises:
        Unavailable: none can be mounted.
    """
    with new_folder() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
        try:
            subprocess.run(mount, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Unavailable("no small disk can be mounted") from error
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def ballast(disk: Path, free_bytes: int) -> Iterator[None]:
    """Fill a disk but for some bytes, until the block ends."""
    state, file = os.statvfs(disk), disk / "ballast"
    with file.open("wb") as filling:
        os.posix_fallocate(filling.fileno(), 0, max(1, state.f_bavail * state.f_bsize - free_bytes))
    try:
        yield
    finally:
        file.unlink()


def revive(server: PostgresServer) -> bool:
    """Start a server again if it went down for good. Return whether it did."""
    try:
        server.execute("SELECT 1")
    except psycopg.OperationalError:
        server.start()
        return True
    return False
