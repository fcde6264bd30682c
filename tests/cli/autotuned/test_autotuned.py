"""The commands know kernels that are not ours: by `module:function`, tuned here or by their program."""

import base64
import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktune.db.records.records import Outcome
from blocktune.kernels.base.kernel import CompileSpec
from blocktune.runtime.autotuned.config import LaunchConfig, LaunchProblem
from blocktune.runtime.autotuned.launches import Kind, Launches, append_launches
from blocktune.tuner.compile.answers import Compiled
from blocktune.tuner.compile.compiler import compile_here
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.drop_in.request import LaunchRequest
from blocktune.tuner.profile import target
from blocktune.tuner.profile.counters import TIME
from tests.support.fakes.fake_triton import FakeGpu, Launch
from tests.support.libraries import autotuned_kernels
from tests.support.libraries.autotuned_kernels import scale_kernel
from tests.support.models.counters import raw_page
from tests.support.triton_modes import compiled_here
from tests.tuner.drop_in.conftest import H200
from tests.tuner.profile.test_nsight_compute import install

pytestmark = compiled_here

KERNEL = "tests.support.libraries.autotuned_kernels:scale_kernel"
ARGS = ("--args", "tests.support.libraries.autotuned_kernels:scale_arguments")


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def tuned(tune: Any) -> Any:
    """Commands on a store in which the kernel was tuned for two sizes."""
    done = tune("run", KERNEL, *ARGS, "--grid", "n=1000,2048")
    assert done.exit_code == 0, done.output
    tune.said = words(done.output)
    return tune


def test_a_kernel_is_tuned_without_its_program(tuned: Any, gpu: FakeGpu) -> None:
    winner = "measured 110.0 µs scale_kernel BLOCK=256 num_stages=3 num_warps=2, 2.164x (2.164 to 2.164)"
    assert f"n=1000 (fp32 float) 8 programs: {winner} over the default; 6 ok" in tuned.said
    assert tuned.said.count(winner) == 2
    timed = len(gpu.timed)
    (again,) = json.loads(tuned("run", KERNEL, *ARGS, "--grid", "n=1000", "--json").stdout)["runs"]
    assert (again["shape"]["kernel"], again["shape"]["key"]["n"]) == (KERNEL, 1000)
    assert again["best"]["reason"] == "found by an earlier run"
    assert len(gpu.timed) == timed


def test_a_device_that_is_not_here_gets_a_table_of_the_list(tune: Any, gpu: FakeGpu) -> None:
    command = ("run", KERNEL, *ARGS, "--grid", "n=1000,2048", "--param", "BLOCK=64,128", "--device", "a100")
    shown = tune(*command)
    assert shown.exit_code == 0, shown.output
    assert "no NVIDIA A100-SXM4-80GB in this machine: every config is compiled for it" in words(shown.stderr)
    for n in (1000, 2048):
        assert f"{KERNEL} n={n} (fp32 float) on NVIDIA A100-SXM4-80GB: 2 configs of its list" in words(shown.stdout)
    assert "It is no time." in shown.stdout
    tables = json.loads(tune(*command, "--json").stdout)["tables"]
    assert [[row["parameters"]["BLOCK"] for row in table["configs"]] for table in tables] == [[64, 128]] * 2
    assert not gpu.launches


def test_arguments_of_a_size_are_made_at_its_turn(tune: Any, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    make, timed = autotuned_kernels.scale_arguments, list[int]()

    def noted(n: int) -> Any:
        timed.append(len(gpu.timed))
        return make(n)

    monkeypatch.setattr(autotuned_kernels, "scale_arguments", noted)
    assert tune("run", KERNEL, *ARGS, "--grid", "n=1000,2048").exit_code == 0
    assert timed[0] == 0 < timed[1]


def test_choices_take_the_place_of_the_list(tune: Any, gpu: FakeGpu) -> None:
    choices = ("--param", "BLOCK=256,1024", "--param", "num_warps=1,2")
    found = json.loads(tune("run", KERNEL, *ARGS, *choices, "--json").stdout)
    assert found["best"]["config"]["parameters"] == {"BLOCK": 256, "num_stages": 3, "num_warps": 1}
    assert {launch.arguments["BLOCK"] for launch in gpu.timed} == {256, 1024}
    plain = "tests.support.libraries.autotuned_kernels:scaled"
    assert "has no list of configs to choose from. Name choices" in words(tune("run", plain, *ARGS).output)


def test_a_kernel_of_a_users_own_folder_is_found(tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_kernels_of_a_test.py").write_text(
        "import torch, triton\nfrom triton import language as tl\n"
        "@triton.jit\ndef fill(x, n, BLOCK: tl.constexpr):\n"
        "    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    tl.store(x + offsets, 1.0, offsets < n)\n"
        "def arguments(n):\n    return {'x': torch.zeros(n), 'n': n, 'grid': lambda meta: (n // meta['BLOCK'],)}\n"
    )
    monkeypatch.chdir(tmp_path)
    own = ("own_kernels_of_a_test:fill", "--args", "own_kernels_of_a_test:arguments", "--param", "BLOCK=128,256")
    done = tune("run", *own, "--grid", "n=512,2048", "--json")
    assert done.exit_code == 0, done.exception or done.output
    found = json.loads(done.stdout)["runs"]
    sys.modules.pop("own_kernels_of_a_test")
    assert [each["shape"]["key"]["n"] for each in found] == [512, 2048]  # the sizes are its key
    assert [each["best"]["config"]["parameters"]["BLOCK"] for each in found] == [256, 256]


def test_one_call_is_shown_like_a_shape(tune: Any) -> None:
    shown = words(tune("run", KERNEL, *ARGS, "--trials", 3, "--sampler", "tpe", "--seed", 1, "-v").output)
    assert "scale_kernel n=1000 (fp32 float) 8 programs on NVIDIA H200, measured, sustained" in shown
    assert "occupancy of the winner" in shown
    assert "6 configs can run; tried: 3 ok" in shown
    assert "the search ended at its number of configs" in shown


def test_a_search_is_told_how_to_go(tune: Any, tmp_path: Path) -> None:
    study = tmp_path / "study.db"
    how = ("--time-budget", 60, "--exhaustive", "--regime", "burst", "--study", study, "--expand", 2)
    found = json.loads(tune("run", KERNEL, *ARGS, *how, "--json").stdout)
    assert (found["environment"]["regime"], sum(found["outcomes"].values())) == ("burst", 8)
    assert study.exists()


def test_sizes_come_from_a_file_in_parts(tune: Any, tmp_path: Path) -> None:
    sizes = tmp_path / "sizes.toml"
    sizes.write_text("[small]\nn = [1000, 2048]\n[large]\nn = 4096\n")
    done = tune("run", KERNEL, *ARGS, "--shapes", sizes, "--shard", "1/2", "--json")
    assert [run["shape"]["key"]["n"] for run in json.loads(done.stdout)["runs"]] == [1000, 4096]
    sizes.write_text("[small]\nn = []\n")
    assert "A size must be a number or a text" in words(tune("run", KERNEL, *ARGS, "--shapes", sizes).output)


def test_sizes_come_from_calls_that_had_to_wait(tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "launches.jsonl"
    monkeypatch.setenv("BLOCKTUNE_LAUNCHES", str(path))
    for n, misses in ((1000, 1), (2048, 3), (4096, 0)):
        kind = Kind(H200.key, KERNEL, LaunchProblem.of({"n": n, "(types)": "fp32 float"}))
        append_launches(path, {kind: Launches(hits=5, misses=misses)})
    done = tune("run", KERNEL, *ARGS, "--from-misses", "--json")
    assert [run["shape"]["key"]["n"] for run in json.loads(done.stdout)["runs"]] == [2048, 1000]


def test_list_best_explain_verify_and_export_know_it(
    tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = ("--device", "h200")
    assert f"{KERNEL} n=1000 (fp32 float) 8 programs scale_kernel BLOCK=256" in words(tuned("list", *device).output)
    assert len(json.loads(tuned("list", "--json").stdout)["kernels"]) == 2
    best = words(tuned("best", KERNEL, *device).output)
    assert "winner scale_kernel BLOCK=256 num_stages=3 num_warps=2 110.0 µs" in best
    assert "2.164x (2.164 to 2.164) default scale_kernel BLOCK=128 num_stages=3 num_warps=2 238.0 µs" in best
    assert "BLOCK=512 num_stages=3 num_warps=4 ok" in best
    explained = words(tuned("explain", KERNEL, *device).output)
    assert "n=2048 (fp32 float) 16 programs on NVIDIA H200: scale_kernel BLOCK=256 num_stages=3" in explained
    assert "num_warps=2 took 110.0 µs" in explained
    assert "blocks/SM on compute capability 9.0" in explained
    assert "Its tensors hold 8,192 bytes. To move them once takes 0.0 us at the device's rate, 0% of the" in explained
    assert "no bank conflicts to count" in explained
    assert "instructions of a warp in all of the code share" in explained  # which has no loop
    assert re.search(r"global memory 2 \d+\.\d % ", explained)  # a load and a store
    (_, code) = json.loads(tuned("explain", KERNEL, *device, "--json").stdout)["winners"]
    assert code["instructions"]["total"]["global memory"] == 2
    assert code["shared_accesses"]["conflict_share"] == 0
    monkeypatch.setattr("blocktune.tuner.report.importance.FEWEST", 6)
    assert "among the fastest tenth: BLOCK " in words(tuned("explain", KERNEL, *device).output)
    changed = words(tuned("explain", KERNEL, *device, "--param", "BLOCK=1024").output)
    assert "with the values given, which were not measured" in changed
    assert "exact" in words(tuned("verify", KERNEL).output)
    configs = tmp_path / "configs.py"
    assert tuned("export", configs, "--format", "triton", *device).exit_code == 0
    assert KERNEL in configs.read_text()


def test_a_report_shows_it(tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vl_convert", reason="charts need vl-convert-python")
    monkeypatch.setenv("BLOCKTUNE_MISSES", "off")
    out = tmp_path / "report.html"
    assert json.loads(tuned("report", "--out", out, "--json").stdout)["kernels"] == 2
    code = re.search(r'id="data">([A-Za-z0-9+/=]*)<', out.read_text(encoding="utf-8"))
    assert code is not None
    shown = json.loads(gzip.decompress(base64.b64decode(code[1])))["kernels"]
    facts = [(each["kernel"], each["time_us"], each["configs"], each["importance"]) for each in shown]
    assert facts == [(KERNEL, 110.0, 6, "")] * 2  # six configs do not tell what decides
    assert {each["key"] for each in shown} == {"n=1000 (fp32 float) 8 programs", "n=2048 (fp32 float) 16 programs"}


def test_a_winner_is_measured_again_and_its_results_compared(tuned: Any, gpu: FakeGpu) -> None:
    timed = len(gpu.timed)
    done = words(tuned("verify", KERNEL, *ARGS, "--grid", "n=1000").output)
    assert "winner scale_kernel BLOCK=256 num_stages=3 num_warps=2 110.0 µs 110.0 µs 1.000" in done
    assert "default scale_kernel BLOCK=128 num_stages=3 num_warps=2 238.0 µs 238.0 µs 1.000" in done
    assert "the winner stays: " in done
    assert len(gpu.timed) > timed

    def wrong_with_few_warps(launch: Launch) -> None:
        launch.arguments["x"].fill_(launch.arguments["BLOCK"])

    gpu.effect = wrong_with_few_warps
    done = tuned("verify", KERNEL, *ARGS, "--grid", "n=1000")
    assert done.exit_code == 7
    assert "`x` differs from what the first config computes" in words(done.output)


def test_what_a_bucket_loses_is_said_for_each_of_its_sizes(
    tune: Any, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = autotune(autotuned_kernels.CONFIGS, ["n"], buckets={"n": "power_of_two"})(scale_kernel.fn)
    monkeypatch.setattr(autotuned_kernels, "grouped_kernel", grouped, raising=False)
    name = "tests.support.libraries.autotuned_kernels:grouped_kernel"
    gpu.time_us = lambda launch: 100.0 + abs(launch.arguments["BLOCK"] - launch.arguments["n"] // 4) / 4
    assert tune("run", name, *ARGS, "--grid", "n=1024").exit_code == 0
    done = words(tune("verify", name, *ARGS, "--grid", "n=1024,600").output)
    first, second = done.split("grouped_kernel n=600")
    assert "winner scale_kernel BLOCK=256 num_stages=3 num_warps=2 100.0 µs" in first
    assert "the winner stays: " in first
    assert "the winner is now scale_kernel BLOCK=128 num_stages=3 num_warps=2: " in second
    assert "the stored one takes 19.9% longer" in second


def test_another_source_serves_no_call(tuned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktune.kernels.base.source_hash.hash_of_sources", lambda function: "0" * 16)
    found = json.loads(tuned("verify", KERNEL, "--json").stdout)
    assert {each["serves_as"] for each in found["kernels"]} == {"nothing: the source is 0000000000000000 now"}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("best",), "A shape needs `--seq` and `--dim`, but neither is given"),
        (("best", "a:b", "--seq", 8, "--dim", 64), "is about a shape or about a kernel, but got"),
        (("best", "no:such"), "No kernel no:such was tuned on"),
        (("explain", "no:such"), "No kernel no:such was tuned on"),
        (("run", KERNEL), "needs input tensors. Name the function that makes them: `--args"),
        (("run", KERNEL, "--seq", 8), "`MODULE:KERNEL` brings the shapes, but --seq is given too"),
        (("run", "no.module:f", *ARGS), "no.module:f cannot be imported"),
        (("run", KERNEL, "--args", "json:nothing"), "json:nothing cannot be imported"),
        (("run", KERNEL, "--args", "json:dumps"), "takes the sizes of --grid by name, but not no sizes"),
        (("run", KERNEL, *ARGS, "--grid", "m=3"), "by name, but not m=3"),
        (("run", KERNEL, *ARGS, "--grid", "n"), "Choices are words NAME=VALUE,VALUE"),
        (
            ("run", KERNEL, *ARGS, "--kernel", "flash_fwd"),
            f"--kernel: not supported here. {KERNEL} names the kernel.",
        ),
        (("run", KERNEL, *ARGS, "--from-misses"), f"which counts no miss of {KERNEL} on NVIDIA H200"),
        (("run", KERNEL, *ARGS, "--device", "a100", "--grid", "n=1000", "--trials", "3"), "compiled and not searched"),
        (("run", KERNEL, *ARGS, "--device", "a100", "--grid", "n=1", "--objective", "energy"), "--objective: not supp"),
        (("run", KERNEL, *ARGS, "--executor", "ray", "--device", "any"), "is a file. Name a server by --db."),
        (("run", KERNEL, *ARGS, "--grid", "n=1", "--from-misses"), "Sizes come from one place, but got --grid and"),
        (("run", KERNEL, "--args", "platform:machine"), "returns the kernel's arguments by name and its `grid`"),
    ],
)
def test_wrong_use_is_refused(tune: Any, command: tuple[Any, ...], message: str) -> None:
    done = tune(*command)
    assert done.exit_code in (2, 3, 6), done.output
    assert message in words(done.output)


SIGNATURE = ("--signature", "*fp32,i32,fp32", "--cc", "9")


def test_every_config_of_a_list_is_a_row_without_a_gpu(tune: Any) -> None:
    result = tune("occupancy", KERNEL, *SIGNATURE)
    assert result.exit_code == 0, result.output
    configs = list(autotuned_kernels.scale_kernel.configs)
    assert f"compute capability 9.0: {len(configs)} configs of its list" in result.stdout
    found = json.loads(tune("occupancy", KERNEL, *SIGNATURE, "--json").stdout)["configs"]
    assert [each["parameters"]["BLOCK"] for each in found] == [config.kwargs["BLOCK"] for config in configs]
    assert all(each["resources"]["registers"] > 0 for each in found)
    (one,) = (each for each in found if each["parameters"] == found[0]["parameters"])
    choice = ("--param", f"BLOCK={one['parameters']['BLOCK']}", "--warps", one["parameters"]["num_warps"])
    single = json.loads(tune("occupancy", KERNEL, *SIGNATURE, *choice, "--json").stdout)
    assert single["blocks_per_sm"] == one["blocks_per_sm"]


def test_a_config_that_does_not_compile_is_a_row_with_its_reason(tune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(spec: CompileSpec, cc: tuple[int, int]) -> Compiled:
        if 256 in spec.constexprs.values():
            return Compiled(outcome=Outcome.COMPILE_ERROR, error="too many registers")
        return compile_here(spec, cc)

    monkeypatch.setattr("blocktune.tuner.compile_server.compile_ahead.has_code", lambda *_: True)
    monkeypatch.setattr("blocktune.tuner.compile_server.compile_ahead.compile_here", refuse)
    found = json.loads(tune("occupancy", KERNEL, *SIGNATURE, "--json").stdout)["configs"]
    errors = {each["parameters"]["BLOCK"] for each in found if "error" in each}
    assert errors == {256}
    assert "too many registers" in tune("occupancy", KERNEL, *SIGNATURE).stdout


def test_a_profile_shows_what_ncu_counts_of_the_winner(
    tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("profile", KERNEL, *ARGS, "--grid", "n=1000")
    elsewhere = tuned(*command, "--device", "a100")
    assert elsewhere.exit_code == 4
    assert "so no counters of tests.support" in words(elsewhere.stderr)
    monkeypatch.setattr("blocktune.cli.explain.kernel_profile.is_present", lambda device: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Nsight Compute is missing: `ncu` is not on the PATH" in words(tuned(*command, "--device", "h200").stderr)
    told = install(tmp_path, monkeypatch, raw_page([("scale_kernel", {TIME: ("ns", "1,500")})]))
    shown = tuned(*command, "--device", "h200")
    assert shown.exit_code == 0, shown.output
    assert f"scale_kernel counted {TIME} 1.50" in words(shown.stdout).replace("─", "").replace("  ", " ")
    task = json.loads(json.loads(told.read_text())[-1])
    assert task["config"]["parameters"] == {"BLOCK": 256, "num_stages": 3, "num_warps": 2}
    assert LaunchRequest.from_json(task["request"]).sizes == (("n", 1000),)
    unknown = tuned("profile", KERNEL, *ARGS, "--grid", "n=999999", "--device", "h200")
    assert "No winner of scale_kernel n=999999 is known on NVIDIA H200" in words(unknown.stderr)


def test_the_process_under_ncu_has_one_launch_in_sight(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda: seen.append(len(gpu.launches)))
    request = LaunchRequest(kernel=KERNEL, arguments=ARGS[1], sizes=(("n", 1000),))
    config = LaunchConfig(KERNEL, (("BLOCK", 512), ("num_stages", 3), ("num_warps", 4)))
    task = {"request": request.to_json(), "config": config.to_json()}
    monkeypatch.setattr(sys, "argv", ["target", json.dumps(task)])
    target.main()
    assert seen == [1, 2]
    assert [launch.arguments["BLOCK"] for launch in gpu.launches] == [512, 512]
