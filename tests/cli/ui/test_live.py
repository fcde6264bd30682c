"""The server follows a database: new trials, new sweeps and winners arrive, and trouble is a message."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.report.sources import Sources
from blocktune.cli.ui import event_log
from blocktune.cli.ui.event_log import EventLog
from blocktune.cli.ui.feed import search_status
from blocktune.db.records.records import Best, Trial
from blocktune.db.store import ResultStore
from blocktune.tuner.lab.sweep_file import load_sweep
from tests.cli.ui.conftest import KNOWN, recorded
from tests.support.pages.event_streams import EventStream
from tests.support.pages.reports import DENSE, WIDE
from tests.support.stores.bad_stores import held_exclusively, overwritten_middle
from tests.support.stores.live_servers import LiveServer, live_server

Add = Callable[[Trial], None]
CLIENTS = 50


def opened(server: LiveServer) -> tuple[dict[str, Any], str, str]:
    """What a page reads when it opens: the table of the youngest sweep, its name and the numbers of its events."""
    assert server.ask("data")[0] == 200
    overview = server.ask("overview")[1]
    name = overview["sweeps"][0]["id"]
    table = server.ask(f"table/{name}")[1]
    return table, name, f"{overview['number']}.{table['number']}"


def test_a_page_opens_with_what_the_report_shows(server: LiveServer) -> None:
    table, _, _ = opened(server)
    columns = table["table"]["columns"]
    assert columns["time_us"] == [trial.time_us for trial in recorded()[:KNOWN]]
    assert table["table"]["shape_label"] == recorded()[0].shape.label
    assert table["status"]["state"] == "running"
    data = server.ask("data")[1]
    assert {"charts", "limits", "winners", "bench", "ladder", "fields"} <= data.keys()
    assert data["winners"], "those that ship"


def test_new_trials_arrive_once_as_rows(server: LiveServer, add: Add) -> None:
    _, name, seen = opened(server)
    stream = EventStream(server, seen, name)
    for trial in recorded()[KNOWN : KNOWN + 2]:
        add(trial)
    rows: list[int] = []
    times: list[float] = []
    while len(rows) < 2:
        update = stream.next("rows")
        rows += update["rows"]
        times += update["columns"]["time_us"]
    assert rows == [KNOWN, KNOWN + 1]
    assert times == [trial.time_us for trial in recorded()[KNOWN : KNOWN + 2]]
    assert stream.next("status")["trials"] > KNOWN
    stream.close()
    back = EventStream(server, seen, name, last_id=stream.last_id)
    add(recorded()[KNOWN + 2])
    assert back.next("rows")["rows"] == [KNOWN + 2]
    back.close()


def test_a_new_shape_and_a_winner_arrive(server: LiveServer, db: Path, winner: Callable[..., Best]) -> None:
    _, name, seen = opened(server)
    stream = EventStream(server, seen, name)
    trial = recorded()[KNOWN]
    longer = replace(trial, shape=replace(trial.shape, seqlen_q=512, seqlen_k=512))
    best = winner(device=trial.device, created_at=datetime.now(UTC))
    with ResultStore.open(db) as store:
        store.put_all([longer], [best])
    events = stream.each("sweeps", "status")
    (headline,), status = events["sweeps"], events["status"]
    assert headline["shape_label"] == longer.shape.label
    assert status["state"] == "finished"
    assert status["winner"]["time_us"] == best.time_us
    stream.close()
    assert server.ask("overview")[1]["sweeps"][0] == headline
    assert best.time_us in [each["time_us"] for each in server.ask("data")[1]["winners"]]


def test_other_software_begins_another_table(server: LiveServer, add: Add) -> None:
    _, name, seen = opened(server)
    stream = EventStream(server, seen, name)
    newer = replace(recorded()[0].environment, triton="9.9.9")
    add(replace(recorded()[0], environment=newer, created_at=datetime.now(UTC)))
    assert stream.next("table") == {}
    stream.close()
    table = server.ask(f"table/{name}")[1]["table"]
    assert len(table["columns"]["kernel"]) == 1
    assert table["environment"]["triton"] == "9.9.9"


def test_a_page_that_missed_too_much_reads_again(server: LiveServer, add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "KEPT", 500)
    _, name, _ = opened(server)
    add(recorded()[KNOWN])
    server.ask(f"table/{name}")
    stream = EventStream(server, "0.0", name)  # before the event with which the table began
    assert stream.next("status")
    stream.close()
    log = EventLog()
    for number in range(event_log.KEPT + 5):
        log.add("rows", number)
    assert log.after(4) == (event_log.KEPT + 5, None)
    assert log.after(log.number) == (log.number, [])


def test_fifty_pages_follow_one_search(server: LiveServer, add: Add) -> None:
    _, name, seen = opened(server)
    streams = [EventStream(server, seen, name) for _ in range(CLIENTS)]
    found: list[int] = []

    def read(stream: EventStream) -> None:
        found.append(stream.next("rows")["rows"][0])

    threads = [threading.Thread(target=read, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    add(recorded()[KNOWN])
    for thread in threads:
        thread.join(60)
    assert found == [KNOWN] * CLIENTS
    for stream in streams:
        stream.close()


def test_sweeps_of_files_stand_next_to_those_of_the_database(db: Path) -> None:
    sources = Sources(sweeps=[load_sweep(WIDE)])
    with live_server(db, sources=sources) as server:
        opened(server)
        names = {each["id"]: each["shape_label"] for each in server.ask("overview")[1]["sweeps"]}
        assert list(names)[-1] == "file-0"
        status, answer = server.ask("table/file-0")
        assert (status, answer["status"]["state"]) == (200, "recorded")
        assert len(answer["table"]["columns"]["kernel"]) == len(load_sweep(WIDE).trials)


def test_a_database_that_comes_later_is_shown_then(tmp_path: Path) -> None:
    db = tmp_path / "later.db"
    with live_server(db) as server:
        assert server.ask("data")[0] == 200
        overview = server.ask("overview")[1]
        stream = EventStream(server, f"{overview['number']}.0", "")
        if not overview["problem"]:
            overview["problem"] = stream.next("problem")["text"]
        assert "There is no database" in overview["problem"]
        assert not db.exists()
        with ResultStore.open(db) as store:
            store.put_all(recorded()[:3], [])
        assert stream.next("sweeps")
        stream.close()
        assert opened(server)[0]["status"]["trials"] == 3


@pytest.mark.parametrize("trouble", ["damaged", "gone"])
def test_a_store_in_trouble_is_a_message_until_it_is_well(server: LiveServer, db: Path, trouble: str) -> None:
    table, name, seen = opened(server)
    stream = EventStream(server, seen, name)
    sound = db.read_bytes()
    logs = [path for path in db.parent.iterdir() if path != db]
    for path in logs:
        path.unlink()
    if trouble == "damaged":
        overwritten_middle(db)
    else:
        os.rename(db, db.with_name("away.db"))
    words = {"damaged": "sound SQLite database", "gone": "no database at"}[trouble]
    while words not in stream.next("problem")["text"]:
        continue
    status, answer = server.ask(f"table/{name}")
    assert status == 503
    assert answer["message"]
    assert server.ask("data")[0] == 200
    db.write_bytes(sound)
    while stream.next("problem")["text"]:
        continue
    stream.close()
    assert server.ask(f"table/{name}")[1]["table"]["columns"] == table["table"]["columns"]


def test_a_locked_store_is_a_message(server: LiveServer, db: Path) -> None:
    _, name, seen = opened(server)
    stream = EventStream(server, seen, name)
    with held_exclusively(db):
        assert "locked" in stream.next("problem")["text"]
    while stream.next("problem")["text"]:
        continue
    stream.close()


def test_a_sweep_that_is_not_there_is_a_message(server: LiveServer) -> None:
    opened(server)
    answers = [server.ask(f"table/{name}") for name in ("7-7-sustained", "file-9", "x", "1-1-sustained%00")]
    assert [status for status, _ in answers] == [422] * 4
    assert all("that the page lists" in answer["message"] for _, answer in answers)


def test_a_search_runs_until_it_has_a_winner_or_is_silent(winner: Callable[..., Best]) -> None:
    trials = list(recorded()[:3])
    last = trials[-1].created_at
    assert search_status(trials, None, last + timedelta(seconds=60))["state"] == "running"
    assert search_status(trials, None, last + timedelta(minutes=10))["state"] == "stopped"
    old, new = (winner(created_at=last + timedelta(seconds=offset)) for offset in (-60, 1))
    assert search_status(trials, old, last + timedelta(minutes=10))["state"] == "stopped"
    assert search_status(trials, new, last + timedelta(minutes=10))["state"] == "finished"
    assert load_sweep(DENSE).shape == trials[0].shape
