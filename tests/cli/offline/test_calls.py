"""`--call`: what a function launches, from the command line."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from blocktune.cli.offline import calls
from blocktune.tuner.dry_run.config_table import OfflineTable
from tests.cli.conftest import Tune
from tests.cli.offline.test_gate import GOOD, SPILLING, made_table
from tests.support.triton_modes import compiled_here

LIBRARY = "tests.support.libraries.launched_kernels"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Let calls launch a kernel of two configs, and return what was asked for."""
    asked: list[tuple[Any, ...]] = []

    def tables(call: str, device: Any, cache: Path | None) -> tuple[OfflineTable, ...]:
        asked.append((call, device.name, cache))
        return (made_table(GOOD, SPILLING),)

    monkeypatch.setattr(calls, "_tables_apart", tables)
    return asked


def test_each_device_has_its_tables(tune: Tune, made: list[tuple[Any, ...]], tmp_path: Path) -> None:
    told = tune("explain", "--call", "lib:step", "--device", "h200, a100", "--json", "--fill-cache", tmp_path)
    assert told.exit_code == 0, told.output
    assert [name for _, name, _ in made] == ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]
    assert {cache for _, _, cache in made} == {tmp_path}
    found = json.loads(told.stdout)
    assert (found["call"], len(found["tables"])) == ("lib:step", 2)
    assert [each["rank"] for each in found["tables"][0]["configs"]] == [1, 2]


def test_a_gate_fails_after_it_has_shown_everything(tune: Tune, made: list[tuple[Any, ...]], tmp_path: Path) -> None:
    junit = tmp_path / "configs.xml"
    told = tune("explain", "--call", "lib:step", "--device", "h200", "--fail-on", "spills", "--junit", junit)
    assert told.exit_code == 8
    assert "64 bytes a thread are spilled" in " ".join(told.stderr.split())
    assert "It is no time." in told.stdout
    assert ElementTree.parse(junit).getroot().find("testsuite").get("failures") == "1"  # type: ignore[union-attr]


def test_occupancy_has_the_short_form(tune: Tune, made: list[tuple[Any, ...]]) -> None:
    told = tune("occupancy", "--call", "lib:step", "--device", "h200")
    assert told.exit_code == 0
    assert "lib:kernel n=1 on NVIDIA H200: 2 configs of its list" in told.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("explain", "--fail-on", "spills"), "--fail-on is about the kernels of a `--call`"),
        (("explain", "--call", "lib:step", "--fail-on", "spill"), "Flaws are spills, unfit, duplicates"),
        (("explain", "--call", "lib:step", "--seq", 64, "--dim", 64), "--seq and --dim are given too"),
        (("explain", "--call", "lib:step", "--device", "h2000"), "h2000"),
        (
            ("explain", "lib:add", "--call", "lib:step"),
            "too. Leave out --call or MODULE:KERNEL.",
        ),
        (("explain", "--call", "lib:step", "--block-m", 64), "--block-m is given too"),
        (("occupancy", "lib:add", "--call", "lib:step"), "MODULE:KERNEL is given too"),
        (("occupancy", "--call", "lib:step", "--regs", 64), "--regs is given too"),
        (("occupancy", "--call", "lib:step", "--cc", "9.0"), "--cc is given too"),
        (("occupancy", "--call", "lib:step", "--signature", "*bf16"), "--signature is given too"),
        (("occupancy", "--call", "lib:step", "--param", "B=1"), "--param is given too"),
        (("occupancy", "--call", "lib:step", "--warps", 4), "--warps is given too"),
        (("occupancy", "--call", "lib:step", "--seq", 8192, "--plot"), "--seq and --plot are given too"),
    ],
    ids=str,
)
def test_wrong_use_of_a_call_says_the_way_out(
    tune: Tune, made: list[tuple[Any, ...]], words: tuple[object, ...], message: str
) -> None:
    told = tune(*words)
    assert told.exit_code == 2
    assert message in " ".join(told.stderr.split())


@pytest.mark.exhaustive
@compiled_here
def test_a_call_is_explained_in_a_process_of_its_own(tune: Tune, tmp_path: Path) -> None:
    told = tune("explain", "--call", f"{LIBRARY}:even", "--device", "a100", "--json", "--fill-cache", tmp_path)
    assert told.exit_code == 0, told.output
    even, odd = json.loads(told.stdout)["tables"]
    assert (even["device"], even["listed"], len(odd["configs"])) == ("NVIDIA A100-SXM4-80GB", 4, 4)
    assert len(list(tmp_path.glob("*/even_kernel.cubin"))) == 8
    failed = tune("explain", "--call", f"{LIBRARY}:fails", "--device", "a100")
    assert (failed.exit_code, "raised RuntimeError: no luck at" in " ".join(failed.stderr.split())) == (2, True)
