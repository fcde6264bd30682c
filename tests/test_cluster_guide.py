"""The files in the guide to clusters are valid, and the commands in them have the flags that they use."""

import re
import subprocess
from pathlib import Path

import pytest
import typer

from blocktune.cli.main import app
from blocktune.cli.shared.shapes_file import flags_of_file

yaml = pytest.importorskip("yaml", reason="reading the files needs PyYAML, which comes with the documents' tools")

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "guide" / "clusters.md").read_text(encoding="utf-8")
FLEET = (ROOT / "docs" / "guide" / "tuning.md").read_text(encoding="utf-8")


def blocks(language: str, guide: str = GUIDE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)


def flags_of(command: str) -> set[str]:
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {flag for parameter in parameters for flag in parameter.opts}


def flags_in(guide: str, command: str) -> set[str]:
    """Return the flags of a command where a guide uses it."""
    lines = re.findall(rf"\b(?:block)?tune {command}\b([^|`\n)#]*)", guide)
    return {flag for words in lines for flag in re.findall(r"(?<= )--[a-z-]+", words)}


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
    used = flags_in(GUIDE, command)
    assert used
    assert used <= flags_of(command)


def test_the_guide_to_many_shapes_has_a_file_and_flags_that_are_taken(tmp_path: Path) -> None:
    (tmp_path / "shapes.toml").write_text(blocks("toml", FLEET)[0])
    shapes = [flags.shape() for flags in flags_of_file(tmp_path / "shapes.toml")]
    assert [(shape.seqlen_q, shape.head_dim, str(shape.direction)) for shape in shapes] == [
        (2048, 128, "forward"),
        (8192, 128, "forward"),
        (1, 128, "forward"),
        (8192, 64, "backward"),
        (8192, 64, "forward"),
    ]
    used = flags_in(FLEET, "run")
    assert used >= {"--shapes", "--grid", "--gpus", "--time-budget", "--exhaustive"}
    assert used <= flags_of("run")


def test_the_image_has_both_targets_that_the_guide_builds() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(re.findall(r"--target (\w+)", GUIDE)) <= set(stages)
    assert {"cpu", "gpu"} <= set(stages)
