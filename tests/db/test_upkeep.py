"""What keeps a store in order: merging, differences, cleaning and recovery."""

import itertools
import random
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from blocktune.db.exchange.differences import Change, differences
from blocktune.db.exchange.document import frozen_document, save_document, save_text
from blocktune.db.exchange.importing import records_from
from blocktune.db.exchange.merging import Results, winner_of
from blocktune.db.records.records import Best, Outcome, Regime, Trial
from blocktune.db.recovery import recover
from blocktune.db.sources import read_results
from blocktune.db.store import ResultStore
from blocktune.db.tables.cleaning import Rules
from blocktune.kernels.stored.export_file import canonical_text
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import (
    ForeignStoreError,
    ImportRejectedError,
    SchemaTooNewError,
    StoreError,
    StoreLockedError,
    UsageError,
)

HOUR = timedelta(hours=1)


def test_of_several_winners_the_surest_youngest_software_and_fastest_stays(best: Best) -> None:
    upgraded = replace(best.environment, triton="3.9.0")
    slow_new = replace(best, environment=upgraded, time_us=120.0, created_at=best.created_at + HOUR)
    fast_new = replace(slow_new, time_us=110.0, created_at=best.created_at + HOUR / 2)
    young_guess = replace(best, origin=Origin.PREDICTED, time_us=None, created_at=best.created_at + 9 * HOUR)
    borrowed = replace(best, origin=Origin.BORROWED, time_us=1.0, created_at=best.created_at + 9 * HOUR)
    for order in itertools.permutations([best, slow_new, fast_new, young_guess, borrowed]):
        assert winner_of(order) == fast_new
    assert winner_of([best, slow_new]) == slow_new  # times of different software are not compared
    changed_source = replace(best, kernel_hash="f" * 16, time_us=500.0, created_at=best.created_at + HOUR)
    assert winner_of([best, changed_source]) == changed_source
    assert winner_of([young_guess, borrowed]) == borrowed


def test_winners_timed_beside_the_same_default_are_compared_by_it(best: Best) -> None:
    """The default alone on a cool GPU, against a config that was 4 % faster than it on a warm one."""
    assert best.default is not None
    cool = replace(best, config=best.default, time_us=95.0, default_time_us=95.0, created_at=best.created_at + HOUR)
    warm = replace(best, time_us=100.0, default_time_us=104.0)
    for order in itertools.permutations([cool, warm]):
        assert winner_of(order) == warm
    other = replace(best, default=replace(best.default, num_stages=1), time_us=99.0, default_time_us=200.0)
    untimed = replace(cool, default_time_us=None)
    assert winner_of([cool, warm, other]) == cool  # beside different defaults times are all there is
    assert winner_of([untimed, warm]) == untimed


def test_of_two_regimes_the_one_measured_last_stays(best: Best, sqlite_store: ResultStore) -> None:
    rested = replace(best, environment=replace(best.environment, regime=Regime.BURST), time_us=50.0)
    later = replace(best, created_at=best.created_at + HOUR)
    for order in itertools.permutations([rested, later]):
        assert winner_of(order) == later  # although it is slower: hot and cool times are not compared
    assert sqlite_store.set_best(rested)
    assert sqlite_store.bests() == [rested]
    assert sqlite_store.set_best(later)
    assert sqlite_store.bests() == [later]
    (source,) = sqlite_store.configs(best.device)
    assert source.time_us == later.time_us


def test_a_merge_takes_everything_in_and_is_the_same_in_any_order(
    tmp_path: Path, bests: list[Best], trial: Trial
) -> None:
    mine, theirs = (
        Results(bests=tuple(bests[:3]), trials=(trial,)),
        Results(
            bests=(replace(bests[2], time_us=50.0, config=KernelConfig("flash_fwd", 64, 64, 4, 2)), *bests[3:]),
            trials=(replace(trial, config=replace(trial.config, num_stages=1)),),
        ),
    )
    documents = []
    for name, sources in (("a", [mine, theirs]), ("b", [theirs, mine])):
        with ResultStore.open(tmp_path / name) as store:
            counts = store.merge(sources, trust=True)
            assert (counts.bests, counts.trials) == (5, 2)
            documents.append(store.export_json(trials=True))
    assert documents[0] == documents[1]
    assert documents[0]["bests"][2]["time_us"] == 50.0


def test_results_are_read_wherever_they_are(tmp_path: Path, bests: list[Best], trial: Trial) -> None:
    anonymous = replace(trial.device, uuid=None)
    expected = sorted((replace(best, device=anonymous) for best in bests), key=lambda best: best.shape.seqlen_q)
    with ResultStore.open(tmp_path / "store.db") as store:
        store.merge([Results(bests=tuple(bests), trials=(trial,))], trust=True)
        save_document(store.export_json(trials=True), tmp_path / "export.json")
        save_text(canonical_text(frozen_document(trial.device, bests)), tmp_path / "frozen.json")
    for name in ("store.db", "export.json"):
        found = read_results(str(tmp_path / name), trials=True)
        assert list(found.bests) == expected
        assert found.trials == (replace(trial, device=anonymous),)
        assert read_results(str(tmp_path / name), trials=False).trials == ()
    frozen = read_results(str(tmp_path / "frozen.json"), trials=True).bests
    assert [(best.shape, best.config, best.time_us) for best in frozen] == [
        (best.shape, best.config, best.time_us) for best in expected
    ]
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_results(str(tmp_path / "missing.json"), trials=False)


def test_a_frozen_file_is_the_same_wherever_it_is_made_and_small(tmp_path: Path, bests: list[Best]) -> None:
    texts = []
    for name, order, clock in (("a", 1, 1980), ("b", -1, 1755)):
        with ResultStore.open(tmp_path / name) as store:
            for best in bests[::order]:
                store.set_best(replace(best, device=replace(best.device, clock_mhz=clock, uuid=f"GPU-{name}")))
            texts.append(canonical_text(frozen_document(best.device, store.bests())))
    assert texts[0] == texts[1]
    assert len(texts[0]) < 700 * len(bests)


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "frozen.json").symlink_to(tmp_path / "precious")
    save_text("{}", tmp_path / "frozen.json")
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "frozen.json").is_symlink()


def test_a_changed_frozen_file_is_seen(best: Best) -> None:
    document = frozen_document(best.device, [best])
    assert records_from(document)[0][0].config == best.config
    document["bests"][0]["config"]["num_stages"] += 1
    with pytest.raises(ImportRejectedError, match="changed after it was frozen"):
        records_from(document)


def test_differences_say_what_changed(bests: list[Best]) -> None:
    other_config = replace(bests[1], config=KernelConfig("flash_fwd", 64, 64, 4, 2), time_us=49.75)
    later = replace(bests[2], created_at=bests[2].created_at + HOUR)  # the same result, seen again
    retimed = replace(bests[3], environment=replace(bests[3].environment, driver="600"))
    found = differences(bests[:4], [other_config, later, retimed, bests[4]])
    assert [(each.change, each.subject.shape.seqlen_q) for each in found] == [
        (Change.REMOVED, 512),
        (Change.CONFIG, 1024),
        (Change.RETIMED, 4096),
        (Change.ADDED, 8192),
    ]
    assert [each.ratio for each in found] == [None, 0.5, 1.0, None]
    assert differences(bests, bests) == []


def test_cleaning_drops_what_cannot_be_compared_and_keeps_winners(store: ResultStore, best: Best, trial: Trial) -> None:
    dead = [
        replace(trial, kernel_hash="d" * 16, config=replace(trial.config, num_stages=stage), error="x" * 20_000)
        for stage in range(1, 9)
    ]
    old = replace(trial, environment=replace(trial.environment, protocol=1))
    stranger = replace(trial, config=KernelConfig("my_kernel", 64, 64, 4, 2), kernel_hash="e" * 16)
    store.merge(
        [Results(bests=(replace(best, kernel_hash="d" * 16),), trials=(trial, old, stranger, *dead))], trust=True
    )
    rules = Rules(source_hashes={"flash_fwd": trial.kernel_hash}, protocol=2)
    before = store.export_json(trials=True)
    planned = store.clean(rules, dry_run=True)
    assert store.export_json(trials=True) == before
    done = store.clean(rules, dry_run=False)
    assert (done.dead_kernel, done.old_protocol, done.trials, done.bests) == (8, 1, 2, 1)
    assert (planned.dead_kernel, planned.old_protocol, planned.unreferenced) == (8, 1, done.unreferenced)
    assert {each.config.kernel for each in store.trials()} == {"flash_fwd", "my_kernel"}
    assert store.export_json()["bests"] == before["bests"]
    rows = store.health().rows
    assert (rows["environment"], rows["kernel"], rows["config"]) == (1, 3, 4)
    again = store.clean(rules, dry_run=False)
    assert (again.dead_kernel, again.old_protocol, again.unreferenced) == (0, 0, 0)


def test_cleaning_gives_space_back(sqlite_store: ResultStore, path: Path, trial: Trial) -> None:
    many = [replace(trial, config=replace(trial.config, extra=(("n", n),)), error="x" * 5000) for n in range(200)]
    sqlite_store.merge([Results(trials=tuple(many))], trust=True)
    counts = sqlite_store.clean(Rules(source_hashes={"flash_fwd": "f" * 16}, protocol=0), dry_run=False)
    assert counts.dead_kernel == 200
    assert counts.bytes_after == path.stat().st_size < 200_000
    assert not path.with_name(path.name + "-wal").exists()


def filled(path: Path, best: Best, trial: Trial, count: int) -> list[Trial]:
    trials = [
        replace(
            trial,
            config=replace(trial.config, extra=(("n", n),)),
            outcome=Outcome.OK if n % 3 else Outcome.RUN_ERROR,
            time_us=99.5 if n % 3 else None,
            error="e" * 100,
        )
        for n in range(count)
    ]
    with ResultStore.open(path) as store:
        store.merge([Results(bests=(best,), trials=tuple(trials))], trust=True)
    return trials


def files(folder: Path) -> list[str]:
    """The names of a folder's files, without those that SQLite keeps beside a store while it is open."""
    return sorted(each.name for each in folder.iterdir() if not each.name.endswith(("-wal", "-shm")))


def test_a_sound_store_is_left_alone(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 3)
    before = path.read_bytes()
    assert recover(path) is None
    assert path.read_bytes() == before
    assert files(path.parent) == [path.name]


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
    assert found.trials + found.lost >= 90
    assert Path(found.kept).read_bytes() == data
    with ResultStore.open(path) as store:
        assert store.bests() == [best]
        saved = store.trials()
        assert store.health().sound
    assert len(saved) == found.trials
    assert all(each in trials for each in saved)
    assert files(path.parent) == sorted([path.name, Path(found.kept).name])


def test_rows_that_break_a_rule_are_left_behind(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 12)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("UPDATE trial SET time_us = -1 WHERE id = 2")
        connection.execute("UPDATE trial SET samples_us = 'no json' WHERE id = 3")
        connection.execute("UPDATE trial SET created_at = 'yesterday' WHERE id = 5")
        connection.execute("UPDATE trial SET config_id = 999 WHERE id = 6")
    found = recover(path)
    assert found is not None
    assert (found.bests, found.trials, found.lost) == (1, 8, 4)
    assert recover(path) is None


def test_rows_of_own_kernels_are_saved_as_they_are(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 3)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "INSERT INTO user_best (device_id, environment_id, kernel, source_hash, problem, config, default_config, "
            "created_at, time_us, trials) SELECT device.id, environment.id, 'mine:add', 'ab', '{}', '{}', '{}', "
            "'2026-11-20 12:00:00.000000', 5.5, 3 FROM device, environment"
        )
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("UPDATE trial SET time_us = -1 WHERE id = 2")
    found = recover(path)
    assert found is not None
    assert (found.bests, found.trials, found.user_rows, found.lost) == (1, 2, 1, 1)
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT device.key, kernel, problem, time_us FROM user_best JOIN device ON device.id = device_id"
        ).fetchall()
    assert rows == [(best.device.key, "mine:add", "{}", 5.5)]


def test_a_file_of_noise_becomes_a_fresh_store_and_is_kept(path: Path) -> None:
    noise = random.Random(1).randbytes(20_000)
    path.write_bytes(noise)
    found = recover(path)
    assert found is not None
    assert (found.bests, found.trials) == (0, 0)
    assert Path(found.kept).read_bytes() == noise
    with ResultStore.open(path, read_only=True) as store:
        assert store.bests() == []


def test_random_damage_never_loses_the_file_nor_invents_a_row(tmp_path: Path, best: Best, trial: Trial) -> None:
    sound = tmp_path / "sound.db"
    trials = filled(sound, best, trial, 60)
    choose = random.Random(2)
    for number in range(8):
        path = tmp_path / f"{number}" / "blocktune.db"
        path.parent.mkdir()
        data = bytearray(sound.read_bytes())
        for _ in range(40):
            data[choose.randrange(100, len(data))] = choose.randrange(256)
        path.write_bytes(data)
        try:
            found = recover(path)
        except (ForeignStoreError, SchemaTooNewError):  # the damage hit a name or the version
            assert path.read_bytes() == data
            continue
        if found is None:
            continue
        assert Path(found.kept).read_bytes()[:100] == data[:100]
        with ResultStore.open(path) as store:
            assert store.health().sound
            # A flipped byte inside a text or a number can be seen by nobody; what is saved obeys all rules.
            assert len(store.trials()) == found.trials <= len(trials)


def test_a_lock_is_no_damage(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 3)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreLockedError):
            recover(path, lock_timeout_seconds=0.1)
    assert files(path.parent) == [path.name]


def test_what_cannot_be_recovered_is_refused(tmp_path: Path) -> None:
    export = tmp_path / "h200.txt"
    export.write_text('{"format": "blocktune-results"}\n')
    with pytest.raises(ForeignStoreError, match="is a text file"):
        recover(export)
    assert files(tmp_path) == ["h200.txt"]
    with pytest.raises(UsageError, match="results file by its name"):
        recover(tmp_path / "h200.json")
    with pytest.raises(UsageError, match="Only a SQLite file"):
        recover("postgresql+psycopg://user:secret@host/name")
    with pytest.raises(StoreError, match="there is no"):
        recover(tmp_path / "missing.db")


def test_a_merge_reads_a_store_that_others_only_lend(tmp_path: Path, best: Best, trial: Trial) -> None:
    path = tmp_path / "theirs.db"
    filled(path, best, trial, 2)
    before = path.read_bytes()
    assert len(read_results(str(path), trials=True).trials) == 2
    assert path.read_bytes() == before


def test_a_hostile_store_is_read_by_the_rules_of_a_document(tmp_path: Path, best: Best, trial: Trial) -> None:
    path = tmp_path / "theirs.db"
    filled(path, best, trial, 2)
    shutil.copyfile(path, tmp_path / "copy.db")
    with closing(sqlite3.connect(tmp_path / "copy.db")) as connection, connection:
        connection.execute("UPDATE environment SET triton = char(27) || '[2J'")
    with pytest.raises(StoreError, match="printable"):
        read_results(str(tmp_path / "copy.db"), trials=False)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE best SET created_at = '2999-01-01 00:00:00.000000'")
    with pytest.raises(ImportRejectedError, match="created_at"):
        read_results(str(path), trials=False)
