"""Old and new clients next to each other, and a migration while others read and write."""

import threading
from dataclasses import replace

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from blocktune.db.records.records import Trial
from blocktune.db.store import ResultStore
from blocktune.db.tables.schema import CURRENT, VERSION_TABLE
from blocktune.kernels.values.errors import SchemaTooNewError, StoreError, StoreLockedError
from tests.support.stores.postgres_server import PostgresServer


def set_version(place: str, version: str) -> None:
    url = place if "://" in place else f"sqlite:///{place}"
    with create_engine(url, poolclass=NullPool).begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '{version}'"))


def test_a_client_whose_store_was_upgraded_meanwhile_writes_nothing_more(
    store: ResultStore, target: str, trial: Trial
) -> None:
    store.record(trial)
    set_version(target, "9999")
    with pytest.raises(SchemaTooNewError, match=r"has schema 9999 by now\. Update blocktune"):
        store.record(replace(trial, kernel_hash="e" * 16))
    set_version(target, "0004")
    with pytest.raises(StoreError, match=r"has schema 0004 by now\. Start again"):
        store.record(replace(trial, kernel_hash="e" * 16))
    set_version(target, CURRENT)
    assert store.trials() == [trial]


def older_store(server: PostgresServer, name: str) -> str:
    """Return the URL of a store of schema 4 with a row."""
    place = server.create_database(name)
    config = Config()
    config.set_main_option("script_location", "blocktune.db:migrations")
    with create_engine(place, poolclass=NullPool).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0004")
        connection.execute(text("INSERT INTO kernel (name, source_hash) VALUES ('flash_fwd', 'ffffffffffffffff')"))
    return place


def test_an_upgrade_waits_for_who_reads_and_changes_nothing_if_that_lasts(
    own_server: PostgresServer, trial: Trial
) -> None:
    place = older_store(own_server, "upgraded")
    with create_engine(place, poolclass=NullPool).begin() as reading:
        reading.execute(text("SELECT count(*) FROM trial"))
        with pytest.raises(StoreLockedError):
            ResultStore.open(place, lock_timeout_seconds=0.3)
        (version,) = own_server.execute(f"SELECT version_num FROM {VERSION_TABLE}", database="upgraded")
        assert version == ("0004",)
        opening = threading.Thread(target=lambda: ResultStore.open(place).record(trial))
        opening.start()
    opening.join(60)
    with ResultStore.open(place, read_only=True) as store:
        assert store.trials() == [trial]
        assert store.health().rows["kernel"] == 2
