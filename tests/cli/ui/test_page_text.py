"""What every view needs at once: the database's winners and rungs, on a server as in a file, made again when they
change."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("altair", reason="charts need altair")

from blocktune.cli.report.sources import Sources
from blocktune.cli.ui.page_text import PageText
from blocktune.db.records.records import Best
from blocktune.db.store import ResultStore
from blocktune.db.tables.location import StoreTarget

LENGTH = 8190
"""Of keys: a shape that does not ship."""


@dataclass
class KnownWinners:
    """The part of `LiveStore` that is needed."""

    found: list[Best] = field(default_factory=list)

    def winners(self) -> tuple[Any, list[Best]]:
        return len(self.found), self.found


@pytest.mark.parametrize("place", ["file", "server"])
def test_a_winner_of_the_database_answers_its_shape(place: str, winner: Callable[..., Best], tmp_path: Path) -> None:
    base = winner()
    own = winner(shape=type(base.shape).from_json(base.shape.to_json() | {"seqlen_k": LENGTH}))
    target = StoreTarget.of(tmp_path / "a.db" if place == "file" else "postgresql+psycopg://user@nowhere/none")
    if place == "file":
        with ResultStore.open(target) as store:
            store.set_best(own)
    known = KnownWinners()
    page = PageText(known, target, Sources())  # type: ignore[arg-type]  # all that it asks of a store
    before = page.text()
    assert own.shape.label not in [each["label"] for each in json.loads(before)["winners"]]
    assert page.text() is before
    known.found.append(own)
    data = json.loads(page.text())
    assert own.shape.label in [each["label"] for each in data["winners"]]
    assert data["rungs"][own.device.name][own.shape.label] == "exact"
