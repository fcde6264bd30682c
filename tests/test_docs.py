"""The documents compute what they say, and lead where they say."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import blocktune

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", ".github/CONTRIBUTING.md")),
    *sorted(ROOT.glob("[!.]*/README.md")),
    *(path for name in ("docs", "notes") for path in sorted((ROOT / name).rglob("*.md"))),
]
SITE_BYTES = 150_000
VERSION_BYTES = 8_000
EXECUTABLE = [path for path in PAGES if ">>> " in path.read_text(encoding="utf-8")]


def test_the_worked_numbers_are_executable() -> None:
    assert ROOT / "notes" / "models" / "worked_numbers.md" in EXECUTABLE


@pytest.mark.parametrize("path", EXECUTABLE, ids=lambda path: path.name)
def test_every_example_gives_what_it_shows(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = doctest.testfile(str(path), module_relative=False, encoding="utf-8", optionflags=doctest.REPORT_NDIFF)
    assert outcome.attempted > 10
    assert outcome.failed == 0, capsys.readouterr().out


def test_a_wrong_number_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.md"
    wrong.write_text("```python\n>>> 1 + 1\n3\n\n```\n")
    assert doctest.testfile(str(wrong), module_relative=False).failed == 1
    assert "Expected" in capsys.readouterr().out


def prose(path: Path) -> str:
    """A page without its blocks of code and its code words."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace("](", "] ("), text)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path) -> list[str]:
    """The links of a page that lead to no file, or to no heading of one."""
    broken = []
    for link in re.findall(r"\]\(([^()\s]+)\)", prose(path)):
        target, _, anchor = link.partition("#")
        place = (path.parent / target).resolve() if target else path
        if "://" not in link and (not place.exists() or (anchor and anchor not in anchors(place))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    assert broken_links(path) == []


def test_every_document_that_the_code_names_exists() -> None:
    sources = [path for folder in ("blocktune", "tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"\b(?:docs|notes)/[\w/]+\.md", path.read_text())}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_site_is_read_in_an_evening() -> None:
    pages = sum(len(path.read_bytes()) for path in (ROOT / "docs").rglob("*.md"))
    assert pages <= SITE_BYTES, "Shorten a page, or move what was measured or tried to notes/."


def test_the_changes_of_a_version_are_read_in_minutes() -> None:
    versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    too_long = [version.split("\n")[0] for version in versions if len(version.encode()) > VERSION_BYTES]
    assert too_long == [], "Say what users notice; what was measured on the way belongs in notes/."


def test_every_note_is_in_their_index() -> None:
    index = (ROOT / "notes" / "README.md").read_text()
    notes = [path.relative_to(ROOT / "notes") for path in (ROOT / "notes").glob("*/*.md")]
    assert [str(path) for path in notes if f"]({path}" not in index] == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title, here\n[a](#a-title-here) [b](page.md#none) [c](none.md) [d](https://example.org) `[e](f)`\n"
    )
    assert broken_links(page) == ["page.md#none", "none.md"]


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    shown = re.findall(r"^::: blocktune\.(\w+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted(set(blocktune.__all__) - {"__version__"})


def test_the_documents_are_a_site_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="building the site needs `pip install blocktune[docs]`")
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=200
    )
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "site" / "reference" / "api.html").read_text()
    assert 'id="blocktune.best_config"' in reference
    assert "Return the config that <code>attention</code> takes for a shape" in reference
