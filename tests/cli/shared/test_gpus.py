"""`--gpus`: many shapes on several GPUs that are not there, by workers that tune nothing."""

import dataclasses
import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from blocktune.kernels.hardware import device
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.tuner.fleet import local_executor
from tools import program, python

GRID = ("run", "--grid", "seq=512 dim=64 batch=1,2,3")


def gpu(number: int, name: str = "h200") -> DeviceSpec:
    return dataclasses.replace(device_named(name), uuid=f"GPU-{number}", source="driver")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the workers do; two H200 and an A100 are here."""
    path = tmp_path / "script.json"
    path.write_text("{}")
    command = (*program("workers.fake_job_worker"), str(tmp_path))
    monkeypatch.setattr(local_executor, "worker_command", lambda: command)
    monkeypatch.setattr(device, "present_devices", lambda: (gpu(0), gpu(1, "a100"), gpu(2)))
    return path


def used(script: Path) -> set[str]:
    return {line.split()[0] for line in script.with_name("log").read_text().splitlines()}


def test_all_alike_gpus_share_many_shapes(tune, script: Path) -> None:
    script.write_text(json.dumps({"2": "0.3", "3": "0.3"}))
    result = tune(*GRID)
    assert result.exit_code == 0, result.stderr
    assert used(script) == {"GPU-0", "GPU-2"}
    assert "assumed --heads (heads * dim = 2048) where they are not given" in result.stderr
    assert "NVIDIA A100-SXM4-80GB is left out: unlike NVIDIA H200" in result.stderr
    assert "3 shapes on 2 GPUs" in result.stderr
    assert "1/3 b3 h32 s512 d64 bf16 on GPU 0" in result.stderr
    assert sorted(result.stdout.splitlines()) == [
        f"shape {batch}: measured 812.5 µs flash_fwd 128x64 w4 s3; 4 ok in 0.1 s" for batch in (1, 2, 3)
    ]


def test_the_json_has_the_runs_in_the_order_of_the_shapes(tune, script: Path) -> None:
    data = json.loads(tune(*GRID, "--json").stdout)
    assert [run["shape"]["label"] for run in data["runs"]] == ["shape 1", "shape 2", "shape 3"]


def test_a_shape_that_costs_its_workers_fails_and_the_others_have_results(tune, script: Path) -> None:
    script.write_text(json.dumps({"2": "die"}))
    result = tune(*GRID)
    assert result.exit_code == 3
    assert len(result.stdout.splitlines()) == 2
    assert "died of b2 h32 s512 d64 bf16, which another worker takes over" in result.stderr
    assert "error: b2 h32 s512 d64 bf16: 3 workers died of it" in result.stderr
    assert "1 of the shapes got no result" in result.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--gpus", 0), 2),
        (("--gpus", "some"), 2),
        (("--gpus", 3), 4),
        (("--gpus", 2, "--device", "a100"), 4),
        (("--gpus", 1, "--device", "b200"), 4),
    ],
)
def test_gpus_that_are_not_here_cannot_be_had(tune, script: Path, words: tuple[object, ...], code: int) -> None:
    result = tune(*GRID, *words)
    assert result.exit_code == code
    assert "`--gpus" in result.stderr


ON_ONE = [
    (*GRID, "--gpus", 1),
    (*GRID, "--device", "a100"),
    ("run", "--grid", "seq=512 dim=64"),
    ("run", "--seq", 512, "--dim", 64, "--gpus", "all"),
]


@pytest.mark.parametrize("words", ON_ONE, ids=str)
def test_one_gpu_or_one_shape_takes_no_further_process(
    tune, script: Path, words: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tuned(shape: object, **given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("blocktune.tuner.search.tune.tune", tuned)
    assert tune(*words).exit_code == 130
    assert not script.with_name("log").exists()


SHARED_RUN = """
import dataclasses, sys
from blocktune.cli.main import main
from blocktune.kernels.hardware import device
from blocktune.tuner.fleet import local_executor
from tools import program

here = [dataclasses.replace(device.device_named("h200"), uuid=f"GPU-{number}", source="driver") for number in (0, 1)]
device.present_devices = lambda: tuple(here)
folder = sys.argv[1]
local_executor.worker_command = lambda: (*program("workers.fake_job_worker"), folder)
sys.argv[1:] = ["run", "--grid", "seq=512 dim=64 batch=1,2,3", "--db", folder + "/store.db"]
main()
"""


@pytest.mark.parametrize(("action", "presses"), [("wait", 1), ("deaf", 2)])
def test_ctrl_c_ends_all_workers(tmp_path: Path, action: str, presses: int) -> None:
    (tmp_path / "script.json").write_text(json.dumps({"2": action, "3": action}))
    command = [*python(SHARED_RUN), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        pids = _processes(tmp_path / "ready", 2)
        process.send_signal(signal.SIGINT)
        if presses == 2:
            _processes(tmp_path / "heard", 2)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert len(out.splitlines()) == (2 if presses == 1 else 0)
    assert "interrupted" in err
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def _processes(file: Path, count: int) -> list[int]:
    """The processes that have written this many lines."""
    deadline = time.monotonic() + 120
    while not file.exists() or file.read_text().count("\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(line) for line in file.read_text().splitlines()]
