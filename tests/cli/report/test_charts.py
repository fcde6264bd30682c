"""The specs of all charts are valid, hold no data, and use colours that the palette names."""

import json
import re

import pytest

pytest.importorskip("altair", reason="charts need altair")
vl_convert = pytest.importorskip("vl_convert", reason="charts need vl-convert-python")

from blocktune.cli.report.charts.all_charts import all_charts  # noqa: E402
from blocktune.cli.report.charts.style import theme  # noqa: E402

CHARTS = all_charts()


@pytest.mark.parametrize("name", CHARTS)
def test_vega_lite_compiles_the_spec(name: str) -> None:
    assert vl_convert.vegalite_to_vega(CHARTS[name])["marks"]


@pytest.mark.parametrize("name", CHARTS)
def test_a_spec_says_what_it_is_and_holds_no_data(name: str) -> None:
    spec = CHARTS[name]
    assert spec["description"].endswith(".")
    assert "values" not in spec.get("data", {})
    assert "datasets" not in spec
    assert "http" not in json.dumps({key: value for key, value in spec.items() if key != "$schema"})


def test_predicted_and_measured_heat_maps_have_other_colours() -> None:
    schemes = {
        name: re.search(r'"scheme": "(\w+)"', json.dumps(CHARTS[f"heat-{name}"])) for name in ("tflops", "predicted")
    }
    assert schemes["tflops"]
    assert schemes["predicted"]
    assert schemes["tflops"][1] != schemes["predicted"][1]


def test_the_dark_theme_has_light_ink() -> None:
    light, dark = theme(dark=False), theme(dark=True)
    assert light.keys() == dark.keys()
    assert light["text"]["color"] < dark["text"]["color"]
