"""What a release consists of: an archive with its tests, a wheel that every machine builds alike, and its text."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from tests.support.distributions import ROOT, source_archive, unpacked_zip, wheel_of

pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools >= 77")


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files of the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("only a clone knows which files belong to the repository")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in listed if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


@pytest.fixture(scope="module")
def archive(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    for name in tracked:
        (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "clone" / name)
    return source_archive(folder / "clone", folder)


def unpacked(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_archive_is_the_repository(archive: Path, tracked: list[str]) -> None:
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames() if files.getmember(name).isfile()}
    made = {name for name in names if name in ("PKG-INFO", "setup.cfg") or "egg-info" in name}
    assert names - made == set(tracked)


def test_two_builds_give_the_same_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the times of the files, and in an archive their modes, as another mask of the user's leaves them."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767225600")
    wheels = []
    for number, name in enumerate(("one", "other", "archive")):
        folder = tmp_path / name
        folder.mkdir()
        source = unpacked_zip(folder)
        for path in source.rglob("*"):
            os.utime(path, (1e9 + number, 1e9 + number))
            if name == "archive" and path.is_file():
                path.chmod(0o664)
        wheels.append(wheel_of(source_archive(source, folder) if name == "archive" else source, folder).read_bytes())
    assert wheels[0] == wheels[1] == wheels[2]


def test_the_text_for_an_index_has_no_link_into_the_repository(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel_of(unpacked_zip(tmp_path), tmp_path)) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        told = message_from_string(files.read(name).decode())
    text = told.get_payload()
    assert told["Description-Content-Type"] == "text/markdown"
    assert "# blocktune" in text
    assert "Where it loses" in text
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []


@pytest.mark.exhaustive
def test_tests_run_in_the_unpacked_archive(archive: Path, tmp_path: Path) -> None:
    folder = unpacked(archive, tmp_path)
    some = ("tests/test_readme.py", "tests/package/test_packaging.py", "tests/kernels/values", "tests/db/tables")
    chosen = "not gpu and not exhaustive"
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen, *some]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout[-3000:]
