"""What keeps a store in order: merging, differences and cleaning."""

import itertools
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from blocktune.db.exchange.differences import WinnerChange, differences
from blocktune.db.exchange.document import frozen_document, save_document, save_text
from blocktune.db.exchange.importing import records_from
from blocktune.db.exchange.merging import Results, winner_of
from blocktune.db.records.records import Best, Regime, Trial
from blocktune.db.sources import read_results
from blocktune.db.store import ResultStore
from blocktune.db.tables.cleaning import Rules
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import ImportRejectedError, StoreError, UsageError
from tests.support.stores.filled_stores import filled

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
    assert winner_of([cool, warm, other]) == cool  # with different defaults only times can be compared
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
    assert [(each.change, each.winner.shape.seqlen_q) for each in found] == [
        (WinnerChange.REMOVED, 512),
        (WinnerChange.CONFIG, 1024),
        (WinnerChange.RETIMED, 4096),
        (WinnerChange.ADDED, 8192),
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
        connection.execute("UPDATE best SET checksum = NULL")
    with pytest.raises(StoreError, match="printable"):
        read_results(str(tmp_path / "copy.db"), trials=False)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE best SET created_at = '2999-01-01 00:00:00.000000', checksum = NULL")
    with pytest.raises(ImportRejectedError, match="created_at"):
        read_results(str(path), trials=False)
