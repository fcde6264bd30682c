"""Every example runs here as a user runs it, in seconds and without a GPU, and prints what it promises."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PUBLIC = ("blocktune.integrations", "blocktune.tuner.lab.sweep_file")
"""Modules that examples may import from; a sweep as a frame is `blocktune.load_sweep`, its trials are of the lab."""
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())
PRINTED = {
    "autotuned_attention.py": r"__main__:attention_kernel HEAD_DIM=128 .*num_stages=3\n(?s:.*)blocks",
    "autotuned_grouped_matmul.py": r"__main__:grouped_matmul_kernel .* EXPERTS=8 num_warps=8 .*\n(?s:.*)blocks",
    "autotuned_matmul.py": r"__main__:matmul_kernel BLOCK_M=128 .*num_stages=3\n(?s:.*)blocks",
    "autotuned_softmax.py": r"largest difference: (?P<difference>\S+)\n12 configs, tuned for each value of columns\n"
    r"__main__:softmax_kernel columns=2000 .* on NVIDIA H200: 12 configs of its list\n(?s:.*)It is no time",
    "data_parallel.py": r"ddp: losses .*\nfsdp2: losses (?s:.*\naccelerate: .*\nlightning: .*\n)"
    r"largest difference: (?P<difference>\S+)",
    "explain_config.py": r"(?s)bf16 causal: \w+: flash_.*\nPredicted [\d,.]+ µs.*\nwith 64 registers per thread: \d",
    "hugging_face.py": r"attention: blocktune\nlargest difference of the logits: (?P<difference>\S+)\n",
    "read_sweep.py": r"b2 h32 s8192 d64 bf16 on NVIDIA H200: 576 ok\n.*config\n +[\d,.]+ +1\.000 ",
    "swap_sdpa.py": r"largest difference: (?P<difference>\S+)\n.*: \w+: ",
}
"""By the name of an example, what its output holds."""


def run(script: Path, folder: Path) -> str:
    """What an example prints; it finds no database of the user's and leaves none."""
    environment = os.environ | {"BLOCKTUNE_DB": str(folder / "empty.db"), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        [sys.executable, script], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_example_is_run() -> None:
    assert [script.name for script in SCRIPTS] == sorted(PRINTED)


@pytest.mark.few(2)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_prints_what_it_promises(script: Path, tmp_path: Path) -> None:
    if script.name == "hugging_face.py":
        pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")
    printed = run(script, tmp_path)
    found = re.search(PRINTED[script.name], printed)
    assert found, printed
    assert float(found.groupdict().get("difference", "0")) < 1e-4


def test_without_transformers_the_example_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    runpy.run_path(str(EXAMPLES / "hugging_face.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith("skipped: this example needs transformers. Install it")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_says_how_it_is_run(script: Path) -> None:
    assert f"python examples/{script.name}" in script.read_text().split('"""')[1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_imports_public_names_alone(script: Path) -> None:
    private = re.findall(r"^ *from (blocktune\.\S+) import", script.read_text(), re.MULTILINE)
    assert [name for name in private if name not in PUBLIC] == []
