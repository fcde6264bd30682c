"""`tune doctor`: facts, problems, and what to do about them."""

import json
import sqlite3
from pathlib import Path

import pytest

from blocktune.cli.explain import checks
from blocktune.cli.explain.checks import Level
from blocktune.db.exchange.document import frozen_document, save_text
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.driver import DriverReport
from blocktune.kernels.stored.json_pieces import canonical_text

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
