"""The files in the guide to clusters are valid, and the commands in them have the flags that they use."""

import re
import subprocess
from pathlib import Path

import pytest
import typer

from blocktune.cli.main import app

yaml = pytest.importorskip("yaml", reason="reading the files needs PyYAML, which comes with the documents' tools")

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "guide" / "clusters.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def test_the_manifests_are_yaml_and_name_one_kind_of_gpu_as_nodes_do() -> None:
    job, sky = map(yaml.safe_load, blocks("yaml"))
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    resources = yaml.safe_load(yaml.safe_load(group["rayStartParams"]["resources"]))
    assert resources == {"blocktune:nvidia h200|9.0|132": int(group["rayStartParams"]["num-gpus"])}
    assert sky["num_nodes"] > 1


def test_the_scripts_are_bash() -> None:
    scripts = [*blocks("bash"), yaml.safe_load(blocks("yaml")[1])["run"]]
    assert len(scripts) == 3
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("command", ["run", "merge", "devices"])
def test_the_commands_have_the_flags_that_they_are_given(command: str) -> None:
    known = {
        flag
        for parameter in typer.main.get_command(app).commands[command].params
        for flag in parameter.opts  # type: ignore[attr-defined]
    }
    used = {
        flag
        for words in re.findall(rf"\btune {command}\b([^|`\n)]*)", GUIDE)
        for flag in re.findall(r"(?<= )--[a-z-]+", words)
    }
    assert used
    assert used <= known


def test_the_image_has_both_targets_that_the_guide_builds() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(re.findall(r"--target (\w+)", GUIDE)) <= set(stages)
    assert {"cpu", "gpu"} <= set(stages)
