"""Servers that a test may stop."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktune.db.exchange.document import document_from, save_document
from blocktune.db.records.records import Trial
from tests.support.stores.postgres_server import PostgresServer, need_server, running_server


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server of this file's own, which every test leaves running."""
    need_server()
    with running_server() as server:
        yield server


@pytest.fixture
def document(trial: Trial, tmp_path: Path) -> Path:
    """A file with the trial that writers vary."""
    file = tmp_path / "trial.json"
    save_document(document_from(trial.device, [], [trial]), file)
    return file
