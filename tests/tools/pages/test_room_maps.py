"""The READMEs of the folders at the top say what is in the rooms now."""

from pathlib import Path

import pytest

from tools import ROOT
from tools.pages.room_maps import ROOMS, room_map, room_maps


@pytest.mark.parametrize(("path", "text"), [*room_maps(ROOT)], ids=ROOMS)
def test_a_map_is_that_of_the_code(path: Path, text: str) -> None:
    assert path.read_text() == text, "run `make results`"


def test_a_map_lists_folders_and_files_by_their_first_lines(tmp_path: Path) -> None:
    room = tmp_path / "blocktune" / "db"
    (room / "tables" / "wide").mkdir(parents=True)
    for place, title in (("", "A room."), ("tables", "Tables,\n\nat length."), ("tables/wide", "Wide ones.")):
        (room / place / "__init__.py").write_text(f'"""{title}"""\n')
    (room / "store.py").write_text('"""The store: two\nlines.\n\nMore."""\n')
    lines = room_map("db", tmp_path).splitlines()
    assert lines[:3] == ["# db", "", "A room."]
    assert [line for line in lines if line.startswith("| [")] == [
        "| [tables](../blocktune/db/tables) | Tables, |",
        "| [tables/wide](../blocktune/db/tables/wide) | Wide ones. |",
        "| [store.py](../blocktune/db/store.py) | The store: two lines. |",
    ]


def test_every_kind_of_record_is_in_the_list() -> None:
    text = (ROOT / "results" / "README.md").read_text()
    kinds = {path.name.removesuffix(".json").rpartition(".")[2] for path in (ROOT / "results").glob("*.json")}
    folders = {f"{path.name}/" for path in (ROOT / "results").iterdir() if path.is_dir()}
    assert [kind for kind in sorted(kinds | folders) if f"`{kind}`" not in text] == []
