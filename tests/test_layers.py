"""A room imports only from rooms to its left: kernels <- db <- tuner <- cli."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "results": set(),
    "kernels": {"kernels", "results"},
    "blocktune": {"kernels", "results"},
    "db": {"kernels", "db"},
    "tuner": {"kernels", "db", "results", "tuner"},
    "cli": {"kernels", "db", "results", "tuner", "cli"},
}
SOURCES = sorted(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that the file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here, as in `from blocktune.kernels import ...`"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_imports_point_left(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    rooms = {module.split(".")[1] for module in imported_modules(path) if module.startswith("blocktune.")}
    strangers = (rooms & set(MAY_IMPORT)) - MAY_IMPORT[room]
    assert not strangers, (
        f"{room}/ may import {sorted(MAY_IMPORT[room])}, but {names(path)} imports {sorted(strangers)}"
    )


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[-2] == "kernels"], ids=names)
def test_the_production_path_needs_torch_and_triton_only(path: Path) -> None:
    roots = {module.split(".")[0] for module in imported_modules(path)}
    assert not roots & {"optuna", "sqlalchemy", "alembic", "pynvml", "typer", "rich"}


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_only_telemetry_talks_to_nvml(path: Path) -> None:
    if names(path) == "tuner/measure/telemetry.py":
        return
    assert "pynvml" not in {module.split(".")[0] for module in imported_modules(path)}


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[-2] != "cli"], ids=names)
def test_only_the_command_line_prints(path: Path) -> None:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    assert "print" not in {call.id for call in calls if isinstance(call, ast.Name)}
