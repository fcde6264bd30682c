"""Resources from machine code, compiled here for GPUs that are not here."""

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.hardware.limits import limits_for
from blocktune.tuner.compile import compiler
from blocktune.tuner.compile.compiler import (
    compile_config,
    compiled_code,
    only_code_that_fits,
    ptxas_logs,
    ptxas_version,
    resources_of,
    tensor_cores_in,
)
from blocktune.tuner.occupancy.calculator import occupancy
from tests.support.compiles.measures import fresh_resources


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from tests.support.fakes import compile_fakes

    return compile_fakes


def compiled(fakes: Any, cc: tuple[int, int], **values: int) -> Any:
    config = fakes.config("product", **values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Triton 3.9 warns of options that are left open
        return fresh_resources(fakes.get_kernel("product"), config, fakes.SHAPE, cc)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("cc", "tensor_cores"),
    [((7, 5), "none"), ((8, 0), "mma"), ((9, 0), "wgmma"), ((10, 0), "tcgen05"), ((12, 0), "mma")],
)
def test_compile_resources_of_every_generation(fakes: Any, cc: tuple[int, int], tensor_cores: str) -> None:
    resources = compiled(fakes, cc)
    assert resources.tensor_cores == tensor_cores
    assert resources.num_warps == 4
    assert 32 < resources.registers <= 255
    assert 0 < resources.shared_bytes <= limits_for(cc).shared_per_block_optin_bytes
    # cuobjdump counts the system's reserve from sm_90 on; adding it again would lose resident blocks.
    assert resources.static_shared_bytes == 0
    assert resources.barriers == 1
    assert len(resources.code_sha256) == 64
    assert occupancy(resources, limits_for(cc)).blocks_per_sm >= 1


def test_compile_resources_tells_spills(fakes: Any) -> None:
    assert compiled(fakes, (9, 0)).spill_bytes == 0
    spilling = compiled(fakes, (9, 0), block_m=512)
    assert spilling.stack_bytes > 0
    assert spilling.spill_bytes > 0
    assert spilling.registers == 255


def test_the_log_of_a_compile_spares_a_second_run_of_ptxas(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, config = fakes.get_kernel("product"), fakes.config("product", block_m=512)
    with ptxas_logs() as logs:
        code = compiled_code(kernel.compile_spec(config, fakes.SHAPE), (9, 0))
    with_a_second_run = resources_of(code)
    monkeypatch.setattr(compiler, "_ptxas_log", None)
    assert resources_of(code, "".join(logs)) == with_a_second_run
    assert with_a_second_run.spill_bytes > 0
    compiled(fakes, (9, 0))  # and Triton's module is as it was
    assert len(logs) == 1


def test_code_that_fits_no_block_never_reaches_ptxas(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.errors import OutOfResources

    own, small = CUDABackend.make_ptx, replace(limits_for((9, 0)), shared_per_block_optin_bytes=1024)
    monkeypatch.setattr(compiler, "limits_for", lambda cc: small)
    monkeypatch.setattr(CUDABackend, "make_cubin", None)
    with (
        only_code_that_fits((9, 0)),
        pytest.raises(OutOfResources, match=r"shared memory, Required: \d+, Hardware limit: 1024"),
    ):
        compile_config(fakes.get_kernel("product"), fakes.config("product"), fakes.SHAPE, (9, 0))
    assert CUDABackend.make_ptx is own


@pytest.mark.exhaustive
def test_threads_that_compile_at_once_leave_the_process_as_it_was(
    fakes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its standard output and Triton's settings are those of all threads."""
    from triton import knobs

    before = sys.stdout
    kernel, config = fakes.get_kernel("product"), fakes.config("product", block_m=512)
    first = compiled(fakes, (9, 0), block_m=512)  # from now on only the log of ptxas is made
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: compile_config(kernel, config, fakes.SHAPE, (9, 0)), range(8)))
    assert {resources for resources, _ in found} == {first}
    assert sys.stdout is before
    assert not knobs.nvidia.dump_ptxas_log
    assert "ptxas" not in capsys.readouterr().out


def test_compile_resources_equal_code_has_equal_hash(
    fakes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = compiled(fakes, (9, 0))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    assert compiled(fakes, (9, 0)) == first
    assert compiled(fakes, (9, 0), block_m=128).code_sha256 != first.code_sha256


def test_compile_resources_leaves_triton_s_settings_alone(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.delenv("TRITON_DUMP_PTXAS_LOG", raising=False)
    compiled(fakes, (9, 0), block_m=512)
    assert not knobs.nvidia.dump_ptxas_log


@pytest.mark.parametrize(
    ("ptx", "expected"),
    [
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r1}", "wgmma"),
        ("@%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r1 ]", "tcgen05"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {", "mma"),
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", "none"),
    ],
)
def test_tensor_cores_in(ptx: str, expected: str) -> None:
    assert tensor_cores_in(ptx) == expected


def test_ptxas_version_is_a_version() -> None:
    assert all(part.isdigit() for part in ptxas_version((9, 0)).split("."))
    assert int(ptxas_version((10, 0)).split(".")[0]) >= 12
