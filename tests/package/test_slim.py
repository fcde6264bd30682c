"""What runs where PyTorch and Triton are, and no package of `blocktune[tune]`."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from blocktune.cli.__main__ import NEEDED
from blocktune.db.exchange.document import frozen_document, save_document
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HIDING = """
import os, sys

HIDDEN = os.environ["HIDDEN"].split()

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *places):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, *places)

sys.meta_path[:] = map(Hiding, sys.meta_path)
"""
"""What Python runs at its start, in child processes too: finders that do not find the packages in a variable."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a process, and of its children, that finds none of the packages."""
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    folders = {"BLOCKTUNE_DB": str(tmp_path / "store.db"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    python = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore"}
    return os.environ | folders | python | {"HIDDEN": " ".join((*NEEDED, "pynvml"))}


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def printed(environment: dict[str, str], program: str) -> str:
    """Return what a program prints, which must succeed."""
    done = run(environment, "-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_packages_that_a_command_asks_for_are_those_of_the_extra() -> None:
    assert {Requirement(line).name for line in PROJECT["optional-dependencies"]["tune"]} == set(NEEDED)


def test_the_runtime_brings_torch_triton_and_what_reads_the_driver() -> None:
    names = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert names == {"nvidia-ml-py", "torch", "triton", "typing-extensions"}


ATTENTION = """
import torch
from torch.nn.functional import scaled_dot_product_attention as expected
import blocktune, blocktune.flash_attn as flash_attn

q, k, v = torch.randn(3, 2, 4, 64, 32)
torch.testing.assert_close(blocktune.attention(q, k, v, is_causal=True), expected(q, k, v, is_causal=True))
rows = [x.transpose(1, 2) for x in (q, k, v)]
torch.testing.assert_close(flash_attn.flash_attn_func(*rows).transpose(1, 2), expected(q, k, v))
assert "blocktune" in torch.nn.attention.list_flash_attention_impls()
torch.nn.attention.activate_flash_attention_impl("blocktune")
torch.testing.assert_close(expected(q, k, v), blocktune.attention(q, k, v))
shape = blocktune.AttentionShape(batch=2, num_heads=32, seqlen_q=8192, head_dim=64)
print(blocktune.best_config(shape, "h200").rung)
"""


def test_attention_flash_attn_and_the_provider_run(environment: dict[str, str]) -> None:
    assert printed(environment, ATTENTION).split() == ["exact"]


AUTOTUNE = """
import logging, sys, torch
from tests.support.fakes.fake_triton import FakeHookedClock
from tests.support.libraries.autotuned_kernels import CONFIGS, scale_kernel
from tests.support.libraries.calls import as_on_an_h200
from blocktune.kernels.hardware.device import device_named
from blocktune.tuner.drop_in import decide, tune_call
from blocktune.tuner.drop_in.autotune import autotune
from blocktune.tuner.launches.launch_bench import LaunchTools

logging.basicConfig(format="%(message)s")
decide.current_device = lambda: device_named("h200")
if __name__ == "__main__":
    with as_on_an_h200() as gpu:
        gpu.time_us = lambda launch: 100.0 + abs(launch.arguments["BLOCK"] - 256)
        tools = tune_call.DropInMachine(launches=LaunchTools(lambda l2: FakeHookedClock(gpu), lambda: None))
        tune_call.machine = lambda: tools
        kernel = autotune(CONFIGS, ["n"], expand=int(sys.argv[1]))(scale_kernel.fn)
        kernel[(4,)](torch.ones(1000), 1000, 2.0)
    (choice,) = kernel.kernel.choices.values()
    print(choice.rung, kernel.best_config.kwargs["BLOCK"], len(gpu.timed))
"""


def tuned(environment: dict[str, str], folder: Path, expand: int = 0) -> subprocess.CompletedProcess[str]:
    """Tune a kernel on a GPU that there is none of, in a process whose children import its program."""
    (folder / "program.py").write_text(AUTOTUNE)
    return run(environment, str(folder / "program.py"), str(expand))


@pytest.mark.parametrize("expand", [0, 4])
def test_a_kernel_is_tuned_for_its_process_alone(environment: dict[str, str], tmp_path: Path, expand: int) -> None:
    done = tuned(environment, tmp_path, expand)
    assert done.stdout.split()[:2] == ["exact", "256"], done.stderr
    said = [line for line in done.stderr.splitlines() if 'pip install "blocktune[tune]"' in line]
    assert ["without a store of its results" in line for line in said] == [False] * bool(expand) + [True]
    assert not (tmp_path / "store.db").exists()


def test_the_first_look_up_in_a_frozen_file_needs_no_sqlite(environment: dict[str, str], tmp_path: Path) -> None:
    assert tuned(environment | {"HIDDEN": ""}, tmp_path).stdout.split()[:2] == ["exact", "256"]
    with ResultStore.open(tmp_path / "store.db") as store:
        save_document(frozen_document(device_named("h200"), store.kernel_bests()), tmp_path / "frozen.json")
    hidden = {"HIDDEN": f"{environment['HIDDEN']} sqlite3 _sqlite3"}
    frozen = {"BLOCKTUNE_FROZEN_KERNELS": str(tmp_path / "frozen.json")}
    assert tuned(environment | hidden | frozen, tmp_path).stdout.split() == ["frozen", "256", "0"]


NAMES = """
import blocktune
for name in blocktune.__all__:
    try:
        getattr(blocktune, name)
    except ImportError as error:
        print(name, type(error).__name__, error)
blocktune.install()
"""


def test_a_name_that_needs_more_says_what(environment: dict[str, str]) -> None:
    lines = printed(environment, NAMES).splitlines()
    assert [line.split()[0] for line in lines] == ["GuidedSampler", "tune", "tune_schedule"]
    assert {line.split()[1] for line in lines} == {"MissingPackageError"}
    assert ["is not installed. Install it: pip install " in line for line in lines] == [True] * 3


def test_frames_need_an_extra_of_their_own(environment: dict[str, str]) -> None:
    done = run(environment, "-c", "import blocktune; blocktune.load_trials()")
    assert done.stderr.splitlines()[-1].endswith('Install it: pip install "blocktune[frames]"')


def test_a_command_names_what_is_missing(environment: dict[str, str]) -> None:
    done = run(environment, "-m", "blocktune", "run", "--seq", "8192", "--dim", "64")
    assert done.returncode == 2
    assert done.stderr == (
        f'error: The command line needs {", ".join(NEEDED)}. Install it: pip install "blocktune[tune]"\n'
    )
