"""The bytes that the IO model counts beside what Nsight Compute counts: from L2 to the SMs, and from DRAM."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.kernels.config import KernelConfig
from blocktune.kernels.device import current_device
from blocktune.kernels.flash_decode import FlashDecode
from blocktune.kernels.shape import AttentionShape
from blocktune.tuner.defaults import complete_shape
from blocktune.tuner.io_model import v1_traffic, v2_traffic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("ncu") is None, reason="Nsight Compute (ncu) is not on the PATH"),
]

TARGET = Path(__file__).parent / "traffic_target.py"
SECTOR_BYTES = 32
DRAM_READ, DRAM_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2_READ, L2_WRITTEN = "lts__t_sectors_srcunit_tex_op_read.sum", "lts__t_sectors_srcunit_tex_op_write.sum"
SM_READ = "l1tex__m_xbar2l1tex_read_bytes.sum"
METRICS = (DRAM_READ, DRAM_WRITTEN, L2_READ, L2_WRITTEN, SM_READ)

PREFILL = complete_shape(4096, 64, batch=2, heads=32)
"""Tensors of 128 MiB in all, more than any L2 keeps; a head's keys and values are 1 MiB."""
DECODE = replace(complete_shape(8192, 128, batch=8, heads=32), seqlen_q=1, num_heads_kv=8)


def config(kernel: str, block_m: int, block_n: int, **own: int) -> KernelConfig:
    return KernelConfig(kernel, block_m, block_n, 4, 2, tuple(own.items()))


def counted(shape: AttentionShape, config: KernelConfig) -> dict[str, float]:
    """Bytes by metric, of all of blocktune's kernels that one launch starts."""
    command = ["ncu", "--clock-control", "none", "--csv", "--print-units", "base", "--kernel-name", "regex:flash|merge"]
    task = json.dumps({"shape": shape.to_json(), "config": config.to_json()})
    found = subprocess.run(
        [*command, "--metrics", ",".join(METRICS), sys.executable, "-P", str(TARGET), task],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        env=dict(os.environ),
    )
    totals = dict.fromkeys(METRICS, 0.0)
    for row in csv.DictReader(io.StringIO(found.stdout[found.stdout.index('"ID"') :])):
        unit = SECTOR_BYTES if row["Metric Name"].startswith("lts__") else 1
        totals[row["Metric Name"]] += unit * float(row["Metric Value"].replace(",", ""))
    print(
        f"\n{shape.label} {config.label}: "
        + ", ".join(f"{name} {value / 1e6:.1f} MB" for name, value in totals.items())
    )
    return totals


def test_v2_reads_keys_once_a_query_tile_from_l2_and_about_once_from_dram() -> None:
    found = counted(PREFILL, config("flash_fwd", 128, 64, schedule=0))
    modelled = v2_traffic(PREFILL, 128, 64)
    reads = modelled.q_read + modelled.k_read + modelled.v_read
    print(f"model without L2: {reads / 1e6:.1f} MB read, {modelled.o_written / 1e6:.1f} MB written")
    assert found[SM_READ] == pytest.approx(reads, rel=0.05)
    assert found[L2_READ] < found[SM_READ]  # requests of neighbouring SMs for the same keys are answered together
    assert found[L2_WRITTEN] == pytest.approx(modelled.o_written, rel=0.05)
    once = v2_traffic(PREFILL, 128, 64, perfect_l2=True)
    assert found[DRAM_READ] < 1.5 * (once.q_read + once.k_read + once.v_read)


def test_v1_moves_output_and_statistics_through_l2_once_a_key_tile() -> None:
    found = counted(PREFILL, config("flash_v1", 64, 64))
    modelled = v1_traffic(PREFILL, 64, 64)
    reads = modelled.k_read + modelled.v_read + modelled.q_read + modelled.o_read + modelled.statistics_read
    writes = modelled.initial_written + modelled.o_written + modelled.statistics_written
    print(f"model without L2: {reads / 1e6:.1f} MB read, {writes / 1e6:.1f} MB written")
    assert found[SM_READ] == pytest.approx(reads, rel=0.15)
    assert found[L2_WRITTEN] == pytest.approx(writes, rel=0.15)


def test_decode_reads_keys_and_values_once_from_dram() -> None:
    kernel = FlashDecode()
    found = counted(DECODE, kernel.default_config(DECODE, current_device().limits))
    cache_bytes = 2 * DECODE.batch * DECODE.num_heads_kv * DECODE.seqlen_k * DECODE.head_dim * DECODE.element_bytes
    print(f"keys and values: {cache_bytes / 1e6:.1f} MB")
    assert found[DRAM_READ] == pytest.approx(cache_bytes, rel=0.05)
