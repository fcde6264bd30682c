"""`tune roofline`: the table, the drawing, the JSON, and the refusal without a GPU."""

import json
from dataclasses import replace

import pytest
from rich.text import Text

from blocktune.cli.explain.roofline_plot import CATALOGUE, HEIGHT, LABEL, MEASURED, roofline_lines
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.driver import read_driver
from blocktune.tuner.profile.ceilings import Ceiling, catalogue_ceilings


def test_the_catalogues_ceilings_are_shown(tune) -> None:
    result = tune("roofline", "--device", "h200")
    assert result.exit_code == 0, result.output
    assert "4,800 GB/s" in result.stdout
    assert "Below 206 FLOP for every byte" in result.stdout
    assert "measured" not in result.stdout.splitlines()[1]  # a column without content is left out
    data = json.loads(tune("roofline", "--device", "h200", "--json").stdout)
    assert data["ceilings"]["memory"] == {
        "title": "device memory", "unit": "GB/s", "catalogue": 4800.0, "measured": None, "share": None,
    }  # fmt: skip


def test_measured_ceilings_stand_next_to_them(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    slower = {name: replace(one, measured=one.catalogue / 2) for name, one in catalogue_ceilings(DEVICE).items()}
    monkeypatch.setattr("blocktune.tuner.profile.ceilings.measured_ceilings", lambda device, tell: slower)
    result = tune("roofline", "--device", "h200", "--measure")
    assert result.exit_code == 0, result.output
    memory = next(line for line in result.stdout.splitlines() if line.startswith("device memory"))
    assert memory.split()[2:] == ["4,800", "GB/s", "2,400", "GB/s", "50", "%"]


@pytest.mark.skipif(bool(read_driver().devices), reason="there is a GPU here")
def test_measuring_needs_a_gpu(tune) -> None:
    result = tune("roofline", "--measure")
    assert result.exit_code == 4
    assert "Without --measure, `tune roofline` shows the catalogue's ceilings" in result.stderr


DEVICE = device_named("h200")


def drawn(ceilings: dict[str, Ceiling], width: int = 80) -> list[str]:
    return [line.plain for line in roofline_lines(ceilings, width) if isinstance(line, Text)]


def rows_of(lines: list[str]) -> list[str]:
    """The rows of the drawing from the top on, all as long as the longest."""
    rows = [line[LABEL:] for line in lines[1 : 1 + HEIGHT]]
    return [row.ljust(max(map(len, rows))) for row in rows]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_drawing_keeps_to_the_width_and_rises_to_the_peak(width: int) -> None:
    lines = drawn(catalogue_ceilings(DEVICE), width)
    rows = rows_of(lines)
    assert max(len(line) for line in lines[1:]) <= width
    tops = [next(row for row in range(HEIGHT) if rows[row][place] != " ") for place in range(4, len(rows[0]))]
    assert tops == sorted(tops, reverse=True)  # nothing falls to the right
    assert all(row[-1] == " " for row in rows if row != rows[0])  # both roofs end at the products' rate
    assert MEASURED not in "".join(rows)


def test_what_was_measured_is_drawn_below_what_is_more() -> None:
    slower = {name: replace(one, measured=one.catalogue / 4) for name, one in catalogue_ceilings(DEVICE).items()}
    last = [row[-1] for row in rows_of(drawn(slower))]
    assert last.index(CATALOGUE) < last.index(MEASURED)
