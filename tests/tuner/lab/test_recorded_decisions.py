"""What recorded shapes would get untuned: each is decided for without its own sweep and winner."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from blocktune.db.exchange.importing import records_from
from blocktune.runtime.selection.correction import shipped_correction
from blocktune.tuner.lab.sweep_file import load_sweep, sweep_files
from blocktune.tuner.lab.untuned import Case, UntunedStudy, summary

pytestmark = pytest.mark.triton_free

ROOT = Path(__file__).parents[3]
RESULTS, SHIPPED = ROOT / "results", ROOT / "blocktune" / "results"
SWEEPS = sweep_files([RESULTS / "sweeps", RESULTS / "dense-sweeps"])


def cases_of(paths: Sequence[Path]) -> list[Case]:
    """Decide for the shapes of these sweeps by the constants that ship."""
    winners, *_ = records_from(json.loads((SHIPPED / "h200.json").read_text()))
    study = UntunedStudy([load_sweep(path) for path in paths], winners)
    correction = shipped_correction(study.device.key)
    assert correction is not None
    return [
        study.case(sweep, correction.trust, [one for one in study.recorded if one.shape != sweep.shape])
        for sweep in study.sweeps
    ]


@pytest.mark.exhaustive
def test_what_an_untuned_shape_gets_is_near_the_best() -> None:
    """The defaults were made with these sweeps in sight, which leaves the decision nothing to add here."""
    cases = cases_of(SWEEPS)
    found = summary(cases, "expected")
    assert found["shapes"] == len(cases) >= 62
    assert found["mean"] <= 1.02
    assert found["p95"] <= 1.06
    assert found["worst"] <= 1.12
    assert found["decoding"] <= 1.03
    assert found["mean"] == pytest.approx(summary(cases, "default")["mean"], rel=1e-3)
    assert found["mean"] < summary(cases, "nearest")["mean"]


def test_the_decision_is_nearly_as_good_as_the_default_and_better_than_the_nearest_winner() -> None:
    cases = cases_of(SWEEPS[::4])
    expected, nearest, default = (summary(cases, rule)["mean"] for rule in ("expected", "nearest", "default"))
    assert expected == pytest.approx(default, rel=2e-3)
    assert expected < nearest
