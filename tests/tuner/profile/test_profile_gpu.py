"""Counters of the GPU here, next to the predictions: run with `-s` to see them."""

import shutil

import pytest

from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.errors import NoDeviceError
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.compile_server.one_config import compile_config
from blocktune.tuner.cost.analysis import analyse
from blocktune.tuner.profile.comparison import comparison, stalls_of
from blocktune.tuner.profile.counters import Counters
from blocktune.tuner.profile.nsight_compute import record_counters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("ncu") is None, reason="Nsight Compute (ncu) is not on the PATH"),
]
SHAPE = complete_shape(4096, 64, batch=2, heads=32)


@pytest.mark.parametrize("name", ["flash_fwd", "flash_fwd_tma", "flash_fwd_hopper"])
def test_every_counter_is_there_and_bytes_are_as_predicted(name: str) -> None:
    kernel, device = get_kernel(name), current_device()
    reason = kernel.unsupported(SHAPE, device.limits)
    if reason is not None:
        pytest.skip(reason)
    config = kernel.default_config(SHAPE, device.limits)
    code = compile_config(config, SHAPE, device.limits)
    analysis = analyse(kernel, config, SHAPE, device, code)
    try:
        counters = Counters.parse(record_counters(SHAPE, config))
    except NoDeviceError as error:
        pytest.skip(str(error))
    rows = {row.name: row for row in comparison(analysis, counters)}
    print(f"\n{config.label}")
    for row in rows.values():
        print(f"{row.name}: predicted {row.predicted}, counted {row.counted} {row.unit}")
    stalls = stalls_of(analysis, counters)
    print(", ".join(f"{stall.reason} {100 * stall.share:.0f} %" for stall in stalls))
    assert all(row.counted is not None for row in rows.values())
    assert rows["L2 to multiprocessors"].ratio == pytest.approx(1.0, abs=0.1)
    assert rows["occupancy"].ratio == pytest.approx(1.0, abs=0.25)
    assert stalls
