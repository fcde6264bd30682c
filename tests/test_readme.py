"""The README tells the truth: its commands, flags, targets and imports exist, and every command explains itself."""

import ast
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from blocktune.cli.main import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def fenced(language: str) -> list[str]:
    """The contents of the README's code blocks in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def shell_lines() -> list[list[str]]:
    """The words of every shell line; lines of a console block are those after a `$`."""
    lines = [line for block in fenced("sh") for line in block.splitlines()]
    lines += [line.removeprefix("$ ") for block in fenced("console") for line in block.splitlines() if line[:2] == "$ "]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


TUNE_LINES = [words[1:] for words in shell_lines() if words[0] == "tune"]


def test_the_readme_shows_every_command() -> None:
    assert {words[0] for words in TUNE_LINES} == set(COMMANDS)


@pytest.mark.parametrize("words", TUNE_LINES, ids=" ".join)
def test_the_readme_uses_flags_that_exist(words: list[str]) -> None:
    known = {name for parameter in COMMANDS[words[0]].params for name in parameter.opts}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known


def test_the_readme_names_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for words in shell_lines() if words[0] == "make"}
    assert {"run", "test"} <= named <= targets


def test_the_readme_imports_names_that_exist() -> None:
    imports = [node for block in fenced("python") for node in ast.walk(ast.parse(block))]
    for node in imports:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "blocktune":
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert f"tune {name}" in result.output.split("Options:")[0].split("\n", 1)[1], "an example belongs in the help"
    assert "--json" in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_explained(name: str) -> None:
    assert [parameter.name for parameter in COMMANDS[name].params if not parameter.help] == []
