"""Who may do what on a server, over an encrypted connection, and what production needs of it: nothing."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.cli.main import app
from blocktune.db.records.records import Best, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import StoreError
from blocktune.runtime.store_reader.sources import JsonConfigs
from tests.support.command_line import CliRunner, Result
from tests.support.stores.postgres_server import PostgresServer, free_port

ROOT = Path(__file__).parents[3]


def documented(role: str) -> tuple[str, ...]:
    """Return the statements of docs/guide/results.md that make a role."""
    page = (ROOT / "docs/guide/results.md").read_text()
    block = page.split(f"-- {role}\n")[1].split("```")[0].split("\n--")[0]
    return tuple(statement.strip() for statement in block.split(";") if statement.strip())


def tune(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def place(own_server: PostgresServer) -> str:
    """A store with the roles of the documents."""
    own_server.create_database("blocktune")
    place = own_server.url("blocktune")
    ResultStore.open(place).close()
    for role in ("reader", "writer"):
        own_server.execute(*documented(f"blocktune_{role}"), database="blocktune")
    return place


def test_a_role_that_may_read_serves_every_command_that_reads(
    own_server: PostgresServer, place: str, best: Best, trial: Trial, tmp_path: Path
) -> None:
    with ResultStore.open(place) as store:
        store.set_best(best)
        store.record(trial)
    reader = own_server.url("blocktune", "blocktune_reader")
    diff = tune("diff", reader, reader)
    assert diff.exit_code == 0, diff.stderr
    for words in (
        f"best --device h200 --seq {best.shape.seqlen_q} --dim 64 --heads 32 --json",
        "list --json",
        "doctor --json",
        f"export {tmp_path / 'e.json'} --trials",
        f"freeze {tmp_path / 'f.json'} --device h200",
    ):
        result = tune(*words.split(), "--db", reader)
        assert result.exit_code == 0, (words, result.stdout, result.stderr)


def test_a_role_that_may_only_read_is_told_so_when_it_writes(
    own_server: PostgresServer, place: str, trial: Trial
) -> None:
    with (
        ResultStore.open(own_server.url("blocktune", "blocktune_reader")) as store,
        pytest.raises(StoreError, match="permission denied"),
    ):
        store.record(replace(trial, time_us=1.5))


def test_a_writer_needs_no_more_than_its_role_has(
    own_server: PostgresServer, place: str, trial: Trial, best: Best
) -> None:
    writer = own_server.url("blocktune", "blocktune_writer")
    with ResultStore.open(writer) as store:
        store.record(trial)
        store.record(replace(trial, time_us=3.5))
        store.set_best(best)
        store.merge([], trust=True)
        store.remove_best(best)
        assert [each.time_us for each in store.trials()] == [3.5]
        assert store.bests() == []
    assert tune("gc", "--apply", "--db", writer).exit_code == 0


def test_a_role_without_rights_is_refused_in_words(own_server: PostgresServer, place: str) -> None:
    own_server.execute("CREATE ROLE stranger LOGIN", database="blocktune")
    with pytest.raises(StoreError, match="permission denied"):
        ResultStore.open(own_server.url("blocktune", "stranger"), read_only=True)
    own_server.create_database("empty")
    with pytest.raises(StoreError, match="permission denied"):
        ResultStore.open(own_server.url("empty", "stranger"))


def test_what_production_reads_is_frozen_from_the_server_and_outlives_it(
    own_server: PostgresServer, best: Best, tmp_path: Path
) -> None:
    place, file = own_server.create_database("frozen"), tmp_path / "h200.json"
    assert best.default is not None
    winner = replace(best, config=best.default)
    local, same = tmp_path / "local.db", tmp_path / "same.json"
    for target in (place, str(local)):
        with ResultStore.open(target) as store:
            store.set_best(winner)
    assert tune("freeze", str(file), "--device", "h200", "--db", place).exit_code == 0
    assert tune("freeze", str(same), "--device", "h200", "--db", str(local)).exit_code == 0
    assert file.read_bytes() == same.read_bytes()
    own_server.stop("fast")
    try:
        (served,) = JsonConfigs(file).configs(best.device)
    finally:
        own_server.start()
    assert (served.shape, served.config) == (winner.shape, winner.config)


@pytest.fixture
def encrypted(own_server: PostgresServer) -> Iterator[int]:
    """The port at which the server speaks TLS, with a certificate for `localhost` next to its data."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    words = ["-keyout", "server.key", "-out", "server.crt"]
    subprocess.run([*make.split(), *words], check=True, cwd=own_server.folder, capture_output=True, timeout=60)
    for name in ("server.key", "server.crt"):
        own_server.own(own_server.folder / name)
    before, port = dict(own_server.settings), free_port()
    files = {
        f"ssl_{kind}_file": str(own_server.folder / f"server.{end}") for kind, end in (("key", "key"), ("cert", "crt"))
    }
    own_server.stop("fast")
    own_server.settings |= {"listen_addresses": "127.0.0.1", "port": str(port), "ssl": "on", **files}
    own_server.start()
    try:
        yield port
    finally:
        own_server.stop("fast")
        own_server.settings = before
        own_server.start()


def test_a_server_is_known_by_its_certificate(own_server: PostgresServer, encrypted: int, trial: Trial) -> None:
    own_server.execute("CREATE DATABASE encrypted")

    def url(host: str, certificate: Path) -> str:
        words = f"sslmode=verify-full&sslrootcert={certificate}"
        return f"postgresql+psycopg://tester@{host}:{encrypted}/encrypted?{words}"

    sound, other = own_server.folder / "server.crt", own_server.folder / "other.crt"
    with ResultStore.open(url("localhost", sound)) as store:
        store.record(trial)
        with store._engines.reader.connect() as connection:
            used = connection.exec_driver_sql("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").scalar_one()
    assert used
    with pytest.raises(StoreError, match="does not match host name"):
        ResultStore.open(url("127.0.0.1", sound))
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout other.key -out other.crt"
    subprocess.run(make.split(), check=True, cwd=own_server.folder, capture_output=True, timeout=60)
    with pytest.raises(StoreError, match="certificate verify failed"):
        ResultStore.open(url("localhost", other))
