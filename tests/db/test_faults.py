"""A store whose disk, file or neighbours fail while it is written: acknowledged rows stay, the error is reported."""

import json
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.db.exchange.document import document_from, save_document
from blocktune.db.records.bulk_writer import BulkWriter
from blocktune.db.records.records import Best, Trial
from blocktune.db.store import ResultStore
from blocktune.db.tables.sqlite_file import connect_sqlite
from blocktune.kernels.values.errors import StoreCorruptError, StoreError
from tests.support.suite import warm_python

HELD_SECONDS = 10.0 if os.environ.get("BLOCKTUNE_FAULTS") == "full" else 0.5


def in_a_process(script: str, *arguments: object) -> dict[str, object]:
    """What a script prints as JSON; it has the store at sys.argv[1] and the trial of the document at sys.argv[2]."""
    begin = """
        import json, os, resource, signal, sys
        from dataclasses import replace
        from pathlib import Path
        from blocktune.db.exchange.importing import records_from
        from blocktune.db.store import ResultStore
        from blocktune.kernels.values.errors import StoreError
        trial = records_from(json.loads(Path(sys.argv[2]).read_text()))[1][0]
        store = ResultStore.open(sys.argv[1])
        """
    code = textwrap.dedent(begin) + textwrap.dedent(script)
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    result = warm_python.run(command, timeout=60)
    assert result.returncode == 0, result.stderr
    told: dict[str, object] = json.loads(result.stdout)
    return told


@pytest.fixture
def document(trial: Trial, tmp_path: Path) -> Path:
    file = tmp_path / "trial.json"
    save_document(document_from(trial.device, [], [trial]), file)
    return file


def test_a_file_that_may_not_grow_keeps_what_was_acknowledged(path: Path, document: Path, trial: Trial) -> None:
    """As a full disk, met at the write itself and not, as in SQLite's own counting, before it."""
    told = in_a_process(
        """
        store.record(trial)
        size = Path(sys.argv[1]).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 64_000, resource.RLIM_INFINITY))
        acknowledged, error = 0, ""
        while not error and acknowledged < 1000:
            try:
                own = replace(trial.config, extra=(("number", acknowledged),))
                store.record(replace(trial, config=own, error="x" * 20_000))
                acknowledged += 1
            except StoreError as caught:
                error = type(caught).__name__
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        during = len(store.trials())
        store.record(replace(trial, kernel_hash="f" * 16))
        print(json.dumps({"acknowledged": acknowledged, "error": error, "during": during}))
        """,
        path,
        document,
    )
    assert told["error"] == "StoreError"
    assert told["during"] == 1 + int(str(told["acknowledged"]))
    with ResultStore.open(path) as store:
        assert len(store.trials()) == 2 + int(str(told["acknowledged"]))
        assert store.health().integrity == "ok"


def test_a_writer_waits_for_a_lock_that_is_let_go(store: ResultStore, target: str, trial: Trial) -> None:
    holding, readers_are_through = threading.Event(), threading.Event()
    let_go: list[float] = []

    def hold() -> None:
        def put_slowly(writer: BulkWriter) -> None:
            writer.put_trial(replace(trial, kernel_hash="e" * 16))
            holding.set()
            readers_are_through.wait(60)
            time.sleep(HELD_SECONDS)
            let_go.append(time.monotonic())

        with ResultStore.open(target) as other:
            other._write(put_slowly)

    holder = threading.Thread(target=hold)
    holder.start()
    assert holding.wait(30)
    assert store.trials() == []  # readers do not wait
    assert not let_go
    readers_are_through.set()
    store.record(trial)
    assert let_go  # this writer did
    holder.join()
    assert len(store.trials()) == 2


def test_a_writer_that_fails_in_the_middle_leaves_nothing_of_it(store: ResultStore, best: Best, trial: Trial) -> None:
    document = document_from(best.device, [best], [trial, replace(trial, kernel_hash="e" * 16)])
    document["trials"][1]["time_us"] = -1.0
    with pytest.raises(ValueError, match="time_us"):
        store.import_json(document)
    assert (store.bests(), store.trials()) == ([], [])
    assert store.health().rows["shape"] == 0


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 4096 * 5])


def emptied_pages(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(len(content) - 4096))


@pytest.mark.parametrize("damage", [cut, emptied_pages])
def test_damage_that_comes_while_the_store_is_open_is_told(
    sqlite_store: ResultStore, path: Path, trial: Trial, damage: Callable[[Path], None]
) -> None:
    sqlite_store.record(trial)
    damage(path)
    with pytest.raises(StoreCorruptError, match="not"):
        sqlite_store.trials()
    with pytest.raises(StoreError):
        sqlite_store.record(replace(trial, shape=replace(trial.shape, batch=7), error="x" * 100_000))


def test_a_log_of_another_file_is_not_taken_for_ours(sqlite_store: ResultStore, path: Path, trial: Trial) -> None:
    """A backup that was put back over the file, while the log of the newer file stayed next to it."""
    backup = path.read_bytes()
    with closing(connect_sqlite(f"{path.as_uri()}?mode=rw", 1)) as keeps_the_log:
        keeps_the_log.execute("SELECT count(*) FROM trial").fetchone()
        sqlite_store.record(trial)
        log = Path(f"{path}-wal").read_bytes()
    path.write_bytes(backup)
    Path(f"{path}-wal").write_bytes(log)
    with ResultStore.open(path) as store:
        assert store.trials() in ([], [trial])
        assert store.health().integrity == "ok"


def test_a_forked_writer_and_threads_beside_it_lose_nothing(path: Path, document: Path) -> None:
    told = in_a_process(
        """
        import threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forks with threads running
        def write(writer, count):
            for number in range(count):
                own = replace(trial.config, extra=(("number", number), ("writer", writer)))
                store.record(replace(trial, config=own))
        threads = [threading.Thread(target=write, args=(writer, 8)) for writer in range(4)]
        for thread in threads:
            thread.start()
        child = os.fork()  # while connections are open in other threads
        if child == 0:
            write(99, 8)
            os._exit(0)
        for thread in threads:
            thread.join()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"child": status, "trials": len(store.trials()), "integrity": store.health().integrity}))
        """,
        path,
        document,
    )
    assert told == {"child": 0, "trials": 40, "integrity": "ok"}
