"""Error bands: which predictions share one, and how a prediction is shown with it."""

from dataclasses import replace

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import Direction
from blocktune.runtime.autotuned.config import KernelProblem, LaunchProblem
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.cost.bands import (
    ANY_KERNEL,
    Band,
    BandKey,
    band_of,
    bands_document,
    bands_from,
    predicted_json,
    predicted_text,
)

pytestmark = pytest.mark.triton_free

H200, A100 = device_named("h200"), device_named("a100")
SHAPE = complete_shape(8192, 128)
KERNEL = "flash_fwd_hopper"
NARROW = Band(low=-0.1, high=0.2, trials=40, shapes=5)


def test_a_prediction_is_shown_with_its_band() -> None:
    band = band_of(KERNEL, SHAPE, H200)
    assert band is not None
    assert predicted_text(465.14, KERNEL, SHAPE, H200) == f"465.1 µs, {band.text}"
    assert predicted_json(465.14, KERNEL, SHAPE, H200) == {"predicted_us": 465.14, "predicted_band": band.to_json()}
    assert NARROW.text == "-10 to +20 %"


def test_no_prediction_has_no_band() -> None:
    assert predicted_text(None, KERNEL, SHAPE, H200) == "-"
    assert predicted_json(None, KERNEL, SHAPE, H200) == {"predicted_us": None, "predicted_band": None}


def test_what_was_never_measured_is_unchecked() -> None:
    both = replace(SHAPE, features=Features(mask=MaskKind.ADDITIVE, dropout=True))
    problem = KernelProblem("rows:softmax", LaunchProblem.of({"columns": 1024}))
    assert predicted_text(9.0, KERNEL, SHAPE, A100) == "9.0 µs, unchecked device"
    assert predicted_text(9.0, KERNEL, both, H200) == "9.0 µs, unchecked features"
    assert predicted_text(9.0, KERNEL, replace(SHAPE, dtype="float32"), H200) == "9.0 µs, unchecked features"
    assert predicted_text(9.0, "rows:softmax", problem, H200) == "9.0 µs, unchecked kernel"
    assert predicted_json(9.0, KERNEL, SHAPE, A100)["predicted_band"] is None


def test_16_bit_types_share_a_band_and_directions_do_not() -> None:
    backward = replace(SHAPE, direction=Direction.BACKWARD)
    assert BandKey.of(KERNEL, replace(SHAPE, dtype="float16")) == BandKey.of(KERNEL, SHAPE)
    assert BandKey.of(KERNEL, backward) != BandKey.of(KERNEL, SHAPE) != BandKey.of(KERNEL, replace(SHAPE, seqlen_q=1))


def test_a_kernel_with_too_few_measurements_has_the_band_of_all() -> None:
    dropout = replace(SHAPE, features=Features(dropout=True))
    band = band_of("flash_fwd_general", dropout, H200)
    assert band is not None
    assert band != band_of(KERNEL, dropout, H200)


@pytest.mark.parametrize(
    ("band", "words"),
    [
        (NARROW, ""),
        (replace(NARROW, high=0.26), "over 25 %"),
        (replace(NARROW, low=-0.26), "over 25 %"),
        (replace(NARROW, shapes=1), "only 1 shape"),
    ],
)
def test_a_wide_band_and_one_of_few_shapes_give_no_advice(band: Band, words: str) -> None:
    assert words in band.doubt
    assert bool(band.doubt) is bool(words)
    assert band.text.endswith("(of 1 shape)") is (band.shapes == 1)


def test_a_document_holds_the_bands() -> None:
    bands = {BandKey.of(KERNEL, SHAPE): NARROW, BandKey.of(ANY_KERNEL, replace(SHAPE, dtype="float32")): NARROW}
    document = bands_document(H200.key, bands)
    assert bands_from(document) == bands
    with pytest.raises(UsageError, match=r"tune lab calibrate"):
        bands_from(document | {"schema": 2})
