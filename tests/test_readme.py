"""The README and the documents tell the truth: their commands, flags, targets and imports exist, and every command
explains itself."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from blocktune.cli.main import app
from tests.support.command_line import CliRunner
from tools.pages.command_reference import leaf_commands

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [README, *(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))]
LEAVES = leaf_commands()
README_BYTES = 5000


def fenced(language: str) -> list[str]:
    """The contents of all code blocks in this language."""
    return [block for page in PAGES for block in re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)]


def shell_lines() -> list[list[str]]:
    """The words of every shell line; lines of a console block are those after a `$`."""
    lines = [line for block in fenced("sh") for line in block.splitlines()]
    lines += [line.removeprefix("$ ") for block in fenced("console") for line in block.splitlines() if line[:2] == "$ "]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


TUNE_LINES = sorted({tuple(words[1:]) for words in shell_lines() if words[0] in ("blocktune", "tune")})


def test_the_readme_is_read_in_a_minute() -> None:
    assert len(README.encode()) <= README_BYTES


def command_of(words: tuple[str, ...]) -> str:
    """The command of a line; `lab sweeps FOLDER` stands for `lab sweeps write FOLDER`."""
    names = [name for name in LEAVES if words[: len(name.split())] == tuple(name.split())]
    return max(names, key=len, default="lab sweeps write" if words[:2] == ("lab", "sweeps") else words[0])


def test_the_documents_show_every_command() -> None:
    assert {command_of(words) for words in TUNE_LINES} == set(LEAVES)


@pytest.mark.parametrize("words", TUNE_LINES, ids=" ".join)
def test_the_documents_use_flags_that_exist(words: tuple[str, ...]) -> None:
    known = {name for parameter in LEAVES[command_of(words)].params for name in parameter.opts}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known


def test_the_documents_name_make_targets_that_exist() -> None:
    rules = re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    named = {words[1] for words in shell_lines() if words[0] == "make"}
    assert {"run", "test"} <= named <= targets


def test_the_documents_import_names_that_exist() -> None:
    sources = [block for block in fenced("python") if not block.startswith(">>>")]
    imports = [node for block in sources for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if (node.module or "").split(".")[0] == "blocktune"]
    assert ours
    for node in ours:
        module = importlib.import_module(str(node.module))
        assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert f"tune {name.removesuffix(' write')}" in result.output.split("Options:")[0].split("\n", 1)[1], (
        "an example belongs in the help"
    )
    assert "--json" in result.output


def test_the_list_of_commands_cuts_no_sentence() -> None:
    commands = CliRunner().invoke(app, ["--help"]).output.split("Tune:")[1]
    assert [line for line in commands.splitlines() if line.endswith("...")] == []


@pytest.mark.parametrize("name", LEAVES)
def test_every_flag_is_explained(name: str) -> None:
    assert [parameter.name for parameter in LEAVES[name].params if not parameter.help] == []
