"""The specs of all charts are valid, hold no data, and use colours that the palette names."""

import json
import re

import pytest

pytest.importorskip("altair", reason="charts need altair")
vl_convert = pytest.importorskip("vl_convert", reason="charts need vl-convert-python")

from blocktune.cli.report.charts.all_charts import all_charts  # noqa: E402
from blocktune.cli.report.charts.style import theme  # noqa: E402


def test_vega_lite_compiles_every_spec() -> None:
    for name, spec in all_charts().items():
        assert vl_convert.vegalite_to_vega(spec)["marks"], name


def test_a_spec_says_what_it_is_and_holds_no_data() -> None:
    for name, spec in all_charts().items():
        assert spec["description"].endswith("."), name
        assert "values" not in spec.get("data", {}), name
        assert "datasets" not in spec, name
        assert "http" not in json.dumps({key: value for key, value in spec.items() if key != "$schema"}), name


def test_predicted_and_measured_heat_maps_have_other_colours() -> None:
    schemes = {
        name: re.search(r'"scheme": "(\w+)"', json.dumps(all_charts()[f"heat-{name}"]))
        for name in ("tflops", "predicted")
    }
    assert schemes["tflops"]
    assert schemes["predicted"]
    assert schemes["tflops"][1] != schemes["predicted"][1]


def test_the_dark_theme_has_light_ink() -> None:
    light, dark = theme(dark=False), theme(dark=True)
    assert light.keys() == dark.keys()
    assert light["text"]["color"] < dark["text"]["color"]
