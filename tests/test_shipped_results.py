"""The results that ship with the package belong to the kernels that ship with it."""

import json
from pathlib import Path

import pytest

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

RESULTS = Path(__file__).parent.parent / "results"
EXPORTS = sorted(path for path in RESULTS.glob("*.json") if "." not in path.stem)  # the others name what they hold


@pytest.mark.parametrize("path", EXPORTS, ids=lambda path: path.stem)
def test_every_shipped_winner_was_measured_with_this_kernel_source_and_runs_on_its_device(path: Path) -> None:
    document = json.loads(path.read_text())
    limits = DeviceSpec.from_json(document["device"]).limits
    assert document["bests"]
    for best in document["bests"]:
        config, shape = KernelConfig.from_json(best["config"]), AttentionShape.from_json(best["shape"])
        kernel = get_kernel(config.kernel)
        assert best["kernel_hash"] == kernel.source_hash, (
            f"{config.kernel} changed: tune again, or withdraw {path.name}"
        )
        assert kernel.violations(config, shape, limits) == ()
        assert best["origin"] == "measured"
