"""What the project says of itself for other programs agrees with pyproject.toml and the Makefile."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="reading the files needs PyYAML, which comes with the documents' tools")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_newest_version_of_the_changelog_is_that_of_the_package() -> None:
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[:2] == ["Unreleased", PROJECT["version"]]


def test_the_citation_names_the_package_as_it_is() -> None:
    citation = read("CITATION.cff")
    date = re.search(
        rf"^## \[{re.escape(PROJECT['version'])}\] - (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert date is not None
    assert (citation["title"], citation["version"], citation["date-released"]) == (
        PROJECT["name"],
        PROJECT["version"],
        date[1],
    )
    assert (citation["license"], citation["abstract"]) == (PROJECT["license"], PROJECT["description"])
    assert citation["keywords"] == PROJECT["keywords"]


def test_continuous_integration_runs_the_oldest_python_and_both_tritons() -> None:
    job = read(".github/workflows/ci.yml")["jobs"]["test"]
    matrix = job["strategy"]["matrix"]
    assert matrix["python"][0] == PROJECT["requires-python"].removeprefix(">=")
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run ${{ matrix.triton }}"]
    script = (ROOT / ".ci" / "run").read_text()
    assert all(f"{triton}) make test" in script for triton in matrix["triton"])


def test_continuous_integration_refuses_another_triton() -> None:
    ended = subprocess.run([ROOT / ".ci" / "run", "middling"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "got 'middling'" in ended.stderr


def test_the_versions_that_are_called_tested_are_those_of_continuous_integration() -> None:
    pinned = dict(re.findall(r"^(\w+)==(\d+\.\d+)", (ROOT / "constraints-cpu.txt").read_text(), re.MULTILINE))
    told = " ".join((ROOT / "docs" / "guide" / "getting_started.md").read_text().split())
    assert f"torch {pinned['torch']} with Triton {pinned['triton']} and " in told


def test_a_commit_is_checked_by_the_tools_of_make_check() -> None:
    (local,) = read(".pre-commit-config.yaml")["repos"]
    entries = {hook["entry"].removeprefix(".venv/bin/") for hook in local["hooks"]}
    recipe = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    checked = set(re.findall(r"\$\(BIN\)/(.+)", recipe))
    assert entries == {re.sub(r" --check| \.$", "", command).removesuffix(" .") for command in checked}
