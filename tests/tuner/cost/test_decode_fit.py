"""Decoding on an H200: predicted times near the measured ones, and the kernel preferred that is faster there."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.cost.estimated_resources import estimated_resources
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.lab.sweep_file import load_sweep
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.occupancy.compiled_code import CompiledCode

pytestmark = pytest.mark.triton_free

ROOT = Path(__file__).parents[3]
RESULTS, SHIPPED = ROOT / "results", ROOT / "blocktune" / "results"
H200 = device_named("h200")
HOPPER, PORTABLE = "flash_decode_hopper", "flash_decode"
GROUP_BLOCK = 16
"""Rows of the smallest block, which holds all queries of a key head in these shapes."""

ROWS = json.loads((RESULTS / "h200-decode.bench.json").read_text())["rows"]
WINNERS = json.loads((SHIPPED / "h200.json").read_text())["bests"]


def is_decoding(shape: AttentionShape) -> bool:
    return shape.seqlen_q <= 32 and shape.seqlen_k >= 1024 and shape.seqlen_q < shape.seqlen_k


@pytest.fixture(scope="module")
def resources() -> Mapping[KernelConfig, KernelResources]:
    """Of the code of every config that was swept; one compilation serves all lengths and batches."""
    sweeps = (
        load_sweep(RESULTS / "sweeps" / f"h200-{name}-h32-8-s1-8192-d128-bf16.sweep.json.gz") for name in ("b1", "b64")
    )
    return {trial.config: trial.resources for sweep in sweeps for trial in sweep.trials if trial.resources is not None}


def predicted(config: KernelConfig, shape: AttentionShape, resources: Mapping[KernelConfig, KernelResources]) -> float:
    """Return the predicted time. Pairs of splits (`overlap` 2) are in no sweep: their code is estimated."""
    kernel = get_kernel(config.kernel)
    found = resources.get(config) or estimated_resources(kernel, config, shape, H200)
    return predict_us(kernel, config, shape, H200, CompiledCode(found, None))


def shape_of(row: dict) -> AttentionShape:
    return AttentionShape.from_json(row["shape"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: shape_of(row).label)
def test_the_bench_of_both_kernels_is_predicted(row: dict, resources: Mapping[KernelConfig, KernelResources]) -> None:
    kernels = set()
    for entry in row["contenders"]:
        if entry["config"] is None or entry["timing"] is None:
            continue
        config = KernelConfig.from_json(entry["config"])
        kernels.add(config.kernel)
        assert 0.75 <= entry["timing"]["median_us"] / predicted(config, shape_of(row), resources) <= 1.33, config.label
    assert kernels == {HOPPER, PORTABLE}


def test_every_shipped_winner_is_predicted(resources: Mapping[KernelConfig, KernelResources]) -> None:
    decodings = [winner for winner in WINNERS if is_decoding(shape_of(winner))]
    assert len(decodings) >= 14
    for winner in decodings:
        config = KernelConfig.from_json(winner["config"])
        ratio = winner["time_us"] / predicted(config, shape_of(winner), resources)
        assert 0.75 <= ratio <= 1.33, (shape_of(winner).label, config.label)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: shape_of(row).label)
def test_the_kernel_is_preferred_that_was_faster(row: dict, resources: Mapping[KernelConfig, KernelResources]) -> None:
    entries = {entry["name"]: entry for entry in row["contenders"]}
    tuned, portable = entries["tuned"], entries[PORTABLE]
    assert tuned["config"]["kernel"] == HOPPER
    assert tuned["timing"]["median_us"] < portable["timing"]["median_us"]
    favourite = {
        kernel: min(
            predicted(config, shape_of(row), resources)
            for config in resources
            if config.kernel == kernel and config.block_m == GROUP_BLOCK
        )
        for kernel in (HOPPER, PORTABLE)
    }
    assert favourite[HOPPER] < favourite[PORTABLE]


@pytest.mark.parametrize("name", ["b8-h64-4-s1-8192", "b4-h64-8-s1-32768", "b16-h32-4-s2-1024"])
def test_blocks_of_a_multiprocessor_are_known_before_warps_of_their_own_are_compiled(name: str) -> None:
    """The registers of such warps decide it, of which every one holds keys, queries and an output."""
    (path,) = (RESULTS / "dense-sweeps").glob(f"h200-{name}-d128-*.gz")
    sweep = load_sweep(path)
    kernel, checked = get_kernel(HOPPER), 0
    for trial in sweep.trials:
        if trial.config.kernel == HOPPER and trial.resources is not None:
            estimate = estimated_resources(kernel, trial.config, sweep.shape, H200)
            assert estimate.registers == pytest.approx(trial.resources.registers, rel=0.1)
            assert (
                occupancy(estimate, H200.limits).blocks_per_sm == occupancy(trial.resources, H200.limits).blocks_per_sm
            )
            checked += 1
    assert checked >= 20
