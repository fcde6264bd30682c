"""The explorer's arithmetic, which runs in the page, agrees with Python in every case of a generated table."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.report.page import asset
from blocktune.tuner.report.device_table import HARDWARE, limits_table
from tests.support.models.occupancy_table import SCRIPT, Case, answers, cases


@pytest.fixture(scope="module", params=[10_000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
def table(request: pytest.FixtureRequest) -> tuple[list[Case], list[Case]]:
    """Return this many cases and Python's answers."""
    drawn = cases(request.param)
    return drawn, answers(drawn)


def scripts() -> str:
    """The page's own arithmetic, with the limits as the page gets them."""
    limits = json.dumps({"limits": limits_table(), "hardware": HARDWARE})
    return f"{asset('state.js')}\n{asset('occupancy.js')}\nconst table = {limits};\n{SCRIPT}"


def differing(table: tuple[list[Case], list[Case]], found: list[Any]) -> list[tuple[Case, Case, Any]]:
    return [row for row in zip(*table, found, strict=True) if row[1] != row[2]][:5]


def test_the_table_reaches_every_limit(table: tuple[list[Case], list[Case]]) -> None:
    _, found = table
    assert {name for answer in found for name in answer[6]} == {
        "warps",
        "blocks",
        "registers",
        "shared_memory",
        "barriers",
    }
    assert {answer[5] for answer in found} >= {0, 1, 2, 3, 4, 8, 16, 32}


def test_a_browser_agrees_in_every_case(table: tuple[list[Case], list[Case]], browser: Any) -> None:
    page = browser.new_page()
    page.add_script_tag(content=scripts())
    found = page.evaluate("(text) => JSON.stringify(JSON.parse(text).map(answer))", json.dumps(table[0]))
    page.close()
    assert differing(table, json.loads(found)) == []


def test_node_agrees_in_every_case(table: tuple[list[Case], list[Case]], tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here: apt-get install nodejs")
    (tmp_path / "cases.json").write_text(json.dumps(table[0]))
    read = "JSON.parse(require('fs').readFileSync('cases.json', 'utf8'))"
    (tmp_path / "run.js").write_text(f"{scripts()}\nconsole.log(JSON.stringify({read}.map(answer)));")
    done = subprocess.run([node, "run.js"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert differing(table, json.loads(done.stdout)) == []
