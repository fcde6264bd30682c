"""What is saved of stores with damaged pages, and how honest the count of what is not."""

import os
import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Best, KernelBest, KernelTrial, Outcome, Trial
from blocktune.db.recovery.rebuild import Recovery, recover
from blocktune.db.recovery.salvage import SMALLEST_ROW_BYTES
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import ForeignStoreError, SchemaTooNewError
from blocktune.runtime.autotuned.config import KernelProblem, LaunchProblem
from tests.db.conftest import KERNEL
from tests.support.stores.filled_stores import files_in, filled

FULL = os.environ.get("BLOCKTUNE_FAULTS") == "full"
ROWS_IN_A_PAGE = 4096 // SMALLEST_ROW_BYTES


def table_pages(path: Path, table: str) -> list[int]:
    """The leaf pages of a table, by their first bytes and what is on them."""
    data = path.read_bytes()
    with closing(sqlite3.connect(path)) as connection:
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
    page = data[(root - 1) * 4096 : root * 4096]
    assert page[0] == 5  # an interior page: its cells name the children
    count = int.from_bytes(page[3:5], "big")
    cells = [int.from_bytes(page[12 + 2 * n : 14 + 2 * n], "big") for n in range(count)]
    return [*(int.from_bytes(page[cell : cell + 4], "big") for cell in cells), int.from_bytes(page[8:12], "big")]


@pytest.mark.parametrize("which", [0, 3, -1], ids=["first page", "a page within", "last page"])
def test_rows_around_a_damaged_page_are_saved(path: Path, best: Best, trial: Trial, which: int) -> None:
    trials = filled(path, best, trial, 90)
    page = table_pages(path, "trial")[which]
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = random.Random(0).randbytes(4096)
    path.write_bytes(data)
    found = recover(path)
    assert found is not None
    assert found.bests == 1
    assert 70 <= found.trials < 90
    assert found.lost_at_least == 0  # nothing of the page is readable, so what stood there is a matter of its size
    assert found.lost_at_most is not None
    assert 90 <= found.trials + found.lost_at_most <= 90 + ROWS_IN_A_PAGE
    assert Path(found.kept).read_bytes() == data
    with ResultStore.open(path) as store:
        assert store.bests() == [best]
        saved = store.trials()
        assert store.health().sound
    assert len(saved) == found.trials
    assert all(each in trials for each in saved)
    assert files_in(path.parent) == sorted([path.name, Path(found.kept).name])


@dataclass(frozen=True)
class Sound:
    """A store in good order: its bytes, and how many trials and winners are in it."""

    content: bytes
    rows: int


@pytest.fixture(scope="module")
def sound(
    tmp_path_factory: pytest.TempPathFactory,
    best: Best,
    trial: Trial,
    kernel_trial: KernelTrial,
    kernel_best: KernelBest,
) -> Sound:
    """A store of 200 trials, some with texts that take pages of their own, and 60 winners; 60 of a kernel."""
    path = tmp_path_factory.mktemp("sound") / "blocktune.db"
    trials = [
        replace(
            trial,
            config=replace(trial.config, extra=(("n", n),)),
            outcome=Outcome.RUN_ERROR,
            time_us=None,
            error="e" * (9000 if n % 20 == 0 else n),
        )
        for n in range(200)
    ]
    bests = [replace(best, shape=replace(best.shape, seqlen_q=64 * (1 + n))) for n in range(60)]
    problems = [KernelProblem(KERNEL, LaunchProblem((("n", n), ("name", "x" * n)))) for n in range(60)]
    with ResultStore.open(path) as store:
        store.merge([Results(bests=tuple(bests), trials=tuple(trials))], trust=True)
        kernel_bests = [replace(kernel_best, shape=problem) for problem in problems]
        store.put_all([replace(kernel_trial, shape=problem) for problem in problems], kernel_bests)
    return Sound(path.read_bytes(), 200 + 60 + 60 + 60)


def recovered(path: Path, content: bytes) -> Recovery | None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return recover(path)


def rows_of(path: Path) -> int:
    """How many trials and winners a sound store holds."""
    with ResultStore.open(path) as store:
        health = store.health()
    assert health.sound
    return sum(health.rows[name] for name in ("trial", "best"))


def flipped(content: bytes, dice: random.Random) -> bytes:
    """With a bit, some bytes or some hundred bytes overwritten."""
    damaged = bytearray(content)
    size = dice.choice([1, 1, 4, 16, 64, 1024, 4096])
    start = dice.randrange(len(damaged) - size)
    if size == 1 and dice.random() < 0.5:
        damaged[start] ^= 1 << dice.randrange(8)
    else:
        damaged[start : start + size] = dice.randbytes(size)
    return bytes(damaged)


@pytest.mark.parametrize(
    ("seed", "damages"),
    [*((seed, 25) for seed in range(12))] if FULL else [(0, 4), pytest.param(0, 12, marks=pytest.mark.exhaustive)],
)
def test_random_damage_never_costs_more_rows_than_it_says(
    tmp_path: Path, sound: Sound, seed: int, damages: int
) -> None:
    dice, unreadable = random.Random(seed), 0
    for number in range(damages):
        path = tmp_path / f"{number}" / "blocktune.db"
        content = flipped(sound.content, dice)
        try:
            found = recovered(path, content)
        except (ForeignStoreError, SchemaTooNewError):  # the damage hit a name or the version
            assert path.read_bytes() == content
            unreadable += 1
            continue
        if found is None:
            assert rows_of(path) == sound.rows
            continue
        assert Path(found.kept).read_bytes()[:100] == content[:100]
        lost = sound.rows - rows_of(path)
        assert 0 <= found.lost_at_least <= lost
        # with a row's page go the pages of its long text, which might have held rows as well
        assert found.lost_at_most is None or lost <= found.lost_at_most <= lost + 8 * ROWS_IN_A_PAGE
    assert unreadable <= 2


@pytest.mark.few(2)
@pytest.mark.parametrize("table", ["best", "trial", "device", "blocktune_schema", "environment"])
def test_a_damaged_definition_of_a_table_costs_no_row(tmp_path: Path, sound: Sound, table: str) -> None:
    damaged = bytearray(sound.content)
    damaged[damaged.find(f"CREATE TABLE {table}".encode()) + 3] = 255
    path = tmp_path / "blocktune.db"
    found = recovered(path, bytes(damaged))
    assert found is not None
    assert (found.lost_at_least, found.lost_at_most) == (0, 0)
    assert rows_of(path) == sound.rows


@pytest.mark.parametrize("size", [100, 4096], ids=["header", "first page"])
def test_without_a_schema_nothing_is_lost(tmp_path: Path, sound: Sound, size: int) -> None:
    path = tmp_path / "blocktune.db"
    found = recovered(path, b"\xa7" * size + sound.content[size:])
    assert found is not None
    assert rows_of(path) == sound.rows
    assert found.lost_at_least == 0


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("table", "column"), [("environment", "torch"), ("device", "name"), ("best", "gpu_uuid"), ("trial", "error")]
)
def test_a_byte_that_is_no_text_is_named_and_recovered(
    tmp_path: Path, sound: Sound, caplog: pytest.LogCaptureFixture, table: str, column: str
) -> None:
    path = tmp_path / "blocktune.db"
    path.write_bytes(sound.content)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE {table} SET {column} = CAST(x'3132ff' AS TEXT) WHERE id = 1")
    with ResultStore.open(path) as store:
        health = store.health()
        assert not health.sound
        assert f"a row of {table} breaks a rule" in health.integrity
        kept = len(store.trials()) + len(store.bests())
        assert table == "device" or "are not as they were written and are left out" in caplog.text
    found = recover(path)
    assert found is not None
    assert found.lost_at_least == found.lost_at_most == sound.rows - rows_of(path)
    with ResultStore.open(path) as store:
        assert len(store.trials()) + len(store.bests()) == kept


def test_rows_that_refer_to_nothing_are_named_and_counted(tmp_path: Path, sound: Sound) -> None:
    path = tmp_path / "blocktune.db"
    path.write_bytes(sound.content)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM shape WHERE id IN (SELECT shape_id FROM best LIMIT 5)")
    with ResultStore.open(path) as store:
        assert "links between rows lead nowhere" in store.health().integrity
    found = recover(path)
    assert found is not None
    lost = sound.rows - rows_of(path)
    assert found.lost_at_least == found.lost_at_most == lost >= 5


def test_a_file_that_was_cut_off_leaves_its_losses_open(tmp_path: Path, sound: Sound) -> None:
    path = tmp_path / "blocktune.db"
    found = recovered(path, sound.content[: len(sound.content) - 10 * 4096])
    assert found is not None
    assert found.lost_at_most is None
    assert 0 < rows_of(path) < sound.rows
    assert found.losses.startswith(f"at least {found.lost_at_least} are lost; how many more is unknown")


def test_a_page_of_the_wrong_kind_is_read_as_what_it_is(tmp_path: Path, path: Path, best: Best, trial: Trial) -> None:
    trials = filled(path, best, trial, 90)
    content = bytearray(path.read_bytes())
    for page in table_pages(path, "trial"):
        content[(page - 1) * 4096] = 0x0A
    found = recovered(tmp_path / "damaged" / "blocktune.db", bytes(content))
    assert found is not None
    assert (found.bests, found.trials, found.lost_at_most) == (1, len(trials), 0)
