"""The checks of files in `tune doctor`: the database or results file, who can change them, and Triton's cache."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from blocktune.cli.explain.findings import DoctorFinding, Level
from blocktune.kernels.files.file_path import file_path
from blocktune.kernels.files.ownership import doubts
from blocktune.kernels.files.variables import TRUST_OWNER
from blocktune.kernels.values.errors import StoreError
from blocktune.kernels.values.text import counted

if TYPE_CHECKING:
    from blocktune.db.records.health import StoreHealth
    from blocktune.db.records.records import Best
    from blocktune.db.tables.location import StoreTarget

LEAST_FREE_BYTES = 50 << 20
"""A search with all its trials takes some megabytes, their log as many again."""

CLOCK_TOLERANCE = timedelta(days=1)
"""How far ahead a date may be that an import takes."""


_PASSWORD = DoctorFinding(
    name="password",
    value="stands in the database URL",
    level=Level.WARNING,
    meaning="Every user of this machine sees the words of a command, and a URL is easily copied into a script.",
    fix="Leave it out of the URL: PostgreSQL's drivers read ~/.pgpass, or the file that PGPASSFILE names.",
)


def _results_file(path: Path) -> DoctorFinding:
    """Return what the dispatcher reads in place of a database."""
    from blocktune.runtime.store_reader.export_file import rows_in_file

    try:
        rows = rows_in_file(path)
    except StoreError as error:
        return _unusable("results file", str(path), error)
    return DoctorFinding(name="results file", value=f"{path} ({counted(len(rows), 'winner')}, for the dispatcher only)")


def store_findings(db: str | None) -> Iterator[DoctorFinding]:
    """Yield what is to be said about the database, or the results file, at `db`."""
    from blocktune.db.store import ResultStore
    from blocktune.db.tables.location import StoreTarget
    from blocktune.runtime.store_reader.export_file import SUFFIX

    if db is not None and db.endswith(SUFFIX):
        yield from _ownership("results file", file_path(db))
        yield _results_file(file_path(db))
        return
    target = StoreTarget.of(db)
    if target.is_missing:
        yield DoctorFinding(name="database", value=f"{target.label} (not there yet; the first `tune run` makes it)")
        return
    if target.url is not None and (target.url.password or "password" in target.url.query):
        yield _PASSWORD
    yield from _waiting(target)
    if target.path is not None:
        yield from _ownership("database", target.path)
        yield from _free_space(target.path)
    try:
        with ResultStore.open(db, read_only=True) as store:
            health = store.health()
        if not health.sound:
            yield from _correct_bits(target)
        with ResultStore.open(db, read_only=True) as store:
            health = health if health.sound else store.health()
            yield from _clock(store.bests() if health.sound else ())
    except StoreError as error:
        yield _unusable("database", target.label, error)
        return
    yield from _health_findings(health)


def _correct_bits(target: "StoreTarget") -> Iterator[DoctorFinding]:
    """Correct single bits of the database's rows, and yield which. Where it cannot be written, it stays as it is."""
    from blocktune.db.store import ResultStore

    try:
        with ResultStore.open(target) as store:
            found = store.correct()
    except StoreError:
        return  # its health says what is wrong
    if found:
        yield DoctorFinding(
            name="database corrected",
            value=f"{counted(len(found), 'value')}: {', '.join(map(str, found[:5]))}",
            level=Level.WARNING,
            meaning="A bit had changed since it was written; the checksums of the rows tell which one.",
            fix="Check the disk and the memory of this machine. The backup next to the database has it as it was.",
        )


def _unusable(name: str, value: str, error: Exception) -> DoctorFinding:
    return DoctorFinding(
        name=name,
        value=value,
        level=Level.PROBLEM,
        meaning=str(error),
        fix="Until then attention runs with shipped and default configs.",
    )


def _health_findings(health: "StoreHealth") -> Iterator[DoctorFinding]:
    """Yield what is in the database, and what is wrong with its file."""
    rows = f"{counted(health.rows['trial'], 'trial')}, {counted(health.rows['best'], 'winner')}"
    state = f"{health.server}, schema {health.schema_version}, {rows}, {health.size_bytes / 1e6:.1f} MB"
    yield DoctorFinding(name="database", value=f"{health.place} ({state})")
    if not health.sound:
        yield DoctorFinding(
            name="database integrity",
            value=health.integrity,
            level=Level.PROBLEM,
            meaning="The file is damaged; what it answers may be wrong.",
            fix="`tune doctor --recover` saves what can be read in a fresh database and keeps this one next to it.",
        )
    if health.journal_mode not in ("wal", ""):
        yield DoctorFinding(
            name="database journal",
            value=health.journal_mode,
            level=Level.WARNING,
            meaning="Readers and a writer of this database wait for each other; its file system may not allow WAL.",
            fix="Keep the database on a local disk (--db, BLOCKTUNE_DB); it can be exported to any other place.",
        )


def _waiting(target: "StoreTarget") -> Iterator[DoctorFinding]:
    """Store what killed searches left next to the database, and yield what was found."""
    from blocktune.db.recorder import fold_left
    from blocktune.db.spool import left_files
    from blocktune.db.store import ResultStore

    if not left_files(target):
        return
    try:
        with ResultStore.open(target) as store:
            left = fold_left(store)
    except StoreError as error:
        yield DoctorFinding(
            name="measurements that wait",
            value=counted(len(left_files(target)), "file"),
            level=Level.WARNING,
            meaning=f"Searches measured what the database did not take. {error}",
            fix="Nothing of it is lost: `tune doctor` stores it when the database answers.",
        )
        return
    if not left.is_empty:
        rows = f"{counted(len(left.trials), 'trial')} and {counted(len(left.bests), 'winner')}"
        value = f"{rows} of ended searches are stored now"
        torn = f"; {left.unreadable} torn lines were left out" if left.unreadable else ""
        yield DoctorFinding(name="measurements that waited", value=f"{value}{torn}")


def _ownership(name: str, path: Path) -> Iterator[DoctorFinding]:
    """Yield a finding where another user can change what production reads."""
    reasons = "; ".join(doubts(path))
    if not reasons:
        return
    believed = TRUST_OWNER.is_on()
    yield DoctorFinding(
        name=f"{name} owner",
        value=reasons,
        level=Level.WARNING if believed else Level.PROBLEM,
        meaning=f"Others can change the configs. Attention uses them, since {TRUST_OWNER.name}=1."
        if believed
        else "Others can change the configs, so attention does not use them.",
        fix="Change owner or mode: chown, chmod o-w"
        + ("" if believed else f"; or say {TRUST_OWNER.name}=1 to believe them"),
    )


def _free_space(path: Path) -> Iterator[DoctorFinding]:
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < LEAST_FREE_BYTES:
        yield DoctorFinding(
            name="free space",
            value=f"{free_bytes / 1e6:.1f} MB",
            level=Level.WARNING,
            meaning="What is measured cannot be stored when the disk of the database is full.",
            fix=f"Make room on the disk of {path.parent}, or give another place by --db or BLOCKTUNE_DB.",
        )


def _clock(bests: "Sequence[Best]") -> Iterator[DoctorFinding]:
    ahead = sum(best.created_at > datetime.now(UTC) + CLOCK_TOLERANCE for best in bests)
    if ahead:
        yield DoctorFinding(
            name="clock",
            value=f"{counted(ahead, 'winner')} dated in the future",
            level=Level.WARNING,
            meaning="A clock was wrong when they were measured, or is wrong now; no import takes them.",
            fix="Correct the clock; `tune verify --all` measures and dates them again.",
        )


def triton_cache(environment: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Yield what is to be said about Triton's cache, from which the process loads machine code and launchers."""
    manager = environment.get("TRITON_CACHE_MANAGER")
    if manager:
        yield DoctorFinding(
            name="TRITON_CACHE_MANAGER",
            value=manager,
            level=Level.WARNING,
            meaning="Triton imports and runs this class.",
            fix="Unless you mean it: unset TRITON_CACHE_MANAGER",
        )
    home = environment.get("TRITON_HOME") or os.path.expanduser("~")
    cache = Path(environment.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))
    reasons = "; ".join(doubts(cache)) if cache.exists() else ""
    if reasons:
        yield DoctorFinding(
            name="Triton's cache",
            value=reasons,
            level=Level.WARNING,
            meaning="Triton runs the code that it finds there, so whoever can write it runs code as you.",
            fix="Name a directory of your own by TRITON_CACHE_DIR.",
        )
