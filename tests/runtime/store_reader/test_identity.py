"""What a measurement of one device and software is worth on another, and how the versions here are found."""

from dataclasses import replace
from typing import Any

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.store_reader.provenance import Identity, Reuse, ptxas_version, reuse_of

HERE = Identity(
    device_key=device_named("h200").key,
    kernel_hash="00000000feedbeef",
    triton="3.6.0",
    ptxas="12.8.93",
    driver="580.65.06",
    power_limit_w=700,
)
H100 = {"device_key": device_named("h100_sxm5").key}
SLICE = {"device_key": "nvidia h200 mig 1g.18gb|9.0|16"}


@pytest.mark.parametrize(
    ("changes", "worth"),
    [
        ({}, Reuse.EXACT),
        ({"driver": "580.65.07"}, Reuse.OTHER_DRIVER),
        ({"power_limit_w": 350}, Reuse.OTHER_DRIVER),
        ({"power_limit_w": 690}, Reuse.EXACT),
        ({"power_limit_w": 350, "triton": "3.6.1"}, Reuse.OTHER_COMPILER),
        ({"triton": "3.6.1"}, Reuse.OTHER_COMPILER),
        ({"ptxas": "12.9.1"}, Reuse.OTHER_COMPILER),
        ({"ptxas": "12.9.1", "driver": "570"}, Reuse.OTHER_COMPILER),
        ({"kernel_hash": "f" * 16, "triton": "3.5.0"}, Reuse.OTHER_SOURCE),
        ({"kernel_hash": ""}, Reuse.OTHER_SOURCE),
        (H100, Reuse.SAME_CAPABILITY),
        (SLICE, Reuse.SAME_CAPABILITY),
        ({"device_key": "nvidia h200|9.0|78"}, Reuse.SAME_CAPABILITY),
        (H100 | {"kernel_hash": "f" * 16}, Reuse.SAME_CAPABILITY),
        ({"device_key": device_named("a100_sxm4_80").key}, None),
        ({"device_key": ""}, None),
        ({"device_key": "9.0"}, None),
        # a device that is only named has no driver, and old rows may lack versions
        ({"power_limit_w": 0}, Reuse.EXACT),
        ({"driver": ""}, Reuse.EXACT),
        ({"ptxas": "", "triton": ""}, Reuse.EXACT),
    ],
    ids=str,
)
def test_the_greatest_difference_decides(changes: dict[str, Any], worth: Reuse | None) -> None:
    there = replace(HERE, **changes)
    assert reuse_of(there, HERE) is worth
    assert reuse_of(HERE, there) is worth


@pytest.mark.parametrize(
    ("banner", "version"),
    [
        ("ptxas: NVIDIA (R) Ptx optimizing assembler\nCuda compilation tools, release 12.8, V12.8.93\n", "12.8.93"),
        (" of my own\n", "of my own"),
    ],
)
def test_the_assembler_says_its_version(banner: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import compiler

    monkeypatch.setattr(compiler, "get_ptxas_version", lambda sm_arch: banner)
    assert ptxas_version.__wrapped__(90) == version


def test_an_assembler_that_does_not_run_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import compiler

    def missing(sm_arch: int) -> str:
        raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(compiler, "get_ptxas_version", missing)
    assert ptxas_version.__wrapped__(90) == ""
