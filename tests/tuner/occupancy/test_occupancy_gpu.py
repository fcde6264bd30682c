"""The occupancy model against the CUDA driver, for every config of a sweep, and against Nsight Compute for a few."""

import csv
import ctypes
import io
import json
import os
import shutil
import subprocess
from concurrent.futures import Future, as_completed

import pytest
import torch

from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.compile.compiler import CompileResult, options_of, source_of
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.occupancy.calculator import Limiter, Occupancy, occupancy
from tools import program

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400)]
SHAPE = complete_shape(1024, 64, batch=2, heads=8)
NCU_LIMITS = {
    "launch__occupancy_limit_warps": Limiter.WARPS,
    "launch__occupancy_limit_blocks": Limiter.BLOCKS,
    "launch__occupancy_limit_registers": Limiter.REGISTERS,
    "launch__occupancy_limit_shared_mem": Limiter.SHARED_MEMORY,
}
"""ncu's barrier limit is left out: it never exceeds the block limit (32), NVIDIA's own header says 64 for 9.0."""
CARVEOUT = "launch__shared_mem_config_size"
OTHERS = ("launch__registers_per_thread", CARVEOUT)


@pytest.fixture(scope="module")
def compiled() -> dict[KernelConfig, Occupancy]:
    """The occupancy of every config that can run SHAPE and compiles."""
    limits = current_device().limits
    feasible = SearchSpace.build(SHAPE, limits, kernels_for(SHAPE, limits)).feasible
    with CompileFarm(need_code=True) as farm:
        futures: list[Future[CompileResult]] = [farm.submit(c.kernel, c, SHAPE, limits.cc) for c in feasible]
        results = [future.result() for future in as_completed(futures)]
    return {
        result.config: occupancy(result.resources, limits)
        for result in results
        if result.outcome is Outcome.OK and result.resources is not None
    }


def driver_blocks(config: KernelConfig, occupied: Occupancy) -> int:
    """What cuOccupancyMaxActiveBlocksPerMultiprocessor says of this config's loaded code."""
    from triton import compile as triton_compile

    spec = get_kernel(config.kernel).compile_spec(config, SHAPE)
    kernel = triton_compile(source_of(spec), options=options_of(spec))
    kernel._init_handles()
    blocks = ctypes.c_int()
    code = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(blocks),
        ctypes.c_void_p(kernel.function),
        occupied.resources.threads,
        ctypes.c_size_t(occupied.resources.shared_bytes),
    )
    assert code == 0
    return blocks.value


def test_every_compiled_config_has_the_drivers_occupancy(compiled: dict[KernelConfig, Occupancy]) -> None:
    torch.zeros(1, device="cuda")  # a context for the driver
    wrong = {
        config.label: (occupied.blocks_per_sm, found)
        for config, occupied in compiled.items()
        if (found := driver_blocks(config, occupied)) != occupied.blocks_per_sm
    }
    print(f"\n{len(compiled)} configs, {len(wrong)} differ from the driver")
    assert len(compiled) > 100
    assert wrong == {}


@pytest.mark.skipif(shutil.which("ncu") is None, reason="Nsight Compute (ncu) is not on the PATH")
def test_a_few_configs_have_the_limits_of_nsight_compute(compiled: dict[KernelConfig, Occupancy]) -> None:
    configs = sorted(compiled, key=lambda config: config.label)[:: max(1, len(compiled) // 6)][:6]
    command = ["ncu", "--clock-control", "none", "--csv", "--kernel-name", "regex:flash_fwd"]
    command += [
        "--print-units",
        "base",
        "--metrics",
        ",".join([*NCU_LIMITS, *OTHERS]),
        *program("checks.ncu_target"),
    ]
    found = subprocess.run(
        [*command, *(json.dumps(config.to_json()) for config in configs)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        env=dict(os.environ),
    )
    table = found.stdout[found.stdout.index('"ID"') :]
    found_metrics: dict[int, dict[str, int]] = {}
    for row in csv.DictReader(io.StringIO(table)):
        value = int(float(row["Metric Value"].replace(",", "")))
        found_metrics.setdefault(int(row["ID"]), {})[row["Metric Name"]] = value
    assert len(found_metrics) == len(configs)
    for config, metrics in zip(configs, found_metrics.values(), strict=True):
        resources, limits = compiled[config].resources, compiled[config].limits
        assert metrics["launch__registers_per_thread"] == resources.registers, config.label
        # The driver leaves the L1 cache what a block limit by registers makes useless as shared memory; ncu counts the
        # blocks that fit what it chose.
        carveout_percent = 100 * metrics[CARVEOUT] // limits.shared_per_sm_bytes
        occupied = occupancy(resources, limits, carveout_percent=carveout_percent)
        expected = {name: occupied.limit_blocks[limiter] for name, limiter in NCU_LIMITS.items()}
        assert {name: metrics[name] for name in NCU_LIMITS} == expected, config.label
        assert occupied.blocks_per_sm == compiled[config].blocks_per_sm, config.label
        print(f"\n{config.label}: {expected}, {metrics[CARVEOUT] >> 10} KiB of shared memory chosen", end="")
