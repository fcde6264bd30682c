"""What the project says of itself for other programs agrees with pyproject.toml and the Makefile."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tools.checks.lowest_versions import constraints
from tools.pages.command_reference import leaf_commands

yaml = pytest.importorskip("yaml", reason="reading the files needs PyYAML, which comes with the documents' tools")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_newest_version_of_the_changelog_is_that_of_the_package() -> None:
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[:2] == ["Unreleased", PROJECT["version"]]


def test_plugins_want_the_version_that_has_what_they_import() -> None:
    before, plugins, _ = (ROOT / "CHANGELOG.md").read_text().partition("plugins of vLLM and SGLang")
    section = re.findall(r"^## \[(.+?)\]", before, re.MULTILINE)[-1]
    assert plugins
    for path in sorted(ROOT.glob("integrations/*/pyproject.toml")):
        requirements = map(Requirement, tomllib.loads(path.read_text())["project"]["dependencies"])
        (wanted,) = (each for each in requirements if each.name == "blocktune")
        assert len(wanted.specifier) == 1
        assert wanted.specifier.contains(PROJECT["version"]) == (section != "Unreleased")


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


def test_the_image_is_built_and_runs_its_job_and_its_page() -> None:
    steps = read(".github/workflows/ci.yml")["jobs"]["image"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/image"]
    subprocess.run(["bash", "-n", ROOT / ".ci" / "image"], check=True)
    script = (ROOT / ".ci" / "image").read_text()
    called = re.findall(r"blocktune:cpu (\w+) ([^\n)\"]*)", script)
    assert [name for name, _ in called] == ["run", "ui"]
    for name, flags in called:
        known = {option for parameter in leaf_commands()[name].params for option in parameter.opts}
        assert {word for word in flags.split() if word.startswith("--")} <= known


def test_a_tag_is_built_attested_and_published() -> None:
    jobs = read(".github/workflows/release.yml")["jobs"]
    build, publish = jobs["build"], jobs["publish"]
    assert build["permissions"] == {"contents": "write", "id-token": "write", "attestations": "write"}
    used = [step.get("uses", "").partition("@")[0] for step in build["steps"]]
    assert used.index("actions/attest-build-provenance") < used.index("actions/upload-artifact")
    assert 'make dist VERSION="${GITHUB_REF_NAME#v}"' in [step.get("run") for step in build["steps"]]
    assert (publish["needs"], publish["permissions"]) == ("build", {"id-token": "write"})


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("version", [PROJECT["version"], "9.9.9"])
def test_a_tag_of_another_version_is_not_built(version: str) -> None:
    command = ["make", "--dry-run", "dist", f"VERSION={version}"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    (check,) = (line for line in lines if line.startswith("grep "))
    assert subprocess.run(["sh", "-c", check], cwd=ROOT).returncode == (version != PROJECT["version"])


def test_the_images_have_what_their_commands_need() -> None:
    extras = re.findall(r'"\.\[([\w,]+)\]"', (ROOT / "Dockerfile").read_text())
    assert [set(each.split(",")) >= {"ray", "tune", "ui"} for each in extras] == [True, True]


def test_the_development_container_builds_a_stage_and_makes_a_target_that_exist() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    build = container["build"]
    dockerfile = (ROOT / ".devcontainer" / build["dockerfile"]).resolve()
    assert f" AS {build['target']}\n" in dockerfile.read_text()
    target = container["postCreateCommand"].removeprefix("make ").replace(".venv", "$(VENV)")
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_every_night_runs_what_a_push_leaves_out() -> None:
    steps = read(".github/workflows/nightly.yml")["jobs"]["all"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["make test-nightly"]
    recipe = (ROOT / "Makefile").read_text().split("\ntest-nightly:")[1].split("\n\n")[0]
    assert recipe.split() == ["$(MAKE)", "test-all", "test-newest", "FACTS=check"]


def chosen(target: str, *settings: str) -> list[str]:
    """Return what the calls of pytest in a target choose by markers."""
    told = {
        name: value for name, value in os.environ.items() if "MAKE" not in name and name != "TENTH"
    }  # by our own run
    command = ["make", "--dry-run", "--always-make", target, *settings]
    shown = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, check=True).stdout
    return re.findall(r'pytest .* -m "(.+?)"', shown)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", ["test", "test-newest"])
def test_a_push_runs_a_tenth_of_what_is_left_to_the_night(target: str) -> None:
    assert all("not exhaustive" in words and "tenth" not in words for words in chosen(target))
    taken = chosen(target, "TENTH=3")
    assert len(taken) == 2
    assert all("or tenth)" in words for words in taken)


@pytest.mark.parametrize("where", ["a commit", "no repository"])
def test_a_commit_has_a_tenth_of_its_own(where: str, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    for name in ("make", "apt-get", "chromium"):  # nothing is installed or run
        (tmp_path / name).write_text('#!/bin/sh\necho "$0 $* $TENTH" >> called\n')
        (tmp_path / name).chmod(0o755)
    git = "#!/bin/sh\necho 0000002aef\n" if where == "a commit" else "#!/bin/sh\nexit 1\n"
    (tmp_path / "git").write_text(git)
    (tmp_path / "git").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, check=True)
    tenth = re.search(r"^Tenth (\d) of", ended.stdout)
    assert tenth is not None
    assert where == "no repository" or tenth[1] == "2"
    calls = [line.split("/")[-1] for line in (tmp_path / "called").read_text().splitlines() if "/make " in line]
    assert calls == [f"make test {tenth[1]}", f"make test-newest {tenth[1]}"]


def test_continuous_integration_refuses_another_triton() -> None:
    ended = subprocess.run([ROOT / ".ci" / "run", "middling"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "got 'middling'" in ended.stderr


def test_the_versions_that_are_called_tested_are_those_of_continuous_integration() -> None:
    pinned = dict(re.findall(r"^(\w+)==(\d+\.\d+)", (ROOT / "constraints-cpu.txt").read_text(), re.MULTILINE))
    told = " ".join((ROOT / "docs" / "guide" / "getting_started.md").read_text().split())
    assert f"torch {pinned['torch']} with Triton {pinned['triton']} and " in told


def test_the_nightly_pairs_are_those_that_the_documents_list() -> None:
    pairs = read(".github/workflows/nightly.yml")["jobs"]["pair"]["strategy"]["matrix"]["include"]
    told = (ROOT / "docs" / "guide" / "getting_started.md").read_text()
    rows = re.findall(r"^\| (2\.\d+\.\d+) \| (3\.\d+\.\d+) \|", told, re.MULTILINE)
    assert rows == [(pair["torch"], pair["triton"]) for pair in pairs]


def test_the_bounds_of_torch_and_triton_are_the_first_and_the_last_nightly_pair() -> None:
    pairs = read(".github/workflows/nightly.yml")["jobs"]["pair"]["strategy"]["matrix"]["include"]
    bounds = {each.name: each.specifier for each in map(Requirement, PROJECT["dependencies"])}
    for name in ("torch", "triton"):
        major, lowest = map(int, pairs[0][name].split(".")[:2])
        _, highest = map(int, pairs[-1][name].split(".")[:2])
        assert bounds[name] == SpecifierSet(f">={major}.{lowest},<{major}.{highest + 1}")


def test_the_lowest_versions_are_the_bounds_of_the_project() -> None:
    """`python -m tools.checks.lowest_versions > constraints-lowest.txt` writes them again."""
    assert (ROOT / "constraints-lowest.txt").read_text() == constraints()


def test_a_commit_is_checked_by_the_tools_of_make_check() -> None:
    (local,) = read(".pre-commit-config.yaml")["repos"]
    entries = {hook["entry"].removeprefix(".venv/bin/") for hook in local["hooks"]}
    recipe = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    checked = set(re.findall(r"\$\(BIN\)/(.+)", recipe))
    assert entries == {re.sub(r" --check| \.$", "", command).removesuffix(" .") for command in checked}
