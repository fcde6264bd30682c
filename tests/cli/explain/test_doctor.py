"""`tune doctor`: facts, problems, and what to do about them."""

import json
import shutil
import sqlite3
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from blocktune.cli.explain import checks, store_checks
from blocktune.cli.explain.findings import Level
from blocktune.db.exchange.document import frozen_document, save_text
from blocktune.db.recovery import drill as drill_module
from blocktune.db.recovery.drill import drill
from blocktune.db.spool import Spool, left_files
from blocktune.db.store import ResultStore
from blocktune.db.tables.backups import back_up
from blocktune.db.tables.location import StoreTarget
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.driver import DriverReport

QUICK = ("blocktune", "torch", "triton", "ptxas", "SQLite", "database", "GPU", "python")


def findings(tune) -> dict[str, dict[str, str]]:
    return {finding["name"]: finding for finding in json.loads(tune("doctor", "--json").stdout)["findings"]}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    report = DriverReport(problem="No NVIDIA driver is installed.")
    monkeypatch.setattr("blocktune.kernels.hardware.driver.read_driver", lambda: report)
    monkeypatch.setattr("blocktune.kernels.hardware.device.read_driver", lambda: report)


@pytest.mark.usefixtures("no_gpu")
def test_the_json_reports_every_subject(tune) -> None:
    found = findings(tune)
    assert set(QUICK) <= set(found)
    assert found["GPU"]["level"] == "warning"
    assert "No NVIDIA driver is installed." in found["GPU"]["meaning"]
    assert "--device h200" in found["GPU"]["fix"]
    assert "not there yet" in found["database"]["value"]
    assert not tune.db.exists(), "looking creates nothing"


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_gpu_is_no_fault(tune) -> None:
    result = tune("doctor")
    assert result.exit_code == 0
    assert "warning GPU: No NVIDIA driver is installed." in result.stdout


@pytest.mark.usefixtures("no_gpu")
def test_a_sound_database_is_described(tune) -> None:
    ResultStore.open(tune.db).close()
    database = findings(tune)["database"]
    assert database["level"] == "ok"
    assert str(tune.db) in database["value"]
    assert "0 trials" in database["value"]


@pytest.mark.usefixtures("no_gpu")
def test_a_file_that_is_no_database_is_a_problem_and_exit_code_5(tune) -> None:
    tune.db.write_bytes(b"no database" * 1000)
    result = tune("doctor", "--json")
    assert result.exit_code == 5
    database = next(each for each in json.loads(result.stdout)["findings"] if each["name"] == "database")
    assert database["level"] == "problem"
    assert database["meaning"]
    assert tune.db.read_bytes() == b"no database" * 1000


@pytest.mark.usefixtures("no_gpu")
def test_a_frozen_file_for_the_dispatcher_is_described(tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "frozen.json"
    save_text(canonical_text(frozen_document(device_named("h200"), [])), file)
    monkeypatch.setattr(tune, "db", file)
    found = findings(tune)
    assert "database" not in found
    assert found["results file"]["value"] == f"{file} (0 winners, for the dispatcher only)"
    file.write_text(file.read_text().replace("H200", "H100"))
    result = tune("doctor", "--json")
    assert result.exit_code == 5
    assert "changed after it was frozen" in result.stdout


@pytest.mark.parametrize("name", checks.TRITON_VARIABLES)
def test_a_variable_that_changes_results_is_reported(name: str) -> None:
    (finding,) = checks._variables({name: "1", "PATH": "/bin"})
    assert (finding.name, finding.level) == (name, Level.WARNING)
    assert name in finding.fix


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 6, 23), Level.OK), ((3, 40, 1), Level.WARNING), ((3, 51, 2), Level.WARNING), ((3, 51, 3), Level.OK)],
)
def test_the_range_of_the_wal_bug(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], level: Level) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    (finding,) = checks._sqlite()
    assert finding.level is level


def test_a_missing_c_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    compiler = next(finding for finding in checks._toolchain() if finding.name == "C compiler")
    assert compiler.level is Level.WARNING
    assert "gcc" in compiler.fix


@pytest.mark.usefixtures("no_gpu")
def test_who_can_change_the_database_is_said(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    ResultStore.open(tune.db).close()
    assert "database owner" not in findings(tune)
    tune.db.chmod(0o666)
    result = tune("doctor", "--json")
    assert result.exit_code == 5
    owner = next(each for each in json.loads(result.stdout)["findings"] if each["name"] == "database owner")
    assert (owner["level"], owner["value"]) == ("problem", f"every user may write {tune.db}")
    monkeypatch.setenv("BLOCKTUNE_TRUST_OWNER", "1")
    assert findings(tune)["database owner"]["level"] == "warning"


@pytest.mark.usefixtures("no_gpu")
def test_a_winner_dated_ahead_and_a_full_disk_are_said(tune, winner, monkeypatch: pytest.MonkeyPatch) -> None:
    tune.store(winner())
    assert not {"clock", "free space"} & set(findings(tune))
    tune.store(winner(shape=replace(winner().shape, batch=9), created_at=datetime.now(UTC) + timedelta(days=400)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    found = findings(tune)
    assert found["clock"]["value"] == "1 winner dated in the future"
    assert found["free space"]["value"] == "1.0 MB"


def test_triton_s_cache_is_looked_at(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    names = {"TRITON_CACHE_DIR": str(cache)}
    assert list(store_checks.triton_cache(names)) == []
    cache.chmod(0o777)
    (finding,) = store_checks.triton_cache(names)
    assert (finding.name, finding.level) == ("Triton's cache", Level.WARNING)
    (finding, _) = store_checks.triton_cache(names | {"TRITON_CACHE_MANAGER": "module:Class"})
    assert finding.name == "TRITON_CACHE_MANAGER"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("place", ["user:secret@127.0.0.1:1/name", "user@127.0.0.1:1/name?password=secret"])
def test_a_password_in_a_url_is_said_and_not_shown(tune, place: str) -> None:
    result = tune("doctor", "--json", "--db", f"postgresql+psycopg://{place}")
    assert "secret" not in result.stdout + result.stderr
    (found,) = (each for each in json.loads(result.stdout)["findings"] if each["name"] == "password")
    assert "PGPASSFILE" in found["fix"]


def test_what_a_killed_search_left_is_stored(tune, winner) -> None:
    tune.store()
    target = StoreTarget.of(tune.db)
    spool = Spool(target)
    spool.keep(winner())
    assert spool.path is not None
    with spool.path.open("ab") as file:
        file.write(b'{"torn')
    spool.close()
    found = findings(tune)["measurements that waited"]
    assert found["value"].startswith("0 trials and 1 winner ")
    assert "1 torn lines" in found["value"]
    assert left_files(target) == []
    assert "measurements that waited" not in findings(tune)
    with ResultStore.open(tune.db) as store:
        assert store.bests() == [winner()]


def test_the_command_says_what_was_lost(tune, winner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill_module, "WAYS", 10)
    monkeypatch.setitem(drill.__kwdefaults__, "ways", 10)
    tune.store(winner())
    assert "10 damaged copies" in tune("doctor", "--drill").stdout
    told = json.loads(tune("doctor", "--drill", "--json").stdout)
    assert (told["copies"], told["rows"], told["wrong"], told["understated"]) == (10, 1, 0, 0)
    assert tune("doctor", "--drill", "--recover").exit_code == 2


def test_a_backup_is_put_in_place(tune, winner) -> None:
    tune.store(winner())
    back_up(tune.db)
    tune.db.write_bytes(b"damaged")
    assert "restored 1 row from" in tune("doctor", "--restore").stderr
    assert json.loads(tune("list", "--json").stdout)["bests"]
    told = json.loads(tune("doctor", "--restore", "--json").stdout)
    assert (told["rows"], told["newer"]) == (1, 0)
