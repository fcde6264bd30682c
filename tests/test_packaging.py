"""The wheel holds every folder and every data file that the sources need."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("cli", "db", "kernels", "results", "tuner")
SOURCES = {
    path.relative_to(ROOT)
    for places in ("blocktune/*.py", *(f"{room}/**/*.py" for room in ROOMS))
    for path in ROOT.glob(places)
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_lies_at_the_top_and_under_its_import_name(room: str) -> None:
    """One of the two is a link to the other: the build, type checkers and editors find the room by its import name."""
    top, imported = ROOT / room, ROOT / "blocktune" / room
    assert top.resolve() == imported.resolve()
    link = top if top.is_symlink() else imported
    assert not link.readlink().is_absolute(), "a relative link holds in every clone"


def test_every_folder_with_python_files_is_a_package() -> None:
    """One without an `__init__.py` is not found by the build."""
    assert {path.parent for path in SOURCES} == {path.parent for path in SOURCES if path.name == "__init__.py"}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel built from a copy, so that no build folder is left in the sources."""
    pytest.importorskip("setuptools", minversion="77", reason="building the wheel needs setuptools >= 77")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for room in ("blocktune", *ROOMS):
        if (ROOT / room).is_symlink():
            (source / room).symlink_to((ROOT / room).readlink())
        else:
            shutil.copytree(ROOT / room, source / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("planted.json", "planted.bench.json", "planted.models.json", "planted.calibration.json"):
        (source / "results" / name).write_text("{}")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        source,
        source,
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    (wheel,) = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_source_files_and_no_other_ones(wheel_names: set[str]) -> None:
    expected = {path if path.parts[0] == "blocktune" else "blocktune" / path for path in SOURCES}
    assert {name for name in wheel_names if name.endswith(".py")} == {str(path) for path in expected}


@pytest.mark.parametrize("room", ["kernels", "db", "results"])
def test_the_wheel_holds_the_data_files(wheel_names: set[str], room: str) -> None:
    data = [path for path in (ROOT / room).rglob("*") if path.suffix in {".csv", ".json", ".mako", ".ini"}]
    for path in data:
        if len(path.suffixes) == 1 or path.name.endswith(".ladder.json"):  # others: measured for the documents
            assert f"blocktune/{path.relative_to(ROOT)}" in wheel_names


def test_nothing_that_ships_imports_the_tools_of_this_repository() -> None:
    imports = re.compile(r"^\s*(?:from|import) (?:tools|tests)\b", re.MULTILINE)
    assert [path for path in SOURCES if imports.search((ROOT / path).read_text())] == []


def test_the_wheel_holds_exports_but_no_benches(wheel_names: set[str]) -> None:
    results = {name.removeprefix("blocktune/results/") for name in wheel_names if name.startswith("blocktune/results/")}
    assert "planted.json" in results
    shipped = (".correction.json", ".speed-fuzz.json", ".ladder.json", ".counters.csv")
    assert not [name for name in results if name.count(".") > 1 and not name.endswith(shipped)]


def test_the_wheel_holds_the_gpu_catalogue_and_the_type_marker(wheel_names: set[str]) -> None:
    assert {"blocktune/kernels/hardware/gpus.csv", "blocktune/py.typed"} <= wheel_names


@pytest.mark.parametrize("folder", ["report", "ui"])
def test_the_wheel_holds_the_parts_of_a_page(wheel_names: set[str], folder: str) -> None:
    parts = list((ROOT / "cli" / folder / "assets").iterdir())
    assert parts
    assert {f"blocktune/{path.relative_to(ROOT)}" for path in parts} <= wheel_names


def test_no_bare_top_level_package(wheel_names: set[str]) -> None:
    assert {name.split("/")[0] for name in wheel_names if not name.split("/")[0].endswith(".dist-info")} == {
        "blocktune"
    }


def test_the_metadata_name_the_python_versions_and_that_it_is_typed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {name.rsplit(" ", 1)[1] for name in project["classifiers"] if " :: Python :: 3." in name}
    assert project["requires-python"].removeprefix(">=") == min(versions, key=lambda name: int(name.split(".")[1]))
    assert "Typing :: Typed" in project["classifiers"]
