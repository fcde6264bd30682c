"""Writes the README of a folder at the top that has the name of a room: what each folder of the room is for, and links
to them."""

import ast
from collections.abc import Iterator
from pathlib import Path

from blocktune.kernels.files.reading import SOURCE_BYTES, read_text
from tools.pages.document_tables import markdown_table

ROOMS = ("kernels", "runtime", "db", "tuner", "cli")


def room_map(room: str, root: Path) -> str:
    """Return the text of a room's README, from the first lines of its packages.

    Args:
        room: a folder of blocktune/.
        root: of the repository.
    """
    package = root / "blocktune" / room
    places = sorted(path.parent for path in package.rglob("__init__.py"))
    rows = ([_link(place, package), _first_line(place)] for place in places[1:])
    return (
        f"# {room}\n\n{_first_line(package)}\n\nThe code is in [blocktune/{room}](../blocktune/{room}), where "
        f"`import blocktune.{room}` finds it; [Architecture](../docs/reference/architecture.md) says why.\n\n"
        f"{markdown_table(('folder', 'holds'), rows, words=(0, 1))}\n{_modules(package)}"
    )


def _link(place: Path, package: Path) -> str:
    name = place.relative_to(package)
    return f"[{name}](../blocktune/{package.name}/{name})"


def _modules(package: Path) -> str:
    """Return a table of the files of the room itself; empty where it has none."""
    files = sorted(path for path in package.glob("*.py") if not path.name.startswith("__"))
    rows = [[f"[{path.name}](../blocktune/{package.name}/{path.name})", _title(path)] for path in files]
    return f"\n{markdown_table(('file', 'holds'), rows, words=(0, 1))}\n" if rows else ""


def _first_line(place: Path) -> str:
    return _title(place / "__init__.py")


def _title(path: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(read_text(path, SOURCE_BYTES))) or ""
    return " ".join(text.split("\n\n")[0].split())


def room_maps(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the README of each room that has a folder at the top, and its text."""
    for room in ROOMS:
        if (root / room).is_dir():
            yield root / room / "README.md", room_map(room, root)
