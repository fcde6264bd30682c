"""The notebook's page is made of the notebook, and pictures of what is stored."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from blocktune.tuner.lab.sweep_file import load_sweep
from tools.pages.pictures.explain_picture import explain_picture
from tools.pages.pictures.notebook_page import NOTEBOOK, PAGE, execute, page_of, pictures_of
from tools.pages.pictures.start_picture import start_picture

ROOT = Path(__file__).parents[3]
STORED = json.loads((ROOT / NOTEBOOK).read_text())
SWEEP = ROOT / "results" / "sweeps" / "h200-b2-h32-s8192-d64-bf16.sweep.json.gz"


def texts(notebook: dict) -> list[str]:
    """What the cells show in words, without the times of the model, which follow the installed Triton."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join(cell["outputs"][0]["data"]["text/plain"]).split("\n")[0] for cell in cells]


def test_the_page_is_the_notebook() -> None:
    assert (ROOT / PAGE).read_text() == page_of(STORED)
    folder = ROOT / PAGE.parent / "pictures"
    found = {path.name: path.read_text() for path in folder.glob("notebook-*.svg")}
    assert found == {f"notebook-{number}.svg": text for number, text in enumerate(pictures_of(STORED), 1)}


@pytest.mark.exhaustive
def test_the_notebook_runs_and_shows_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert texts(execute(STORED)) == texts(STORED)


def test_a_tuner_that_starts_twice_as_fast_has_a_bar_of_half_the_length() -> None:
    record = json.loads((ROOT / "results" / "h200.libraries.json").read_text())
    for row in record["starts"]:
        row["step_seconds"] = {"stock": 20.0, "blocktune": 10.0}[row["tuner"]]
    picture = ElementTree.fromstring(start_picture(record))
    bars = [bar for bar in picture.iter("{http://www.w3.org/2000/svg}rect") if bar.get("height") == "14"]
    widths = [float(str(bar.get("width"))) for bar in bars]
    assert widths == [2 * widths[1], widths[1]] * 4


def test_an_explained_config_has_a_bar_for_each_unit_and_follows_a_dark_page() -> None:
    sweep = load_sweep(SWEEP)
    text = explain_picture(sweep)
    picture = ElementTree.fromstring(text)
    words = [str(element.text) for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"matrix products", "exponentials of the softmax", "synchronisation and latency"} <= set(words)
    fastest = min(trial.time_us or 0.0 for trial in sweep.timed.values())
    assert f"measured {fastest:,.0f} µs" in words
    assert any("limited by registers and shared memory" in each for each in words)
    assert "prefers-color-scheme:dark" in text
