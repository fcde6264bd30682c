"""The bytes that the IO model counts beside what Nsight Compute counts: from L2 to the SMs, and from DRAM."""

import csv
import io
import json
import os
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest

from blocktune.kernels.hardware.device import current_device
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.traffic.by_kernel import traffic_of
from blocktune.tuner.traffic.model import Traffic
from tools import program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("ncu") is None, reason="Nsight Compute (ncu) is not on the PATH"),
]

SECTOR_BYTES = 32
DRAM_READ, DRAM_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2_READ, L2_WRITTEN = "lts__t_sectors_srcunit_tex_op_read.sum", "lts__t_sectors_srcunit_tex_op_write.sum"
SM_READ = "l1tex__m_xbar2l1tex_read_bytes.sum"
METRICS = (DRAM_READ, DRAM_WRITTEN, L2_READ, L2_WRITTEN, SM_READ)
NCU = ("ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--print-units", "base")
NO_PERMISSION = "ERR_NVGPUCTRPERM"
TIMEOUT_S = 280

PREFILL = complete_shape(4096, 64, batch=2, heads=32)
"""Tensors of 128 MiB in all, more than any L2 keeps; a head's keys and values are 1 MiB."""
DECODE = replace(complete_shape(8192, 128, batch=8, heads=32), seqlen_q=1, num_heads_kv=8)
BACKWARD = replace(complete_shape(4096, 128, batch=2, heads=16), direction=Direction.BACKWARD)


@dataclass(frozen=True)
class Counted:
    """Bytes by metric, of all kernels of one launch together; and the kernels."""

    totals: dict[str, float]
    kernels: tuple[str, ...]

    def __getitem__(self, metric: str) -> float:
        return self.totals[metric]


def config(kernel: str, block_m: int, block_n: int, stages: int = 2, **own: int) -> KernelConfig:
    return KernelConfig(kernel, block_m, block_n, 4, stages, tuple(own.items()))


def default(kernel: str, shape: AttentionShape) -> KernelConfig:
    return get_kernel(kernel).default_config(shape, current_device().limits)


def modelled(config: KernelConfig, shape: AttentionShape, *, perfect_l2: bool = False) -> Traffic:
    return traffic_of(get_kernel(config.kernel), config, shape, perfect_l2=perfect_l2)


def counted(shape: AttentionShape, config: KernelConfig) -> Counted:
    """What Nsight Compute counts, printed beside what the model does."""
    task = json.dumps({"shape": shape.to_json(), "config": config.to_json()})
    found = subprocess.run(
        [*NCU, "--metrics", ",".join(METRICS), *program("checks.traffic_target"), task],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=dict(os.environ),
    )
    if NO_PERMISSION in found.stdout + found.stderr:
        pytest.skip(f"Nsight Compute may not read the counters of this GPU ({NO_PERMISSION})")
    assert found.returncode == 0, (found.stdout + found.stderr)[-2000:]
    result = parsed(found.stdout)
    once, uncached = (modelled(config, shape, perfect_l2=perfect) for perfect in (True, False))
    print(f"\n{shape.label} {config.label}: {', '.join(result.kernels)}")
    print(", ".join(f"{name} {value / 1e6:.1f} MB" for name, value in result.totals.items()))
    print(
        f"model without a cache: {uncached.read_bytes / 1e6:.1f} MB read, {uncached.written_bytes / 1e6:.1f} written, "
        f"{uncached.arriving_bytes / 1e6:.1f} arriving at the SMs"
    )
    print(f"every launch reads once: {once.read_bytes / 1e6:.1f} MB read, {once.written_bytes / 1e6:.1f} written")
    return result


def parsed(output: str) -> Counted:
    """The table that follows the program's own output: a row for each kernel and metric."""
    assert '"ID"' in output, f"no kernel was profiled: {output[-2000:]}"
    totals: dict[str, float] = defaultdict(float)
    kernels: dict[str, str] = {}
    for row in csv.DictReader(io.StringIO(output[output.index('"ID"') :])):
        unit = SECTOR_BYTES if row["Metric Name"].startswith("lts__") else 1
        totals[row["Metric Name"]] += unit * float(row["Metric Value"].replace(",", ""))
        kernels[row["ID"]] = row["Kernel Name"]
    assert set(totals) == set(METRICS), f"this GPU lacks {set(METRICS) - set(totals)}"
    return Counted(dict(totals), tuple(kernels.values()))


def test_v2_reads_keys_once_a_query_tile_from_l2_and_about_once_from_dram() -> None:
    blocks = config("flash_fwd", 128, 64, schedule=0)
    found = counted(PREFILL, blocks)
    uncached, once = (modelled(blocks, PREFILL, perfect_l2=perfect) for perfect in (False, True))
    assert found[SM_READ] == pytest.approx(uncached.arriving_bytes, rel=0.05)
    assert found[L2_READ] < found[SM_READ]  # requests of neighbouring SMs for the same keys are answered together
    assert found[L2_WRITTEN] == pytest.approx(uncached.written_bytes, rel=0.05)
    assert found[DRAM_READ] < 1.5 * once.read_bytes


def test_v1_moves_output_and_statistics_through_l2_once_a_key_tile() -> None:
    """64 blocks have 1.5 MiB of queries and float32 output each in flight, more than L2 keeps: much of the theorem's
    traffic does reach DRAM, unlike that of v2."""
    blocks = config("flash_v1", 64, 64, stages=1)
    found = counted(PREFILL, blocks)
    assert [name for name in found.kernels if "flash_v1_kernel" in name] == list(found.kernels)
    counts = modelled(blocks, PREFILL)
    assert found[SM_READ] == pytest.approx(counts.arriving_bytes, rel=0.05)
    assert found[L2_WRITTEN] == pytest.approx(counts.written_bytes, rel=0.05)
    assert found[DRAM_READ] < 1.05 * found[SM_READ]


def test_the_transpose_is_counted_with_the_attention_that_needs_it() -> None:
    blocks = config("flash_fwd_transposed", 128, 64, transpose_rows=64)
    found = counted(PREFILL, blocks)
    assert len(found.kernels) == 2
    assert "transpose_keys_kernel" in found.kernels[0]
    assert found[SM_READ] == pytest.approx(modelled(blocks, PREFILL).arriving_bytes, rel=0.05)


def test_decode_reads_keys_and_values_once_from_dram() -> None:
    blocks = default("flash_decode", DECODE)
    found = counted(DECODE, blocks)
    assert found[DRAM_READ] == pytest.approx(modelled(blocks, DECODE, perfect_l2=True).read_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("kernel", "launches"), [("flash_bwd_hopper", 3), ("flash_bwd_split", 3), ("flash_bwd_fused", 4)]
)
def test_the_backward_reads_from_dram_between_the_bounds(kernel: str, launches: int) -> None:
    """Sums and statistics of one launch may still be in L2 in the next, so that even the lower bound is a little high;
    Nsight Compute empties the cache between kernels unless it is told not to."""
    reason = get_kernel(kernel).unsupported(BACKWARD, current_device().limits)
    if reason is not None:
        pytest.skip(reason)
    blocks = default(kernel, BACKWARD)
    found = counted(BACKWARD, blocks)
    assert len(found.kernels) == launches
    once, uncached = (modelled(blocks, BACKWARD, perfect_l2=perfect) for perfect in (True, False))
    assert 0.8 * once.read_bytes < found[DRAM_READ] < uncached.read_bytes
    # the addends of dq bring nothing back; spilled registers that fall out of L1 do
    assert uncached.arriving_bytes * 0.99 < found[SM_READ] < uncached.arriving_bytes * 1.1
