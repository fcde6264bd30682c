"""A store, and the kernels of the synthetic tuning problem in the registry."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktune.db.store import ResultStore
from tests.support.models import landscape
from tests.support.stores.new_stores import new_store


@pytest.fixture
def landscape_kernels() -> Iterator[None]:
    with landscape.registered():
        yield


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResultStore]:
    with ResultStore.open(new_store(tmp_path / "store.db")) as store:
        yield store
