"""`tune contribute`: one file, and what `tune import` makes of those of two machines."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktune.cli.tune.bench_file import read_bench
from blocktune.kernels.hardware import device as devices
from blocktune.kernels.hardware.device import device_named
from tests.support.fakes.contributing_gpu import ENVIRONMENT, ContributingGpu

DEVICE = replace(device_named("rtx2070"), source="driver")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ContributingGpu]:
    """Makes the GPU with this UUID the one that is here."""
    monkeypatch.setattr("blocktune.tuner.contribute.anonymous.gpu_uuids", lambda: ())
    monkeypatch.setattr("blocktune.tuner.measure.environment.measuring_environment", lambda *_: ENVIRONMENT)

    def here(uuid: str, **changes: Any) -> ContributingGpu:
        gpu = ContributingGpu(replace(DEVICE, uuid=uuid), seconds=0.1, **changes)

        @contextmanager
        def instruments(device: object) -> Iterator[Any]:
            yield gpu.instruments()

        monkeypatch.setattr(devices, "current_device", lambda: gpu.device)
        monkeypatch.setattr("blocktune.cli.lab.contribute._instruments", instruments)
        return gpu

    return here


def make_key(path: Path) -> Path:
    """Write a pair of keys, the public one next to the private one."""
    key = Ed25519PrivateKey.generate()
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    path.chmod(0o600)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    path.with_name(f"{path.name}.pub").write_bytes(public)
    return path


def origins(tune: Any) -> set[str]:
    return {best["origin"] for best in json.loads(tune("export", "-").stdout)["bests"]}


def test_rows_are_borrowed_until_two_machines_agree(tune, machine, tmp_path: Path) -> None:
    one, other, third = (tmp_path / f"{name}.json" for name in ("one", "other", "third"))
    machine("GPU-1")
    result = tune("contribute", one)
    assert result.exit_code == 0, result.output
    assert "36 shapes timed next to PyTorch" in result.stdout
    assert "please send it" in result.stderr
    assert tune("import", one).exit_code == 0
    assert origins(tune) == {"borrowed"}
    machine("GPU-1")
    assert tune("contribute", other).exit_code == 0
    assert tune("import", other).exit_code == 0
    assert origins(tune) == {"borrowed"}, "it is the same machine"
    machine("GPU-2")
    assert tune("contribute", third).exit_code == 0
    assert tune("import", third).exit_code == 0
    assert origins(tune) == {"community"}


@pytest.mark.exhaustive
def test_files_of_two_machines_may_come_at_once(tune, machine, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for file in files:
        machine(f"GPU-{file.stem}")
        assert tune("contribute", file).exit_code == 0
    assert tune("merge", *files).exit_code == 0
    assert origins(tune) == {"community"}


def test_the_bench_in_it_is_one(tune, machine, tmp_path: Path) -> None:
    machine("GPU-1")
    file, bench = tmp_path / "one.json", tmp_path / "rtx2070.bench.json"
    assert tune("contribute", file).exit_code == 0
    bench.write_text(json.dumps(json.loads(file.read_text())["bench"]))
    found = read_bench(bench)
    assert (len(found["rows"]), found["commands"]) == (36, ["tune contribute"])


def test_a_wrong_kernel_ends_with_7_and_stands_in_the_file(tune, machine, tmp_path: Path) -> None:
    machine("GPU-1", wrong="flash_fwd")
    file = tmp_path / "one.json"
    result = tune("contribute", file, "--json")
    assert result.exit_code == 7
    assert "flash_fwd" in result.stderr
    told = json.loads(result.stdout)
    assert told["right"] < told["checked"]
    failed = [row for row in json.loads(file.read_text())["conformance"] if row["outcome"] != "ok"]
    assert {row["kernel"] for row in failed} == {"flash_fwd"}


def test_a_signed_file_is_checked_with_the_public_key(tune, machine, tmp_path: Path) -> None:
    key, stranger = make_key(tmp_path / "key"), make_key(tmp_path / "other_key")
    machine("GPU-1")
    file = tmp_path / "one.json"
    assert tune("contribute", file, "--sign", key).exit_code == 0
    assert tune("contribute", file, "--verify", f"{key}.pub").exit_code == 0
    refused = tune("contribute", file, "--verify", f"{stranger}.pub")
    assert refused.exit_code == 5
    assert "carries another signature" in refused.stderr
    assert tune("import", file).exit_code == 0


def test_a_key_that_cannot_sign_is_told_before_the_ten_minutes(tune, machine, tmp_path: Path) -> None:
    gpu = machine("GPU-1")
    (tmp_path / "key").write_text("no key")
    assert tune("contribute", tmp_path / "one.json", "--sign", tmp_path / "key").exit_code == 2
    assert gpu.wall.at == 0


def test_without_a_gpu_nothing_is_contributed(tune, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "present_devices", tuple)
    assert tune("contribute", tmp_path / "one.json").exit_code == 4
    assert not (tmp_path / "one.json").exists()
