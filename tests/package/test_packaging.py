"""The wheel holds every folder and every data file that the sources need."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.distributions import FOLDERS, source_archive, unpacked_zip, wheel_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "blocktune"
SOURCES = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}


def test_nothing_is_a_link() -> None:
    """A ZIP, Windows and `core.symlinks=false` turn a link into a text file."""
    assert [path for path in (*ROOT.glob("[!.]*"), *PACKAGE.rglob("*")) if path.is_symlink()] == []


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_at_the_top_shows_where_its_code_is_and_holds_none(name: str) -> None:
    assert [path for path in (ROOT / name).rglob("*.py*") if "__pycache__" not in path.parts] == []
    assert f"(../blocktune/{name})" in (ROOT / name / "README.md").read_text()


def imported_at_the_root(code: str, installed: Path) -> subprocess.CompletedProcess[str]:
    """Run code as `python -c` at the top of the repository, with a folder of installed packages."""
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": ""}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_at_the_top_hides_no_installed_package(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    found = imported_at_the_root(f"import {name}; print({name}.__file__)", tmp_path)
    assert found.stdout.strip() == str(tmp_path / name / "__init__.py"), found.stderr


def test_a_folder_at_the_top_is_no_package_where_none_is_installed(tmp_path: Path) -> None:
    """Transformers, for example, takes a package `kernels` without a file and a version for absent."""
    found = imported_at_the_root("import kernels; print(kernels.__file__); import kernels.registry", tmp_path)
    assert found.stdout.strip() == "None"
    assert "No module named 'kernels.registry'" in found.stderr


def test_every_folder_with_python_files_is_a_package() -> None:
    """One without an `__init__.py` is not found by the build."""
    paths = {Path(name) for name in SOURCES}
    assert {path.parent for path in paths} == {path.parent for path in paths if path.name == "__init__.py"}


def archive_of_a_zip(folder: Path) -> Path:
    return source_archive(unpacked_zip(folder), folder)


@pytest.fixture(scope="module", params=[unpacked_zip, archive_of_a_zip], ids=["zip", "sdist"])
def wheel_names(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel that is built from a copy, so that no build folder is left in the sources."""
    pytest.importorskip("setuptools", minversion="77", reason="building the wheel needs setuptools >= 77")
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel_of(request.param(folder), folder)) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_source_files_and_no_other_ones(wheel_names: set[str]) -> None:
    assert {name for name in wheel_names if name.endswith(".py")} == SOURCES


@pytest.mark.parametrize("room", ["kernels", "db", "results"])
def test_the_wheel_holds_the_data_files(wheel_names: set[str], room: str) -> None:
    data = [path for path in (PACKAGE / room).rglob("*") if path.suffix in {".csv", ".json", ".mako", ".ini"}]
    assert room == "db" or data
    assert {str(path.relative_to(ROOT)) for path in data} <= wheel_names


def test_nothing_that_ships_imports_the_tools_of_this_repository() -> None:
    imports = re.compile(r"^\s*(?:from|import) (?:tools|tests)\b", re.MULTILINE)
    assert [path for path in SOURCES if imports.search((ROOT / path).read_text())] == []


SHIPPED_KINDS = re.compile(r"[\w-]+(\.(bands|correction|ladder|speed-fuzz))?\.json|[\w-]+\.counters\.csv")
"""Winners, error bands, corrections, ladders, calls next to PyTorch's and counters: what commands and calls read."""


def test_records_that_ship_are_in_the_package_and_those_of_the_documents_are_not() -> None:
    shipped = {path.name for path in (PACKAGE / "results").iterdir() if path.suffix not in ("", ".py")}
    assert shipped
    assert [name for name in sorted(shipped) if not SHIPPED_KINDS.fullmatch(name)] == []
    records = {path.name for path in (ROOT / "results").iterdir()}
    assert [name for name in sorted(records) if SHIPPED_KINDS.fullmatch(name)] == []


def test_the_wheel_holds_the_gpu_catalogue_the_public_names_and_the_type_marker(wheel_names: set[str]) -> None:
    assert {"blocktune/kernels/hardware/gpus.csv", "blocktune/py.typed", "blocktune/__init__.pyi"} <= wheel_names


@pytest.mark.parametrize("folder", ["report", "ui"])
def test_the_wheel_holds_the_parts_of_a_page(wheel_names: set[str], folder: str) -> None:
    parts = list((PACKAGE / "cli" / folder / "assets").iterdir())
    assert parts
    assert {str(path.relative_to(ROOT)) for path in parts} <= wheel_names


def test_no_bare_top_level_package(wheel_names: set[str]) -> None:
    assert {name.split("/")[0] for name in wheel_names if not name.split("/")[0].endswith(".dist-info")} == {
        "blocktune"
    }


def test_the_metadata_name_the_python_versions_and_that_it_is_typed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {name.rsplit(" ", 1)[1] for name in project["classifiers"] if " :: Python :: 3." in name}
    assert project["requires-python"].removeprefix(">=") == min(versions, key=lambda name: int(name.split(".")[1]))
    assert "Typing :: Typed" in project["classifiers"]
