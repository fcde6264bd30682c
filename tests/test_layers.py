"""A room imports only from rooms to its left: kernels <- runtime <- db <- tuner <- cli. So do the folders in a room."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "blocktune"
MAY_IMPORT = {
    "results": set(),
    "kernels": {"kernels", "results"},
    "runtime": {"kernels", "results", "runtime"},
    "blocktune": {"kernels", "runtime", "results", "tuner", "cli"},  # the public names and `python -m blocktune`
    "flash_attn": {"kernels", "runtime", "flash_attn"},
    "db": {"kernels", "runtime", "db"},
    "tuner": {"kernels", "runtime", "db", "results", "tuner"},
    "cli": {"kernels", "runtime", "db", "results", "tuner", "cli"},
}
SOURCES = sorted(PACKAGE.rglob("*.py"))
TIERS = {
    "kernels": (
        ("values",),
        ("files",),
        ("hardware",),
        ("layouts",),
        ("base",),
        ("portable",),
        ("hopper", "historical"),
        (".",),  # registry.py
    ),
    "runtime": (("store_reader",), ("selection",), ("dispatch",), ("autotuned",), ("api",), ("parallel", "provider")),
    "kernels/portable": (("forward",), ("backward", "decode")),
    "kernels/hopper": (("common",), ("biases",), ("forward", "backward", "decode"), ("fp8",)),
    "db": (("tables",), ("records", "migrations"), ("exchange",), (".",), ("recovery",)),
    "tuner": (
        ("occupancy", "traffic", "correctness"),
        ("compile",),
        ("offline",),
        ("compile_server",),
        ("cost", "measure"),
        ("candidates",),
        ("sampling", "launches"),
        ("subject",),
        ("search",),
        ("drop_in",),
        ("compare", "fleet", "upkeep", "lab", "profile"),
        ("cluster", "contribute", "report", "dry_run"),
    ),
    "cli": (
        ("output",),
        ("shared",),
        ("offline",),
        ("tune", "results", "explain", "lab"),
        ("report",),
        ("ui",),
        (".",),
    ),
}
"""A folder imports from tiers in front of its own, and from none of its own tier. `.`: the files of the room itself."""
FAMILIES = ("kernels/portable", "kernels/hopper")
"""Rooms of kernels. A new kernel's folder needs no line here: without one it is in a tier behind all others."""
FOLDER_FILES = range(4, 15)
"""Python files of a folder next to its `__init__.py`: enough for a folder, few enough to be read at a glance."""
KERNEL_FILES = range(1, 16)
"""Of a family of kernels, which begins with one."""
OTHER_SIZES = {
    "cli": range(2, 3),  # main.py, __main__.py
    "db/migrations": range(1, 3),  # Alembic's env.py
    "db/migrations/versions": range(1, 1000),  # one a schema version
    "kernels": range(1, 2),  # registry.py
    "kernels/hopper": range(1),
    "kernels/portable": range(1),
    "runtime": range(1),
    "tuner": range(1),
}


@cache
def imported_modules(path: Path) -> tuple[str, ...]:
    """Every module that the file imports, inside functions too."""
    return tuple(_imported(tree_of(path), path))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imported(tree: ast.Module, path: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here, as in `from blocktune.kernels import ...`"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room_of(path: Path) -> str:
    """The folder of the package that the file belongs to, however deep it lies in it; else the package."""
    folder, *rest = path.relative_to(PACKAGE).parts
    return folder if rest else "blocktune"


def test_imports_point_left() -> None:
    found = {
        names(path): strangers
        for path in SOURCES
        if (strangers := rooms_of_imports(path) & set(MAY_IMPORT) - MAY_IMPORT[room_of(path)])
    }
    assert found == {}


def rooms_of_imports(path: Path) -> set[str]:
    return {module.split(".")[1] for module in imported_modules(path) if module.startswith("blocktune.")}


def test_no_room_imports_the_root() -> None:
    """What it takes from a room above it comes by name: blocktune/kernels/values/bindings.py."""
    rooms = [path for path in SOURCES if room_of(path) != "blocktune"]
    found = {names(path): roots for path in rooms if (roots := imports_of_the_root(path))}
    assert found == {}


def imports_of_the_root(path: Path) -> set[str]:
    modules = {module for module in imported_modules(path) if module.split(".")[0] == "blocktune"}
    return {module for module in modules if module == "blocktune" or module.split(".")[1] not in MAY_IMPORT}


def test_no_files_import_each_other_in_a_circle() -> None:
    """Not inside functions and not for types alone either."""
    modules = {module_of(path): path for path in SOURCES}
    imports = {
        module: {found for name in imported_modules(path) if (found := module_named(name, modules)) not in ("", module)}
        for module, path in modules.items()
    }
    TopologicalSorter(imports).prepare()  # raises CycleError


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def module_named(name: str, modules: Collection[str]) -> str:
    """Return the module of this package that an imported name is or comes from; empty if it is not of this package."""
    owner = name.rpartition(".")[0]
    return name if name in modules else owner if owner in modules else ""


def test_the_production_path_needs_torch_and_triton_only() -> None:
    heavy = {"optuna", "sqlalchemy", "alembic", "typer", "rich"}
    kernels = [path for path in SOURCES if room_of(path) in ("kernels", "runtime")]
    assert kernels
    found = {names(path): heavy & {module.split(".")[0] for module in imported_modules(path)} for path in kernels}
    assert {path: modules for path, modules in found.items() if modules} == {}


def test_one_file_calls_nvml() -> None:
    called = re.compile(r"\bpynvml\b|\bnvml(?:Device|System|Init)[A-Z_]")
    assert [names(path) for path in SOURCES if called.search(path.read_text())] == ["kernels/hardware/nvml.py"]


def test_only_the_command_line_prints() -> None:
    assert prints(ast.parse("def show(): print('shown')"))
    assert [names(path) for path in SOURCES if room_of(path) != "cli" and prints(tree_of(path))] == []


def prints(tree: ast.Module) -> bool:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(call, ast.Name) and call.id == "print" for call in calls)


def place_of(room: str, parts: tuple[str, ...]) -> str:
    """The folder of a room that a path below it belongs to, `.` for a file of the room itself."""
    return parts[0] if (PACKAGE / room / parts[0]).is_dir() else "."


def inner_imports(room: str) -> Iterator[tuple[Path, str, str]]:
    """What files of a room or folder import from it: the file, its place and the place of what it imports."""
    package = f"blocktune.{room.replace('/', '.')}."
    for path in (PACKAGE / room).rglob("*.py"):
        own = place_of(room, path.relative_to(PACKAGE / room).parts)
        for module in imported_modules(path):
            if module.startswith(package):
                yield path, own, place_of(room, tuple(module.removeprefix(package).split(".")))


@pytest.mark.parametrize("room", TIERS)
def test_folders_of_a_room_import_from_tiers_in_front_of_their_own(room: str) -> None:
    named = {folder: number for number, folders in enumerate(TIERS[room]) for folder in folders}
    tier = defaultdict(lambda: len(TIERS[room]), named) if room in FAMILIES else named
    upward = [
        f"{names(path)} imports from {there}/"
        for path, own, there in inner_imports(room)
        if own != there and tier[there] >= tier[own]
    ]
    assert upward == []


@pytest.mark.parametrize("room", TIERS)
def test_every_folder_of_a_room_has_a_tier_but_those_of_kernels(room: str) -> None:
    folders = {place_of(room, path.relative_to(PACKAGE / room).parts) for path in (PACKAGE / room).rglob("*.py")}
    named = {folder for tier in TIERS[room] for folder in tier} - {"."}
    assert named <= folders
    assert folders - {"."} == named or room in FAMILIES


FOLDERS = sorted({str(path.parent.relative_to(PACKAGE)) for path in SOURCES} - {".", "results"})


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_neither_a_drawer_nor_a_heap(folder: str) -> None:
    files = [path for path in (PACKAGE / folder).glob("*.py") if path.name != "__init__.py"]
    usual = KERNEL_FILES if str(Path(folder).parent) in FAMILIES else FOLDER_FILES
    assert len(files) in OTHER_SIZES.get(folder, usual)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_in_its_first_line_what_it_is_for(folder: str) -> None:
    first = (PACKAGE / folder / "__init__.py").read_text().splitlines()[0]
    assert first.startswith('"""')
    assert first.endswith('."""')


def test_folders_of_tests_and_tools_are_read_at_a_glance() -> None:
    paths = (path for room in ("tests", "tools") for path in (ROOT / room).rglob("*.py"))
    counts = Counter(path.parent.relative_to(ROOT) for path in paths if path.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count not in KERNEL_FILES} == {}
